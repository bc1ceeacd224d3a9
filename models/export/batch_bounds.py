"""Batches that a model's graph is of, where its forward asks how large they are.

A forward that compares the size of its batch with a number is traced on the one side of it that the
example is on. torch.export refuses that of a batch of any size, and says which sizes it would be
right for.
"""

import re

from torch import fx

# (the smallest batch, the largest or 0 for any)
Sizes = tuple[int, int]
ANY: Sizes = (1, 0)
KEY = "batch_sizes"  # in the `meta` of a graph

_FIX = re.compile(r"^\s*batch = Dim\('batch'(?:, min=(\d+))?(?:, max=(\d+))?\)\s*$", re.MULTILINE)
_MOST_LINES = 3


def sizes_of(graph: fx.GraphModule) -> Sizes:
    """Return the sizes of the batches that a graph made by `export` is of."""
    sizes: Sizes = graph.meta.get(KEY, ANY)
    return sizes


def suggested(error: Exception, sizes: Sizes) -> Sizes | None:
    """Return the narrower `sizes` that torch.export says its trace is right for; None where it does
    not say a range, as of multiples, or says nothing new."""
    fix = _FIX.search(str(error))
    if fix is None:
        return None
    smallest, largest = (int(number) if number else None for number in fix.groups())
    limits = [limit for limit in (largest, sizes[1]) if limit]
    narrower = (max(smallest or 1, sizes[0]), min(limits, default=0))
    return narrower if narrower != sizes else None


def said_of(error: Exception) -> str:
    """Return what torch or a forward complains of in one line: with torch's lines of constraints,
    where a batch of any size violates some."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first, *others = lines or ["no message"]
    said = (line.removeprefix("- ") for line in others if line.startswith("- "))
    # What follows is advice on calls that nobody makes here.
    constraints = list(dict.fromkeys(line.partition(". If")[0].rstrip(".") for line in said))
    if first.startswith("Constraints violated") and constraints:
        more = len(constraints) - _MOST_LINES
        first = f"{first.partition(' For more')[0]} {'; '.join(constraints[:_MOST_LINES])}"
        first += f"; and {more} more" if more > 0 else ""
    return f"{type(error).__name__}: {first}"
