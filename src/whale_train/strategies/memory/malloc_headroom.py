"""The check that a machine has room for the memory that malloc retains after its ranks free it.

A plan predicts the bytes of the tensors of a CPU process. glibc retains freed blocks for later
allocations, and those between live blocks are holes that no plan predicts (docs/adr/021).
"""

from collections.abc import Iterable

from whale_train.quantities import in_bytes
from whale_train.strategies.plan.plan import Decision, Plan

# The environment variable of glibc's threshold: freed blocks of this size or more go back to the
# system.
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"

# Holes as a fraction of the bytes needed: the largest in benchmarks/memory_accuracy.py.
HOLES = 0.35


def has_room(plan: Plan, ranks: Iterable[int], memory_bytes: int) -> bool:
    """Return True if a machine of `memory_bytes` holds `ranks` of the plan together with the holes
    that malloc leaves."""
    return needed_bytes(plan, ranks) * (1 + HOLES) <= memory_bytes


def needed_bytes(plan: Plan, ranks: Iterable[int]) -> float:
    """Return the bytes that the tensors of `ranks` need."""
    return sum(plan.ranks[rank].memory_bytes.total for rank in ranks)


def explain_fragmentation(plan: Plan, memory_bytes: int) -> tuple[Decision, ...]:
    """Return a note if the ranks of `plan`, all on one machine of `memory_bytes`, leave no room for
    malloc's holes; () if they do."""
    ranks = range(plan.world_size)
    if has_room(plan, ranks, memory_bytes):
        return ()
    needed = needed_bytes(plan, ranks)
    reason = (
        f"ranks need {in_bytes(needed)} of {in_bytes(memory_bytes)} they share, and what malloc "
        f"keeps of freed blocks has been up to {HOLES:.0%} more: blocks of 64 KiB and more "
        "go back to the system instead, for a tenth to a fifth more processor time"
    )
    return (Decision("memory", "freed blocks given back", "", reason),)
