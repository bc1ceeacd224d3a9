"""Compare the strategy of `strategy=auto` with the fastest of our strategy files, by measurement.

python benchmarks/auto_measured.py

The script calibrates the machine (`mode=calibrate`, which writes into a folder of this script) and
trains every model on the given numbers of CPU processes. Each strategy file that the model and the
devices allow runs once. Then the strategy that auto finds and the files that were nearly the
fastest run in turns. If auto finds the strategy of a file, both are one plan, and nothing is
compared. Models and statistics over rounds are as in `accuracy.py`.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accuracy import MODELS, PAIRS, calibrate, command, fresh, of_rounds, times
from quiet import Quiet
from rich.console import Console
from rich.table import Table

from whale_train.machine.limits import cores
from whale_train.runtime.calibrate.timing import undisturbed

FILES = ("single", "dp", "zero1", "split", "hybrid_split_dp", "pipeline", "zero_bubble", "split_dp")
AUTO = "auto"
NEARLY = 1.2  # files within this multiple of the fastest file's step run again

Steps = list[tuple[float, Sequence[float]]]  # predicted and measured seconds of each round


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.formatter_class = words
    parser.add_argument("--steps", type=int, default=14, help="of a run")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=4, help="of the fastest files and auto")
    parser.add_argument("--patience", type=float, default=900, help="seconds of waiting for quiet")
    options = parser.parse_args()
    quiet = Quiet(options.patience)
    table = Table(title="Steps, measured", title_justify="left")
    columns = ("auto", "predicted", "the fastest file", "predicted", "times as fast")
    for name in ("model", "devices", *columns):
        table.add_column(name, justify="left" if name == "model" else "right")
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
        where = Path(folder) / "calibrations"
        for count in to_calibrate(options.devices):
            quiet.measure(partial(calibrate, [f"hardware.devices={count}"], folder, where))
        for model in options.models:
            for devices in options.devices:
                asked = [*MODELS[model], "hardware=cpu", f"hardware.devices={devices}"]
                asked += [f"train.steps={options.steps}", f"train.global_batch={PAIRS[model][0]}"]
                Console(stderr=True, width=100).print(f"{model}, {devices} devices")
                steps, same = compared(asked, options.rounds, quiet, folder, where)
                counted = {name: of_rounds(rounds) for name, rounds in steps.items()}
                table.add_row(model, str(devices), *cells_of(counted, same))
    Console(width=100).print(table)
    Console(width=100).print(f"{quiet.repeated} measurements repeated.")


def compared(
    asked: Sequence[str], rounds: int, quiet: Quiet, folder: str, where: Path
) -> tuple[Mapping[str, Steps], str]:
    """Train with every strategy file and with auto. Return the steps of auto and of the files that
    were nearly the fastest, by name, and the file that auto equals, or ''.

    asked: the overrides, without the strategy.
    rounds: number of further runs of each strategy in the result.
    quiet: repeats disturbed measurements.
    folder: the folder of run directories.
    where: the folder of calibrations.
    """
    steps: dict[str, Steps] = {}
    plans: dict[str, Any] = {}

    def train(name: str) -> None:
        ran = quiet.measure(partial(allowed, [*asked, f"strategy={name}"], folder, where))
        if ran is not None:
            predicted, measured = times(ran)
            steps.setdefault(name, []).append((predicted, measured))
            plans[name] = plan_of(ran)
            said = f"  {chosen_of(name, ran)}: {milliseconds(predicted)} predicted, "
            said += f"{milliseconds(undisturbed(measured))} measured"
            Console(stderr=True, width=100).print(said)

    for name in (*FILES, AUTO):
        train(name)
    same = next((name for name in FILES if plans.get(name) == plans[AUTO]), "")
    if same:
        steps[same] += steps.pop(AUTO)
    once = {name: of_rounds(timings)[1] for name, timings in steps.items()}
    fastest_s = min(seconds for name, seconds in once.items() if name != AUTO)
    again = [name for name, seconds in once.items() if seconds < NEARLY * fastest_s]
    for _ in range(rounds):
        for name in dict.fromkeys((same or AUTO, *again)):
            train(name)
    # One round is enough for the other files.
    return {name: steps[name] for name in dict.fromkeys((same or AUTO, *again))}, same


def allowed(asked: Sequence[str], folder: str, where: Path) -> Path | None:
    """Run the command, and return the run directory; None where the command refuses the request."""
    run_dir = fresh(folder)
    return run_dir if command(asked, run_dir, where, refusable=True) else None


def plan_of(run_dir: Path) -> Any:
    """Return the plan of a run without decisions and paths, which is equal for equal strategies
    from different sources."""
    plan = json.loads((run_dir / "plan.json").read_text())
    del plan["decisions"]
    for task_graph in plan["task_graphs"]:
        del task_graph["path"]
    return plan


def to_calibrate(devices: Sequence[int]) -> Sequence[int]:
    """Return the numbers of processes in `devices` for which a calibration is needed.

    A calibration holds for one number of threads of a process. Of all numbers of processes with the
    same number of threads, the largest is returned. Every calibration also measures a single
    process.
    """
    return [*{max(1, cores() // count): count for count in sorted(devices)}.values()]


def cells_of(seconds: Mapping[str, tuple[float, float]], same: str) -> Sequence[str]:
    """Return the cells of a row, which compares auto with the fastest file.

    seconds: the (predicted, measured) seconds of a step, by strategy.
    same: the file that auto equals; '' for none.
    """
    predicted, measured = seconds[same or AUTO]
    files = [name for name in seconds if name != AUTO]
    best = min(files, key=lambda name: seconds[name][1])
    fastest, fastest_s = seconds[best]
    return (
        *(milliseconds(measured), milliseconds(predicted)),
        *(f"{milliseconds(fastest_s)}, {best}", milliseconds(fastest)),
        "the same" if best == same else f"{fastest_s / measured:.2f}",
    )


def chosen_of(name: str, run_dir: Path) -> str:
    """Return the name of a strategy; for auto, followed by the strategy that it found."""
    if name != AUTO:
        return name
    decisions = json.loads((run_dir / "plan.json").read_text())["decisions"]
    return f"{AUTO} ({decisions[0]['chosen']})"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


if __name__ == "__main__":
    main()
