"""Whether what `strategy=auto` finds is as fast as the fastest of our strategy files, measured.

python benchmarks/auto_measured.py

Calibrates the machine (`mode=calibrate`, with its figures in a folder of this run) and trains every
model on as many CPU processes as named: with the strategy found, and with each file that the model
and the devices allow. A time of a step is the median of those of a run, the runs of a model take
turns, and of several rounds the medians count. The models are `accuracy.py`'s.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median

from accuracy import MODELS, PAIRS, command, step_s
from rich.console import Console
from rich.table import Table

FILES = ("single", "dp", "zero1", "split", "hybrid_split_dp", "pipeline", "zero_bubble", "split_dp")
AUTO = "auto"


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.formatter_class = words
    parser.add_argument("--steps", type=int, default=12, help="of a run")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=1, help="of training with every strategy")
    options = parser.parse_args()
    table = Table(title="Steps, measured", title_justify="left")
    for name in ("model", "devices", "auto", "the fastest file", "times as fast"):
        table.add_column(name, justify="left" if name == "model" else "right")
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
        where = Path(folder) / "calibrations"
        command(["mode=calibrate", "hardware=cpu"], Path(folder) / "calibrate", where)
        for model in options.models:
            for devices in options.devices:
                found: dict[str, list[float]] = {}
                for _ in range(options.rounds):
                    for name in (AUTO, *FILES):
                        run_dir = Path(tempfile.mkdtemp(dir=folder)) / "run"
                        asked = [*MODELS[model], f"strategy={name}", "hardware=cpu"]
                        asked += [f"hardware.devices={devices}", f"train.steps={options.steps}"]
                        asked.append(f"train.global_batch={PAIRS[model][0]}")
                        if command(asked, run_dir, where, refusable=True):
                            seconds = step_s(run_dir)
                            found.setdefault(name, []).append(seconds)
                            said = f"{model}, {devices} devices, {name}: {seconds * 1e3:.1f} ms"
                            Console(stderr=True, width=100).print(said)
                middle = {name: median(listed) for name, listed in found.items()}
                auto = middle.pop(AUTO)
                best = min(middle, key=lambda name: middle[name])
                cells = (f"{auto * 1e3:.1f} ms", f"{middle[best] * 1e3:.1f} ms, {best}")
                table.add_row(model, str(devices), *cells, f"{middle[best] / auto:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
