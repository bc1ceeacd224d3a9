"""Whether what `strategy=auto` finds is as fast as the fastest of our strategy files, measured.

python benchmarks/auto_measured.py

Calibrates the machine (`mode=calibrate`, with its figures in a folder of this run) and trains every
model on as many CPU processes as named: once with each file that the model and the devices allow,
and then, in turns, with the strategy that auto finds and the files that were nearly as fast as the
fastest. Where auto finds what a file says, there is one plan to run and nothing to compare. What
counts of the rounds is what counts in `accuracy.py`, whose models these are.
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
NEARLY = 1.2  # times the fastest file's step, of files that run again

Steps = list[tuple[float, Sequence[float]]]  # of each round: predicted, and measured


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
                found, same = compared(asked, options.rounds, quiet, folder, where)
                counted = {name: of_rounds(each) for name, each in found.items()}
                table.add_row(model, str(devices), *cells_of(counted, same))
    Console(width=100).print(table)
    Console(width=100).print(f"{quiet.repeated} measurements repeated.")


def compared(
    asked: Sequence[str], rounds: int, quiet: Quiet, folder: str, where: Path
) -> tuple[Mapping[str, Steps], str]:
    """The steps of every file and of auto, as far as they ran; and the file that says what auto
    found, if one does."""
    found: dict[str, Steps] = {}
    plans: dict[str, Any] = {}

    def train(name: str) -> None:
        ran = quiet.measure(partial(allowed, [*asked, f"strategy={name}"], folder, where))
        if ran is not None:
            predicted, measured = times(ran)
            found.setdefault(name, []).append((predicted, measured))
            plans[name] = plan_of(ran)
            said = f"  {chosen_of(name, ran)}: {milliseconds(predicted)} predicted, "
            said += f"{milliseconds(undisturbed(measured))} measured"
            Console(stderr=True, width=100).print(said)

    for name in (*FILES, AUTO):
        train(name)
    same = next((name for name in FILES if plans.get(name) == plans[AUTO]), "")
    if same:
        found[same] += found.pop(AUTO)
    once = {name: of_rounds(each)[1] for name, each in found.items()}
    least = min(seconds for name, seconds in once.items() if name != AUTO)
    again = [name for name, seconds in once.items() if seconds < NEARLY * least]
    for _ in range(rounds):
        for name in dict.fromkeys((same or AUTO, *again)):
            train(name)
    # Of the others one round says enough.
    return {name: found[name] for name in dict.fromkeys((same or AUTO, *again))}, same


def allowed(asked: Sequence[str], folder: str, where: Path) -> Path | None:
    """The run directory of what the command does; None where it refuses."""
    run_dir = fresh(folder)
    return run_dir if command(asked, run_dir, where, refusable=True) else None


def plan_of(run_dir: Path) -> Any:
    """What it says but why: equal for equal strategies, however they came about."""
    plan = json.loads((run_dir / "plan.json").read_text())
    del plan["decisions"]
    for task_graph in plan["task_graphs"]:
        del task_graph["path"]
    return plan


def to_calibrate(devices: Sequence[int]) -> Sequence[int]:
    """Of the named numbers of processes, those of which each has other threads. One process alone
    is measured with any of them."""
    return [*{max(1, cores() // count): count for count in sorted(devices)}.values()]


def cells_of(found: Mapping[str, tuple[float, float]], same: str) -> Sequence[str]:
    """Of a row: what auto takes beside the fastest of the files, each (predicted, measured); auto
    may be the `same` as one."""
    predicted, measured = found[same or AUTO]
    files = [name for name in found if name != AUTO]
    best = min(files, key=lambda name: found[name][1])
    fastest, least = found[best]
    return (
        *(milliseconds(measured), milliseconds(predicted)),
        *(f"{milliseconds(least)}, {best}", milliseconds(fastest)),
        "the same" if best == same else f"{least / measured:.2f}",
    )


def chosen_of(name: str, run_dir: Path) -> str:
    """The strategy's name, and what it is where it was found."""
    if name != AUTO:
        return name
    decisions = json.loads((run_dir / "plan.json").read_text())["decisions"]
    return f"{AUTO} ({decisions[0]['chosen']})"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


if __name__ == "__main__":
    main()
