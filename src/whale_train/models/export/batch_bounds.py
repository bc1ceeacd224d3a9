"""Sizes of the batches that a model's graph holds for, where its forward asks for the size.

A forward that compares the size of its batch with a number is traced on the side of it that the
example is on. torch.export refuses such a trace for batches of any size, and says for which sizes
it would be right.
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
    """Return the (smallest, largest) batch that a graph of `export` holds for; 0 for no largest."""
    sizes: Sizes = graph.meta.get(KEY, ANY)
    return sizes


def suggested(error: Exception, sizes: Sizes) -> Sizes | None:
    """Return the sizes, narrower than `sizes`, for which torch.export says that its trace is right.

    Return None where it says no range (as for multiples), or nothing that narrows `sizes`.
    """
    fix = _FIX.search(str(error))
    if fix is None:
        return None
    smallest, largest = (int(number) if number else None for number in fix.groups())
    limits = [limit for limit in (largest, sizes[1]) if limit]
    narrower = (max(smallest or 1, sizes[0]), min(limits, default=0))
    return narrower if narrower != sizes else None


def said_of(error: Exception) -> str:
    """Return the complaint of torch or of a forward in one line, with the type of the error.

    Where a batch of any size violates constraints, torch's first three lines about them are added.
    """
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
