"""Evaluate every set of a request: its loss, its accuracy and the user's own metrics."""

from collections.abc import Callable

from whale_train.runtime.base.answers import AnswerKeeper, AnswerPairs, Answers, Int64s
from whale_train.runtime.train.batches import EvaluatedSet, RankBatches
from whale_train.runtime.train.evaluation_metrics import EvaluationMetrics
from whale_train.runtime.train.step_programs import Program


class _Both:
    """Two keepers of the same answers."""

    def __init__(self, first: AnswerKeeper, second: AnswerKeeper) -> None:
        self._keepers = (first, second)
        self.predicts = first.predicts or second.predicts

    def clear(self) -> None:
        for keeper in self._keepers:
            keeper.clear()

    def add(self, weight: float, samples: Int64s, call: int, answers: Answers) -> None:
        for keeper in self._keepers:
            keeper.add(weight, samples, call, answers)


def evaluate_sets(
    program: Program,
    batches: RankBatches,
    own: EvaluationMetrics | None,
    keeps_answers: bool,
    keeper: Callable[[EvaluatedSet], AnswerKeeper] | None = None,
) -> dict[str, dict[str, float]]:
    """Return the results of each set of samples to evaluate, by the set's name.

    The results of a set are the mean `loss`, the `accuracy` where there are targets, and the values
    of the user's metrics `own`. Only rank 0 has `own` metrics and their results. With
    `keeps_answers`, all ranks store their answers for these metrics. `keeper` returns a further
    keeper of the answers for a set.
    """
    results: dict[str, dict[str, float]] = {}
    for evaluated in batches.evaluated_sets():
        pairs = AnswerPairs() if keeps_answers else None
        further = keeper(evaluated) if keeper is not None else None
        both = _Both(pairs, further) if pairs is not None and further is not None else None
        evaluated.answers = both or pairs or further
        seen = program.evaluate(evaluated)
        of_set = results[evaluated.name] = {"loss": seen.loss}
        targets = round(seen.targets)  # weighted sums of whole numbers
        if targets:
            of_set["accuracy"] = round(seen.correct) / targets
        if pairs is not None:
            answers = pairs.gathered()
            of_set |= own.values(*answers) if own is not None else {}
    return results
