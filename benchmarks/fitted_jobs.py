"""Measure five small jobs under several plans, fit two models to some, print errors of the others.

    python benchmarks/fitted_jobs.py [--repeats 3] [--steps 40] [--fit 7]

The first model is the planner's step time with fitted numbers, the second Rubick's with seven.
Every plan is a run of its own on 1, 2 or 4 CPU processes of one thread each, as `mode=schedule`
starts them, repeated in turns. A run's time is the first decile of its steps, and a plan's that of
its quickest run, since whatever else the machine does only adds. A plan whose two quickest runs
differ by more than a tenth is left out.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from whale_train.machine.limits import cores
from whale_train.strategies.cluster_scheduling.fitted_step_time import StepParts, fit_step_time
from whale_train.strategies.cluster_scheduling.seven_parameters import (
    Bandwidths,
    ModelFigures,
    PlanShape,
    fit_seven_parameters,
)

BATCH = 16
GPT = ("model.depth=4", "model.width=128", f"train.global_batch={BATCH}")
JOBS: dict[str, tuple[str, ...]] = {
    "gpt": ("model=gpt", *GPT),
    "moe_gpt": ("model=moe_gpt", "model.depth=4", f"train.global_batch={BATCH}"),
    "class_head": (
        *("model=class_head", "model.num_classes=20000", "data=classes"),
        "train.global_batch=64",
    ),
    "image_classifier": (
        "model=image_classifier",
        "data=digits",
        "train.global_batch=64",
    ),
    "bert": (
        *("model=bert_large", "model.config.vocab_size=257", "model.config.num_hidden_layers=4"),
        *("model.config.hidden_size=128", "model.config.num_attention_heads=4"),
        *("model.config.intermediate_size=512", f"train.global_batch={BATCH}"),
    ),
}
# Each plan: number of processes, overrides, and the degrees that the second model knows.
PLANS: tuple[tuple[int, tuple[str, ...], PlanShape], ...] = (
    (1, ("strategy=dp",), PlanShape()),
    (2, ("strategy=dp",), PlanShape(2)),
    (4, ("strategy=dp",), PlanShape(4)),
    (2, ("strategy=pipeline", "strategy.graph.pipeline.stages=2"), PlanShape(1, 1, 2, 2)),
    (1, ("strategy=dp", "train.accumulate=2"), PlanShape(micro_batches=2)),
    (2, ("strategy=dp", "train.accumulate=2"), PlanShape(2, micro_batches=2)),
    (2, ("strategy=zero1",), PlanShape(2, zero=True)),
    (2, ("strategy=split",), PlanShape(1, 2)),
    (4, ("strategy=dp", "train.accumulate=2"), PlanShape(4, micro_batches=2)),
    (3, ("strategy=dp",), PlanShape(3)),
    (2, ("strategy=zero1", "train.accumulate=2"), PlanShape(2, zero=True, micro_batches=2)),
    (4, ("strategy=split",), PlanShape(1, 4)),
)
FITTED_ON = (0, 1, 2, 6, 3, 7, 5)  # the order in which plans are taken for the fit


MOST_APART = 0.1  # relative difference of a plan's two quickest runs


@dataclass(frozen=True)
class Measured:
    """A plan of a job: the predicted parts, the measured seconds, the bytes of the parameters."""

    parts: StepParts
    seconds: float
    parameter_bytes: float


def run(job: tuple[str, ...], number: int, steps: int, folder: Path) -> Measured | None:
    """Return a measured run of a job under the plan of this number; None where it has none."""
    processes, overrides, _ = PLANS[number]
    given = [*job, *overrides, "hardware=cpu", "hardware.devices=4"]
    given += [f"strategy.devices={processes}", "launcher.threads=1", f"train.steps={steps}"]
    given += ["checkpoint.final=false", "train.report=false", f"hydra.run.dir={folder}"]
    program = [sys.executable, "-m", "whale_train.launcher.cli", *given]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600)
    if done.returncode == 2:
        return None
    assert done.returncode == 0, done.stderr
    plan = json.loads((folder / "plan.json").read_text())
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("compute_s", "communication_s", "optimizer_s", "idle_s")
    most = max(rank["micro_batches"] for rank in plan["ranks"])
    crowding = max(1.0, plan["world_size"] / cores())
    parts = StepParts(*(plan["predicted"][x] for x in names), most, crowding)
    seconds = quantiles((x["step_time_s"] for x in lines[4:]), n=10)[0]
    held = plan["ranks"][0]["memory_bytes"]["parameters"]
    return Measured(parts, seconds, held)


def runs_of(job: tuple[str, ...], repeats: int, steps: int) -> dict[int, list[Measured]]:
    """Return the runs of each plan of a job, the quickest first, by the plan's number."""
    runs: dict[int, list[Measured]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(repeats):
            for number in range(len(PLANS)):
                made = run(job, number, steps, Path(folder) / f"{turn}-{number}")
                if made is not None:
                    runs.setdefault(number, []).append(made)
    return {number: sorted(x, key=lambda run: run.seconds) for number, x in runs.items()}


def is_steady(runs: Sequence[Measured]) -> bool:
    """Return whether the two quickest runs of a plan agree."""
    return len(runs) < 2 or runs[1].seconds / runs[0].seconds - 1.0 <= MOST_APART


def errors_of(
    best: dict[int, Measured], whole: Measured, num_fitted: int
) -> dict[int, tuple[float, float]]:
    """Return the relative errors of both models for each plan that they were not fitted to.

    best: the quickest run of each plan.
    whole: a run on one process, of which only the prediction counts.
    """
    order = [number for number in FITTED_ON if number in best][:num_fitted]
    ours = fit_step_time([(best[x].parts, best[x].seconds) for x in order])
    figures = ModelFigures(whole.parts.compute_s / 3, whole.parameter_bytes, 1e5, 4)
    links = Bandwidths(1e9, 1e9, 1e9, 1e10)
    theirs = fit_seven_parameters(
        figures, [(PLANS[x][2], 1.0, best[x].seconds) for x in order], links
    )
    return {
        number: (
            ours.seconds(made.parts) / made.seconds - 1.0,
            theirs.seconds(figures, PLANS[number][2], 1.0, links) / made.seconds - 1.0,
        )
        for number, made in best.items()
        if number not in order
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--fit", type=int, default=7, help="number of plans that are fitted to")
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), choices=list(JOBS))
    options = parser.parse_args()
    every: list[tuple[float, float]] = []
    unsteady = 0
    print(f"{'job':18}{'plan':54}{'measured':>10}{'predicted':>11}{'fitted':>9}{'seven':>9}")
    for name in options.jobs:
        runs = runs_of(JOBS[name], options.repeats, options.steps)
        unsteady += sum(not is_steady(x) for x in runs.values())
        best = {number: x[0] for number, x in runs.items() if is_steady(x)}
        if len(best) <= options.fit:
            print(f"{name:18}only {len(best)} of {len(runs)} plans are steady", flush=True)
            continue
        errors = errors_of(best, runs[0][0], options.fit)
        for number, made in sorted(best.items()):
            processes, overrides, _ = PLANS[number]
            plan = f"{' '.join(overrides)} on {processes}"
            unfitted = made.parts.seconds / made.seconds - 1.0
            row = f"{name:18}{plan:54}{made.seconds * 1e3:7.1f} ms{unfitted:+11.1%}"
            if number in errors:
                every.append(errors[number])
                row += "".join(f"{error:+9.1%}" for error in errors[number])
            print(row, flush=True)
    print(
        f"left out: {unsteady} plans whose two quickest runs differ by more than {MOST_APART:.0%}"
    )
    if not every:
        return
    for place, title in enumerate(("the planner's, six numbers", "Rubick's, seven numbers")):
        sizes = [abs(errors[place]) for errors in every]
        said = f"median {median(sizes):.1%}, worst {max(sizes):.1%} of {len(sizes)} held-out plans"
        print(f"{title}: {said}")


if __name__ == "__main__":
    main()
