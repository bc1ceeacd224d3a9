"""Read what a job of a schedule has written: the steps in its metrics, and the end of its log."""

import json
from os import SEEK_END
from pathlib import Path
from statistics import median

from whale_train.launcher.ranks.run_dir import METRICS

_UNTIMED = 2  # first steps of an attempt, which are slower than those that follow
_TAIL = 65_536  # bytes at the end of metrics, which have several steps
_TIMED = 5  # steps that make a measurement


def log_of(run_dir: Path) -> Path:
    """Return the file with what a job prints, beside its run directory."""
    return run_dir.parent / f"{run_dir.name}.log"


def end_of_log(run_dir: Path, most: int = 12) -> str:
    """Return the last `most` lines of what a job has printed; '' where it has printed nothing."""
    try:
        text = log_of(run_dir).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-most:])


def last_step(run_dir: Path) -> int:
    """Return the last step in a run's metrics, or 0. Of long metrics, only the end is read."""
    lines = _metrics(run_dir, _TAIL)
    return int(lines[-1]["step"]) if lines else 0


def has_stepped_after(run_dir: Path, began_step: int) -> bool:
    """Return whether an attempt that began after `began_step` has finished a step."""
    return last_step(run_dir) > began_step


def step_s_after(run_dir: Path, began_step: int) -> float | None:
    """Return the median time of the steps of an attempt that began after `began_step`, in seconds;
    None before there are enough of them."""
    lines = [x for x in _metrics(run_dir) if int(x["step"]) > began_step + _UNTIMED]
    return median(float(x["step_time_s"]) for x in lines) if len(lines) >= _TIMED else None


def _metrics(run_dir: Path, most: int | None = None) -> list[dict[str, float]]:
    """Return the lines of a run's metrics, without those that are cut off: all, or those in the
    last `most` bytes."""
    try:
        with (run_dir / METRICS).open("rb") as file:
            if most is not None:
                file.seek(max(0, file.seek(0, SEEK_END) - most))
            content = file.read()
    except FileNotFoundError:
        return []
    read = []
    for line in content.splitlines():
        try:
            read.append(json.loads(line))
        except ValueError:
            continue
    return read
