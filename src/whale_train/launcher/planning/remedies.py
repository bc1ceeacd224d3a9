"""Find the remedies for a model without a graph, and check each before it is shown.

Such a model runs as it is, in replicas if the batch may be split, which no graph can prove. The
check trains a few samples whole and in parts, as the run itself does before the first step.
"""

from collections.abc import Callable
from dataclasses import replace

from whale_train.config import Request
from whale_train.data.dataset import Dataset
from whale_train.errors import PlanError
from whale_train.launcher.planning.compare_samples import compared, is_unknown
from whale_train.strategies.grammar.nodes import Strategy, read_strategy
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.resolver.refusals import AS_IS

_ALONE = "use strategy=single, which runs the model as it is"
_VOUCHING = (
    "use strategy=single, or strategy=dp with model.samples_are_independent=true if its loss is a "
    "mean over samples"
)


def with_checked_remedies(
    error: PlanError,
    request: Request,
    dataset: Dataset,
    profile: ModelProfile,
    planned: Callable[[Strategy], Plan],
) -> PlanError:
    """Return `error` with checked remedies in place of the remedy `AS_IS`, which faults of models
    without a graph have.

    A remedy is a strategy that runs the model as it is, for which `planned` returns a plan and the
    model trains a batch of `dataset` equally whole and in parts.

    planned: maps a strategy to its plan; raises PlanError where the strategy has none.
    """
    if not any(fault.remedy == AS_IS for fault in error.faults):
        return error
    remedy = _remedy(request, dataset, profile, planned)
    faults = (replace(x, remedy=remedy if x.remedy == AS_IS else x.remedy) for x in error.faults)
    return PlanError(faults)


def _remedy(
    request: Request,
    dataset: Dataset,
    profile: ModelProfile,
    planned: Callable[[Strategy], Plan],
) -> str:
    """Return the remedy: a strategy that runs the model as it is.

    If the model is too large for the comparison, the remedy also names the key by which the user
    can vouch that the batch may be split.
    """
    copies = _plan(0, planned)
    if copies is None:
        return _ALONE
    if is_unknown(copies):
        try:
            profile, _ = compared(request, dataset, profile, copies)
        except PlanError:  # too large to be compared
            return _VOUCHING
        if "model.loss_over=sum" in profile.unequal_remedy:
            return "use strategy=dp model.loss_over=sum, which runs the model as it is"
        if profile.unequal_parts:
            return _ALONE
    return AS_IS if _plan(1, planned) else "use strategy=dp, which runs the model as it is"


def _plan(zero: int, planned: Callable[[Strategy], Plan]) -> Plan | None:
    """Return the plan of replicas under ZeRO stage `zero`; None where there is no such plan."""
    strategy = read_strategy({"graph": {"replicate": {"zero": zero}}}, "copies", [])
    assert strategy is not None
    try:
        return planned(strategy)
    except PlanError:
        return None
