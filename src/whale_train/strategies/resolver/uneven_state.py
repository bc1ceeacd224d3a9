"""Which strategies may cut the state of their copies in parts of unequal size (`state`), and which
do where equal parts do not fit (docs/adr/095)."""

from dataclasses import replace

from whale_train.errors import Fault, PlanError
from whale_train.strategies.grammar.state import StateCut
from whale_train.strategies.plan.plan import Decision
from whale_train.strategies.stage_memory.within_memory import ShortOfMemoryError
from whale_train.strategies.stages.placement import PlanningContext


def refuse_state(job: PlanningContext) -> None:
    """Raise PlanError where the strategy asks for parts of unequal size and cannot have them."""
    keeper = job.form.keeper
    if keeper is None or not keeper.state.is_uneven:
        return
    key, value = f"{keeper.path}.state", str(keeper.state)
    faults = []
    if rule := _why_not(job):
        faults.append(Fault(key, value, rule, "use auto or even"))
    count = len(keeper.state.parts)
    unlike = [len(groups) for groups in job.replicas if len(groups) != count]
    if keeper.state.mode == "listed" and unlike and not faults:
        rule = f"has {count} parts, and there are {unlike[0]} copies"
        faults.append(Fault(key, value, rule, f"give {unlike[0]} parts, or use memory"))
    if faults:
        raise PlanError(faults)


def with_uneven_state(job: PlanningContext) -> PlanningContext | None:
    """Return the strategy with parts of the state that follow memory; None where it does not leave
    that open, or cannot have such parts."""
    keeper = job.form.keeper
    if keeper is None or not keeper.zero or keeper.state.mode != "auto" or keeper.offloads:
        return None
    if not job.as_is or _why_not(job):
        return None
    uneven = replace(keeper, state=StateCut("memory"))
    return replace(job, form=replace(job.form, keeper=uneven))


def why_uneven(job: PlanningContext, error: ShortOfMemoryError) -> Decision:
    """Return the decision for parts of unequal size, given the `error` of equal ones."""
    keeper = job.form.keeper
    assert keeper is not None
    return Decision(f"{keeper.path}.state", "memory", "even", f"even {error.faults[0].rule}")


def _why_not(job: PlanningContext) -> str:
    """Return why the copies of `job` cannot keep parts of unequal size; '' if they can."""
    if any(stage.body for stage in job.form.stages):
        return "cuts the state of copies, and beside a split part each member keeps its own"
    if any(stage.shares_sequence for stage in job.form.stages):
        return "cuts the state of copies of samples, and here members divide positions as well"
    if any(stage.offload != "none" for stage in job.form.stages):
        return "has an engine of its own, which does not go with offload.activations"
    if not job.as_is and job.zero == 3:
        return "cuts the weights of a whole model, and this strategy runs parts of it"
    if job.profile.varies:
        return (
            f"reduces gradients in one order on all copies, and {job.profile.name} may run other "
            "modules in every call"
        )
    return ""
