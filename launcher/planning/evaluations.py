"""What a plan says of evaluations that are not what the model computes in evaluation mode, and
evaluations that are refused."""

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
    """Faults for a run that evaluates, from a graph, means over targets that nobody can count
    before parameters have a part in them."""
    every = request.train.evaluate_every
    if every is not None and plan.rewrite is not None:
        remedy = "use null, or a strategy of one replicate"
        refuse_learned_targets(profile, "train.evaluate_every", str(every), remedy, faults)


def said_of_evaluations(request: Request, plan: Plan, dataset: Dataset) -> tuple[Decision, ...]:
    """Return the note a plan has where the run evaluates a split or staged model that computes
    otherwise in evaluation mode."""
    every = request.train.evaluate_every
    if every is None or plan.rewrite is None:
        return ()
    from whale_train.models.export.eval_mode import changed_in_evaluation  # it imports torch

    with quiet_exports():
        changed = changed_in_evaluation(request.model, dataset.fields)
    if not changed:
        return ()
    reason = (
        "evaluations run the training's graph, its dropouts off and its norms with what they keep; "
        f"{changed}, which they do not reach: a strategy of one replicate evaluates it as it is"
    )
    return (Decision("train.evaluate_every", str(every), "", reason),)
