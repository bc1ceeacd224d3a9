"""What checkpoints written beside the steps take of memory: a copy of the state."""

from whale_train.config import CheckpointOptions
from whale_train.errors import Fault
from whale_train.quantities import in_bytes
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.memory.malloc_headroom import needed_bytes
from whale_train.strategies.plan.plan import Decision, Plan
from whale_train.strategies.plan.training import Training

KEY = "checkpoint.async"


def state_bytes(profile: ModelProfile, training: Training, keeps_frozen: bool) -> float:
    """Return the bytes of a checkpoint's tensors: weights and the optimizer's states in fp32, and
    buffers; where it `keeps_frozen` weights, these too."""
    trained = 4 * profile.parameter_elements * (1 + training.optimizer_states)
    return float(trained + profile.buffer_bytes + keeps_frozen * profile.frozen_bytes)


def said_of_copies(
    options: CheckpointOptions,
    plan: Plan,
    profile: ModelProfile,
    training: Training,
    memory_bytes: int | None,
    faults: list[Fault],
    keeps_frozen: bool = True,
) -> list[Decision]:
    """Return what the plan says of the copy that its ranks make of what they save. Where all of
    them share `memory_bytes`, a copy without room is added to `faults`."""
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
