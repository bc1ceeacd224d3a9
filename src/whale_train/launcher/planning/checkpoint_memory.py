"""Note in the plan the memory of asynchronous checkpoints, and the store that checkpoints are
copied to.

An asynchronous checkpoint is written while the steps continue, from a copy of the state.
"""

from whale_train.config import CheckpointOptions
from whale_train.errors import Fault
from whale_train.quantities import in_bytes
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.memory.malloc_headroom import needed_bytes
from whale_train.strategies.plan.plan import Decision, Plan
from whale_train.strategies.plan.training import Training

KEY = "checkpoint.async"


def state_bytes(profile: ModelProfile, training: Training, keeps_frozen: bool) -> float:
    """Return the size of a checkpoint's tensors in bytes: weights and optimizer states in fp32, and
    buffers.

    keeps_frozen: whether a checkpoint has the frozen weights.
    """
    trained = 4 * profile.parameter_elements * (1 + training.optimizer_states)
    return float(trained + profile.buffer_bytes + keeps_frozen * profile.frozen_bytes)


def explain_checkpoint_copies(
    options: CheckpointOptions,
    plan: Plan,
    profile: ModelProfile,
    training: Training,
    memory_bytes: int | None,
    faults: list[Fault],
    keeps_frozen: bool = True,
) -> list[Decision]:
    """Return a note for the plan on the copy of the state for asynchronous checkpoints; an empty
    list without such checkpoints.

    memory_bytes: memory that all ranks share, in bytes; None where ranks do not share one memory.
    faults: receives a fault where the copy does not fit into `memory_bytes`.
    keeps_frozen: whether a checkpoint has the frozen weights.
    """
    if options.every is None or not options.asynchronous:
        return []
    copied = state_bytes(profile, training, keeps_frozen)
    needed = needed_bytes(plan, range(plan.world_size))
    if memory_bytes is not None and needed + copied > memory_bytes:
        rule = (
            f"copies a state of {in_bytes(copied)} beside the {in_bytes(needed)} that ranks need, "
            f"and there are {in_bytes(memory_bytes)}"
        )
        remedy = "use checkpoint.async=false, which writes it without a copy"
        faults.append(Fault(KEY, "true", rule, remedy))
    reason = (
        "while its files are written, on the hosts of the ranks that save it, each byte on one; "
        "checkpoint.async=false takes none"
    )
    return [Decision(KEY, f"a copy of {in_bytes(copied)} of state", "", reason)]


def explain_store(options: CheckpointOptions) -> tuple[Decision, ...]:
    """Return a note for the plan on the store that checkpoints are copied to; nothing without a
    store."""
    if options.to is None:
        return ()
    saved = "each checkpoint, once it is whole" if options.saves else ""
    limit = "" if options.keep is None else f", of which the newest {options.keep} stay"
    weights = "the trained weights" if options.final else ""
    copied = f"{saved}{limit if saved else ''}{' and ' if saved and weights else ''}{weights}"
    reason = (
        f"{copied}; the launcher of rank 0's host copies beside the steps, and waits at the end"
    )
    return (Decision("checkpoint.to", f"copies go to {options.to}", "", reason),)
