"""The check that a machine has room for the memory that malloc keeps after its ranks free it.

A plan predicts, for a CPU process, the bytes that its tensors need. glibc keeps freed blocks for
later ones, and those between blocks that live are holes of which no plan knows (docs/adr/021).
"""

from collections.abc import Iterable

from whale_train.quantities import in_bytes
from whale_train.strategies.plan.plan import Decision, Plan

# The environment variable, read by glibc, of the size from which on blocks are given back.
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"

# Holes as a part of the bytes needed: the most of the pairs in benchmarks/memory_accuracy.py.
HOLES = 0.35


def has_room(plan: Plan, ranks: Iterable[int], memory_bytes: int) -> bool:
    """Return whether a machine of `memory_bytes` holds these `ranks` of the plan with the holes
    that malloc leaves."""
    return needed_bytes(plan, ranks) * (1 + HOLES) <= memory_bytes


def needed_bytes(plan: Plan, ranks: Iterable[int]) -> float:
    """Return the bytes that the tensors of these `ranks` need."""
    return sum(plan.ranks[rank].memory_bytes.total for rank in ranks)


def explain_fragmentation(plan: Plan, memory_bytes: int) -> tuple[Decision, ...]:
    """Return the note for a plan whose ranks, all on one machine of `memory_bytes`, leave no room
    for holes; nothing where they do."""
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
