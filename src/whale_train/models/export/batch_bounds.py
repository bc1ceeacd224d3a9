"""The batch sizes for which a model's graph is valid, where its forward asks for the batch size.

A forward that compares its batch size with a number is traced on one side of the comparison, the
example's. torch.export refuses such a trace for batches of any size, and suggests the sizes for
which it would be valid.
"""

import re

from torch import fx

# (the smallest batch size, the largest or 0 for any)
Sizes = tuple[int, int]
ANY: Sizes = (1, 0)
KEY = "batch_sizes"  # in the `meta` of a graph

_FIX = re.compile(r"^\s*batch = Dim\('batch'(?:, min=(\d+))?(?:, max=(\d+))?\)\s*$", re.MULTILINE)
_MOST_LINES = 3


def sizes_of(graph: fx.GraphModule) -> Sizes:
    """Return the (smallest, largest) batch size for which a graph of `export` is valid; the largest
    is 0 for no bound."""
    sizes: Sizes = graph.meta.get(KEY, ANY)
    return sizes


def suggested(error: Exception, sizes: Sizes) -> Sizes | None:
    """Return the batch sizes, narrower than `sizes`, for which torch.export's `error` says that its
    trace is valid.

    Return None where the error suggests no range (as for multiples), or none narrower than `sizes`.
    """
    fix = _FIX.search(str(error))
    if fix is None:
        return None
    smallest, largest = (int(number) if number else None for number in fix.groups())
    limits = [limit for limit in (largest, sizes[1]) if limit]
    narrower = (max(smallest or 1, sizes[0]), min(limits, default=0))
    return narrower if narrower != sizes else None


def said_of(error: Exception) -> str:
    """Return the error of torch or of a forward as one line, with its type.

    Where batches of any size violate constraints, torch's first three lines about them are added.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first, *others = lines or ["no message"]
    said = (line.removeprefix("- ") for line in others if line.startswith("- "))
    # The rest of a line advises on calls that are not made here.
    constraints = list(dict.fromkeys(line.partition(". If")[0].rstrip(".") for line in said))
    if first.startswith("Constraints violated") and constraints:
        more = len(constraints) - _MOST_LINES
        first = f"{first.partition(' For more')[0]} {'; '.join(constraints[:_MOST_LINES])}"
        first += f"; and {more} more" if more > 0 else ""
    return f"{type(error).__name__}: {first}"
