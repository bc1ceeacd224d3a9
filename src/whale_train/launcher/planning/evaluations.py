"""Note in the plan where evaluations do not compute the model's evaluation mode, and refuse
evaluations that cannot be computed."""

from whale_train.config import Request
from whale_train.data.dataset import Dataset
from whale_train.errors import Fault
from whale_train.launcher.planning.profile_cache import quiet_exports
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.plan.plan import Decision, Plan
from whale_train.strategies.resolver.shared_batch import refuse_learned_targets


def refuse_uncounted(
    request: Request, plan: Plan, profile: ModelProfile, faults: list[Fault]
) -> None:
    """Add a fault where evaluations take a mean over targets whose number depends on parameters.

    Such targets cannot be counted before the forward. Only plans that run the model from its graph
    are affected.
    """
    every = request.train.evaluate_every
    if every is not None and plan.rewrite is not None:
        remedy = "use null, or a strategy of one replicate"
        refuse_learned_targets(profile, "train.evaluate_every", str(every), remedy, faults)


def explain_evaluations(request: Request, plan: Plan, dataset: Dataset) -> tuple[Decision, ...]:
    """Return a note for the plan where a run evaluates a model from its training graph, and the
    model's evaluation mode computes something else."""
    every = request.train.evaluate_every
    if every is None or plan.rewrite is None:
        return ()
    from whale_train.models.export.eval_mode import changed_in_evaluation  # which imports torch

    with quiet_exports():
        changed = changed_in_evaluation(request.model, dataset.fields)
    if not changed:
        return ()
    reason = (
        "evaluations run the training's graph, its dropouts off and its norms with what they keep; "
        f"{changed}, which they do not reach: a strategy of one replicate evaluates it as it is"
    )
    return (Decision("train.evaluate_every", str(every), "", reason),)
