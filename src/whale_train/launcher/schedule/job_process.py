"""Run jobs of a schedule as `whale-train` processes of this host.

A process has a session of its own, so that Ctrl-C reaches it through us alone, and once.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from whale_train.config import Request
from whale_train.launcher.job_end import EXIT_STATUS
from whale_train.launcher.schedule.job_files import (
    end_of_log,
    has_stepped_after,
    last_step,
    log_of,
)
from whale_train.launcher.schedule.job_starter import Ended
from whale_train.launcher.schedule.planned_job import counts_of
from whale_train.strategies.cluster_scheduling.schedulable_job import Allocation

_MAIN = "whale_train.launcher.schedule.job_main"


@dataclass
class TrainingProcess:
    """A process that trains a job, as a `JobAttempt`.

    process: the process.
    allocation: what it runs on.
    slots: numbers of its devices.
    run_dir: the job's run directory.
    began_step: the step after which this attempt began.
    is_stopping: whether it has been told to save and end.
    """

    process: subprocess.Popen[bytes]
    allocation: Allocation
    slots: tuple[int, ...]
    run_dir: Path
    began_step: int
    is_stopping: bool = False

    @classmethod
    def start(
        cls,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        allocation: Allocation,
        slots: tuple[int, ...],
        run_dir: Path,
    ) -> "TrainingProcess":
        """Start `whale-train` with `arguments`, and append its output to a log beside `run_dir`.

        variables: variables of its environment beside ours.
        """
        began = last_step(run_dir)
        with log_of(run_dir).open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", _MAIN, str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        return cls(process, allocation, slots, run_dir, began)

    @property
    def is_queued(self) -> bool:
        """Return False: a process of this host runs at once."""
        return False

    def ended(self) -> Ended | None:
        """Return the status with which the process ended, or None while it runs."""
        status = self.process.poll()
        if status is None:
            return None
        named = {number: name for name, number in EXIT_STATUS.items()}
        if status < 0 and self.is_stopping:  # told to stop before it could handle a signal
            return "interrupted"
        end = named.get(status, "failed")
        # Ranks that were told to stop while they were joining leave each other waiting.
        if end == "failed" and self.is_stopping:
            return "failed" if has_stepped_after(self.run_dir, self.began_step) else "interrupted"
        return end

    def said(self) -> str:
        """Return the end of what the job has printed."""
        return end_of_log(self.run_dir)

    def stop(self) -> None:
        """Tell the process to save a checkpoint and end, once."""
        if not self.is_stopping and self.process.poll() is None:
            self.is_stopping = True
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once, and its ranks, which end with it."""
        if self.process.poll() is None:
            self.process.kill()


@dataclass(frozen=True)
class HostStarter:
    """Start jobs on this host, as a `JobStarter`.

    hardware: overrides for the devices, of which a job gets as many CPU processes as it may hold;
        None where jobs get GPUs of their own, among those that this process sees.
    """

    hardware: tuple[str, ...] | None

    def counts(self, devices: int) -> tuple[int, ...]:
        """Return the numbers of devices that plans are made for."""
        return counts_of(devices)

    def may_hold(self, devices: int) -> bool:
        """Return True: a job of this host may have any number of its devices."""
        return True

    def start(
        self,
        request: Request,
        arguments: Sequence[str],
        allocation: Allocation,
        slots: tuple[int, ...],
        run_dir: Path,
    ) -> TrainingProcess:
        """Start `whale-train` with `arguments` in `run_dir`, and append its output to a log
        beside."""
        variables: dict[str, str] = {}
        if self.hardware is None:
            variables["CUDA_VISIBLE_DEVICES"] = _gpus(slots)
            devices = ["hardware=local"]
        else:
            devices = [*self.hardware, f"strategy.devices={len(slots)}"]
        return TrainingProcess.start((*arguments, *devices), variables, allocation, slots, run_dir)


def _gpus(slots: tuple[int, ...]) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for the GPUs of these numbers, among those that this
    process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else None
    return ",".join(names[slot] if names else str(slot) for slot in slots)
