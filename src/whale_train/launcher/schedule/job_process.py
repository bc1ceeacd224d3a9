"""Run one attempt of a scheduled job: a `whale-train` process of our own, and what it has written.

The process has a session of its own, so that Ctrl-C reaches it through us alone, and once.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from whale_train.launcher.job_end import EXIT_STATUS
from whale_train.launcher.ranks.run_dir import METRICS
from whale_train.strategies.cluster_scheduling.schedulable_job import Allocation

_UNTIMED = 2  # first steps of an attempt, which are slower than those that follow
_TIMED = 5  # steps that make a measurement
Ended = Literal["done", "failed", "refused", "interrupted"]


@dataclass
class TrainingProcess:
    """A process that trains a job.

    process: the process.
    allocation: what it runs on.
    slots: numbers of its devices.
    run_dir: the job's run directory.
    began_step: the step after which this attempt began.
    started_s: when it was started, by time.monotonic.
    is_stopping: whether it has been told to save and end.
    """

    process: subprocess.Popen[bytes]
    allocation: Allocation
    slots: tuple[int, ...]
    run_dir: Path
    began_step: int
    started_s: float
    is_stopping: bool = False

    @classmethod
    def start(
        cls,
        arguments: Sequence[str],
        allocation: Allocation,
        slots: tuple[int, ...],
        run_dir: Path,
        variables: Mapping[str, str],
    ) -> "TrainingProcess":
        """Start `whale-train` with `arguments` in `run_dir`, its output appended to a log beside.

        variables: variables of its environment beside ours.
        """
        log = run_dir.parent / f"{run_dir.name}.log"
        ours = "whale_train.launcher.schedule.job_main"
        program = [sys.executable, "-m", ours, str(os.getpid()), *arguments]
        began = last_step(run_dir)
        with log.open("ab") as output:
            process = subprocess.Popen(
                program,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        return cls(process, allocation, slots, run_dir, began, time.monotonic())

    def stop(self) -> None:
        """Tell the process to save a checkpoint and end, once."""
        if not self.is_stopping and self.process.poll() is None:
            self.is_stopping = True
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once, and its ranks, which end with it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def ended(self) -> Ended | None:
        """Return the status with which the process ended, or None while it runs."""
        status = self.process.poll()
        if status is None:
            return None
        named = {number: name for name, number in EXIT_STATUS.items()}
        if status < 0 and self.is_stopping:  # told to stop before it could handle a signal
            return "interrupted"
        return named.get(status, "failed")

    @property
    def has_stepped(self) -> bool:
        """Return whether this attempt has finished a step."""
        return last_step(self.run_dir) > self.began_step

    def step_s(self) -> float | None:
        """Return the median time of this attempt's steps, in seconds; None before there are enough
        of them."""
        lines = [x for x in _metrics(self.run_dir) if int(x["step"]) > self.began_step + _UNTIMED]
        return median(float(x["step_time_s"]) for x in lines) if len(lines) >= _TIMED else None


def last_step(run_dir: Path) -> int:
    """Return the last step in a run's metrics, or 0."""
    lines = _metrics(run_dir)
    return int(lines[-1]["step"]) if lines else 0


def end_of_log(run_dir: Path, most: int = 12) -> str:
    """Return the end of what a job's processes have printed."""
    log = run_dir.parent / f"{run_dir.name}.log"
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-most:])


def _metrics(run_dir: Path) -> list[dict[str, float]]:
    """Return the lines of a run's metrics, without one that is cut off."""
    try:
        lines = (run_dir / METRICS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    read = []
    for line in lines:
        try:
            read.append(json.loads(line))
        except ValueError:
            continue
    return read
