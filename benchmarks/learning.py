"""Provide the run of the command and the spread over seeds for benchmarks of learning."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any


def steps_of(*overrides: str) -> list[dict[str, Any]]:
    """Run `whale-train` on CPU processes, and return the lines of `metrics.jsonl` in order."""
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
        run = Path(folder) / "run"
        program = str(Path(sys.executable).with_name("whale-train"))
        command = [program, "strategy=dp", "hardware=cpu", f"hydra.run.dir={run}", *overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def spread(losses: Sequence[float]) -> str:
    """Return the mean and the standard deviation of losses over seeds, as text."""
    return f"{mean(losses):.4f} ± {stdev(losses) if len(losses) > 1 else 0.0:.4f}"
