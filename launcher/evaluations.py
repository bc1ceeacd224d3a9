"""What a plan says of evaluations that are not what the model computes in evaluation mode."""

from whale_train.config import Request
from whale_train.data.dataset import Dataset
from whale_train.launcher.profiles import quiet_exports
from whale_train.strategies.plan import Decision, Plan


def said_of_evaluations(request: Request, plan: Plan, dataset: Dataset) -> tuple[Decision, ...]:
    """The note a plan has where the run evaluates, from a graph, a model that computes otherwise
    in evaluation mode."""
    every = request.train.evaluate_every
    if every is None or plan.rewrite is None:
        return ()
    from whale_train.models.evaluation_mode import changed_in_evaluation  # it imports torch

    with quiet_exports():
        changed = changed_in_evaluation(request.model, dataset.fields)
    if not changed:
        return ()
    reason = (
        "evaluations run the training's graph, its dropouts off and its norms with what they keep; "
        f"{changed}, which they do not reach: a strategy of one replicate evaluates it as it is"
    )
    return (Decision("train.evaluate_every", str(every), "", reason),)
