"""Run `mode=evaluate` and `mode=predict` on a rank that has the checkpoint's weights."""

import time
from math import isfinite
from pathlib import Path
from typing import Any

from whale_train.config import Request
from whale_train.runtime.record.predictions import PredictionPart, part_path, write_predictions
from whale_train.runtime.state.carrier import Carrier
from whale_train.runtime.train.batches import EvaluatedSet, RankBatches
from whale_train.runtime.train.evaluate_sets import evaluate_sets
from whale_train.runtime.train.evaluation_metrics import EvaluationMetrics
from whale_train.runtime.train.step_programs import Program


def checkpoint_results(
    run_dir: Path,
    request: Request,
    program: Program,
    batches: RankBatches,
    carrier: Carrier,
    rank: int,
) -> dict[str, Any]:
    """Evaluate the sets of the request, and return the results for `summary.json`. A collective.

    In `mode=predict` the predictions are written to files as well. Raises LaunchError where the
    model makes no predictions.
    """
    has_targets = request.blank_labels is None
    keeps_answers = bool(request.metrics) and has_targets
    own = EvaluationMetrics(request.metrics) if keeps_answers and not rank else None
    parts: list[tuple[EvaluatedSet, PredictionPart]] = []

    def predicted(evaluated: EvaluatedSet) -> PredictionPart:
        part = PredictionPart(part_path(run_dir, evaluated.name, rank), evaluated.labels)
        parts.append((evaluated, part))
        return part

    started = time.monotonic()
    keeper = predicted if request.mode == "predict" else None
    sets = evaluate_sets(program, batches, own, keeps_answers, keeper)
    finite = {
        name: {key: value if isfinite(value) else None for key, value in of_set.items()}
        for name, of_set in (sets if has_targets else {}).items()
    }
    summary: dict[str, Any] = {"evaluation": finite}
    for evaluated, part in parts:
        path = write_predictions(
            *(part, evaluated.name, evaluated.samples),
            rank=rank,
            carrier=carrier,
            has_targets=has_targets,
        )
        file = {"file": str(path), "samples": evaluated.samples}
        summary.setdefault("predictions", {})[evaluated.name] = file
    return summary | {"evaluated_s": time.monotonic() - started}
