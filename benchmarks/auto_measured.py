"""Whether what `strategy=auto` finds is as fast as the fastest of our strategy files, measured.

python benchmarks/auto_measured.py

Calibrates the machine (`mode=calibrate`, with its figures in a folder of this run), for every
number of threads that a process may have, and trains every model on as many CPU processes as named:
with the strategy found, and with each file that the model and the devices allow. The runs of a
model take turns; of several rounds, and of predictions, that counts which counts in `accuracy.py`,
whose models these are.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from accuracy import MODELS, PAIRS, calibrate, command, fresh, of_rounds, times
from quiet import Quiet
from rich.console import Console
from rich.table import Table

from whale_train.runtime.clock import undisturbed

FILES = ("single", "dp", "zero1", "split", "hybrid_split_dp", "pipeline", "zero_bubble", "split_dp")
AUTO = "auto"


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.formatter_class = words
    parser.add_argument("--steps", type=int, default=14, help="of a run")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=1, help="of training with every strategy")
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
                found: dict[str, list[tuple[float, Sequence[float]]]] = {}
                for _ in range(options.rounds):
                    for name in (AUTO, *FILES):
                        asked = [*MODELS[model], f"strategy={name}", "hardware=cpu"]
                        asked += [f"hardware.devices={devices}", f"train.steps={options.steps}"]
                        asked.append(f"train.global_batch={PAIRS[model][0]}")
                        ran = quiet.measure(partial(allowed, asked, folder, where))
                        if ran is not None:
                            predicted, measured = times(ran)
                            found.setdefault(name, []).append((predicted, measured))
                            said = f"{model}, {devices} devices, {chosen_of(name, ran)}: "
                            said += f"{milliseconds(predicted)} predicted, "
                            said += f"{milliseconds(undisturbed(measured))} measured"
                            Console(stderr=True, width=100).print(said)
                counted = {name: of_rounds(each) for name, each in found.items()}
                table.add_row(model, str(devices), *cells_of(counted))
    Console(width=100).print(table)
    Console(width=100).print(f"{quiet.repeated} measurements repeated.")


def allowed(asked: Sequence[str], folder: str, where: Path) -> Path | None:
    """The run directory of what the command does; None where it refuses."""
    run_dir = fresh(folder)
    return run_dir if command(asked, run_dir, where, refusable=True) else None


def to_calibrate(devices: Sequence[int]) -> Sequence[int]:
    """Numbers of processes of which each has other threads than those of the others: the named
    ones, and fewer, which auto may use of them."""
    cores = len(os.sched_getaffinity(0))
    fewer = (2**power for power in range(max(devices).bit_length()))
    return [*{max(1, cores // count): count for count in (*sorted(devices), *fewer)}.values()]


def cells_of(found: Mapping[str, tuple[float, float]]) -> Sequence[str]:
    """Of a row: what auto takes beside the fastest of the files, each (predicted, measured)."""
    predicted, measured = found[AUTO]
    files = [name for name in found if name != AUTO]
    best = min(files, key=lambda name: found[name][1])
    fastest, least = found[best]
    return (
        *(milliseconds(measured), milliseconds(predicted)),
        *(f"{milliseconds(least)}, {best}", milliseconds(fastest)),
        f"{least / measured:.2f}",
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
