"""Define what a schedule needs of the place where its jobs run: to start one, and to follow it.

A schedule counts devices and knows its jobs by these two protocols alone. `job_process.py` has the
processes of this host.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from whale_train.config import Request
from whale_train.strategies.cluster_scheduling.schedulable_job import Allocation

Ended = Literal["done", "failed", "refused", "interrupted"]


class JobAttempt(Protocol):
    """One attempt of a job, from its start to its end: it holds its devices until `ended` says how
    it ended."""

    @property
    def allocation(self) -> Allocation:
        """Return the number of devices and the plan that the job runs on."""
        ...

    @property
    def slots(self) -> tuple[int, ...]:
        """Return the numbers of the devices that the job holds."""
        ...

    @property
    def began_step(self) -> int:
        """Return the step after which this attempt began."""
        ...

    @property
    def is_stopping(self) -> bool:
        """Return whether the job has been told to save and end."""
        ...

    @property
    def is_queued(self) -> bool:
        """Return whether the job waits in a queue of the engine that runs it, without devices. To
        the schedule it holds them."""
        ...

    def ended(self) -> Ended | None:
        """Return the status with which the job ended, or None while it holds devices.

        An attempt that was told to stop, and has, is `interrupted`; the schedule starts the job
        anew. It is called ten times a second.
        """
        ...

    def said(self) -> str:
        """Return the last lines that the job has printed, and what else is known of its end."""
        ...

    def stop(self) -> None:
        """Tell the job to save a checkpoint and end, once, without waiting for it."""
        ...

    def kill(self) -> None:
        """End the job at once with all its ranks, without waiting for it."""
        ...


class JobStarter(Protocol):
    """A place where jobs run: this host, or a cluster's own engine."""

    def counts(self, devices: int) -> tuple[int, ...]:
        """Return the numbers of devices, of `devices` in all, that plans are made for."""
        ...

    def may_hold(self, devices: int) -> bool:
        """Return whether a job may ask for so many devices, beside the numbers of `counts`."""
        ...

    def start(
        self,
        request: Request,
        arguments: Sequence[str],
        allocation: Allocation,
        slots: tuple[int, ...],
        run_dir: Path,
    ) -> JobAttempt:
        """Start a job, and return at once.

        request: the job's request under the plan that it asks for.
        arguments: command-line arguments of the job, its run directory included; those for its
            devices are added here.
        allocation: number of devices, and the name of the plan that `arguments` have.
        slots: the numbers of its devices, from 0 to the cluster's number of devices less 1.
        run_dir: the job's run directory.
        """
        ...
