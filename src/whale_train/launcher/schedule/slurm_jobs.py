"""Run jobs of a schedule as jobs of Slurm, which are submitted anew whenever their plan changes.

Slurm keeps its own queue: a job that waits in it has no devices yet, and the schedule gives them to
no other job. A job that Slurm notifies, because its time ends or another job takes its nodes, saves
and ends as one that the schedule tells to; the schedule then submits it again.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from whale_train.config import LauncherOptions, Request
from whale_train.errors import ConfigError, RequestError
from whale_train.launcher.job_end import EXIT_STATUS
from whale_train.launcher.schedule.job_files import (
    end_of_log,
    has_stepped_after,
    last_step,
    log_of,
)
from whale_train.launcher.schedule.job_starter import Ended
from whale_train.launcher.schedule.slurm_nodes import SlurmNodes
from whale_train.launcher.slurm.components import component_of, minutes
from whale_train.launcher.slurm.queue import ENDED, cancel, notify, queue_states
from whale_train.launcher.slurm.slurm_job import SlurmJob
from whale_train.launcher.slurm.submit import Submission, missing_for_slurm, submit
from whale_train.strategies.cluster_scheduling.schedulable_job import Allocation
from whale_train.strategies.hardware.cluster import Node

_COMMANDS = ("sbatch", "squeue", "scancel")
_LOOK_S = 1.0  # between two questions to Slurm
# A notice may come before a job's tasks can hear it, so it is repeated; a task heeds the first.
_NOTICE_S = 5.0
# Seconds in which a job's ranks leave once rank 0 has ended. Before the first step, some may never
# have met rank 0, and would wait for it much longer.
_LEAVING_S = 30.0
_RESULT_S = 30.0  # seconds after which a shared file system has a job's result
_QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")


@dataclass
class SlurmQueue:
    """The states of a schedule's jobs in Slurm, asked for at most once a second.

    states: the state of each job that has not ended for the schedule, by job id.
    """

    states: dict[str, str] = field(default_factory=dict)
    _asked_s: float = 0.0

    def state(self, job_id: str) -> str:
        """Return the state of a job as squeue names it; '' for one that Slurm has forgotten."""
        if job_id not in self.states or time.monotonic() - self._asked_s > _LOOK_S:
            ids = {*self.states, job_id}
            queued = queue_states(sorted(ids), with_ended=True)
            self.states = {name: queued.get(name, "") for name in ids}
            self._asked_s = time.monotonic()
        return self.states[job_id]

    def forget(self, job_id: str) -> None:
        """Ask for this job no more."""
        self.states.pop(job_id, None)


@dataclass
class SlurmProcess:
    """A job of Slurm that trains a job of the schedule, as a `JobAttempt`.

    job: the job; None for one that Slurm has not taken.
    refusal: what Slurm said of a job that it has not taken.
    queue: the states of all jobs.
    allocation: what it runs on.
    slots: numbers of its devices, which Slurm does not know.
    run_dir: the job's run directory.
    began_step: the step after which this attempt began.
    is_stopping: whether it has been told to save and end, by the schedule or by Slurm.
    state: its state in Slurm when that was last asked for.
    """

    job: SlurmJob | None
    refusal: str
    queue: SlurmQueue
    allocation: Allocation
    slots: tuple[int, ...]
    run_dir: Path
    began_step: int
    is_stopping: bool = False
    state: str = "PENDING"
    _end: Ended | None = None
    _noticed_s: float = 0.0
    _result_s: float | None = None
    _left_s: float | None = None
    _is_cut_short: bool = False

    @property
    def _taken(self) -> SlurmJob:
        """Return the job, which Slurm has taken."""
        assert self.job is not None
        return self.job

    @property
    def is_queued(self) -> bool:
        """Return whether the job waits for nodes."""
        return self.state in _QUEUED

    def stop(self) -> None:
        """Tell the job to save a checkpoint and end; cancel it if it has no nodes yet."""
        if not self.is_stopping and self.ended() is None:
            self.is_stopping = True
            self._notify()

    def kill(self) -> None:
        """Cancel the job. Slurm gives it some seconds before SIGKILL."""
        if self.ended() is None:
            self.is_stopping = True
            cancel(self._taken.job_id)

    def ended(self) -> Ended | None:
        """Return the status with which the job ended, or None while Slurm has it."""
        if self.job is None:
            return "failed"
        if self._end is None:
            self.state = self.queue.state(self._taken.job_id)
            if self.state and self.state not in ENDED:
                self._press()
                return None
            self._end = self._status()
            if self._end is not None:
                self.queue.forget(self._taken.job_id)
        return self._end

    def said(self) -> str:
        """Return the last lines that the job printed, after the way that Slurm ended it."""
        if self.job is None:
            return self.refusal
        lines = []
        if self.state == "CANCELLED" and not self.is_stopping:
            lines.append(f"job {self._taken.job_id} of Slurm was cancelled, not by the schedule")
        elif self.state in ENDED - {"COMPLETED", "CANCELLED"}:
            lines.append(f"job {self._taken.job_id} of Slurm ended as {self.state}")
        lines.append(end_of_log(self.run_dir) or self._taken.last_lines())
        return "\n".join(filter(None, lines))

    def _notify(self) -> None:
        notify(self._taken.job_id)
        self._noticed_s = time.monotonic()

    def _press(self) -> None:
        """Repeat a notice, and cancel a job whose rank 0 has ended, and whose others stay."""
        now_s = time.monotonic()
        if self._has_result():
            self._result_s = self._result_s or now_s
            leaving_s = _LEAVING_S if self._has_stepped() else 0.0
            if now_s - self._result_s >= leaving_s and not self._is_cut_short:
                self._is_cut_short = True
                cancel(self._taken.job_id)
        elif self.is_stopping and now_s - self._noticed_s > _NOTICE_S:
            self._notify()

    def _status(self) -> Ended | None:
        """Return the status of a job that has left the queue; None while its result may still come
        over a shared file system."""
        if self.state == "CANCELLED" and not self._is_cut_short:
            return "interrupted" if self.is_stopping else "failed"
        if not self._has_result() and not self.is_stopping:
            self._left_s = self._left_s or time.monotonic()
            if self.state in ("", "COMPLETED") and time.monotonic() - self._left_s < _RESULT_S:
                return None
        named = {number: name for name, number in EXIT_STATUS.items()}
        status = named.get(self._taken.status(), "failed")
        if status == "interrupted" or self.state == "PREEMPTED":  # by Slurm, where not by us
            self.is_stopping = True
            return "interrupted"
        if status == "failed" and self.is_stopping and not self._has_stepped():
            return "interrupted"  # told before it could save, when there was nothing to save
        return status

    def _has_stepped(self) -> bool:
        return has_stepped_after(self.run_dir, self.began_step)

    def _has_result(self) -> bool:
        """Return whether rank 0's command has ended."""
        return self._taken.status_path.exists()


@dataclass(frozen=True)
class SlurmStarter:
    """Submit jobs to Slurm, as a `JobStarter`.

    nodes: the nodes that are shared.
    options: the launcher's options of the schedule, of which `sbatch` goes to each job.
    folder: the folder of the jobs' files, which all nodes see.
    queue: the states of all jobs.
    """

    nodes: SlurmNodes
    options: LauncherOptions
    folder: Path
    queue: SlurmQueue = field(default_factory=SlurmQueue)

    def counts(self, devices: int) -> tuple[int, ...]:
        """Return the numbers of devices that plans are made for."""
        return self.nodes.counts()

    def may_hold(self, devices: int) -> bool:
        """Return whether so many devices are part of a node, or whole nodes."""
        return self.nodes.may_hold(devices)

    def start(
        self,
        request: Request,
        arguments: Sequence[str],
        allocation: Allocation,
        slots: tuple[int, ...],
        run_dir: Path,
    ) -> SlurmProcess:
        """Submit a job, whose output is appended to a log beside `run_dir`."""
        began = last_step(run_dir)
        nodes, ranks = self.nodes.size(allocation.devices)
        launcher = self.nodes.launcher(self.options, allocation.devices)
        request = request.model_copy(update={"launcher": launcher})
        submission = Submission(
            request,
            (*self.nodes.hardware(allocation.devices), *arguments),
            run_dir,
            (component_of(request, nodes, ranks, self.nodes.slurm),),
            log_of(run_dir).absolute(),
            requeues=False,
        )
        job, refusal = None, ""
        try:
            (job,) = submit([submission], self.folder)
        except RequestError as error:
            refusal = str(error)
        return SlurmProcess(job, refusal, self.queue, allocation, slots, run_dir, began)


def slurm_starter(request: Request, hardware: Sequence[str], folder: Path) -> SlurmStarter:
    """Return the starter of a schedule whose jobs go to Slurm.

    request: the request of the schedule.
    hardware: command-line arguments that make its inventory.
    folder: the folder of the jobs' files, which need not exist.

    Raises ConfigError with all faults where the nodes of the inventory are not alike, where options
    of sbatch are wrong, and where jobs are to start and Slurm's commands are missing.
    """
    faults = [] if request.schedule.simulate else missing_for_slurm(_COMMANDS)
    minutes(request, faults)
    nodes = SlurmNodes.of(request, hardware, faults)
    if faults or nodes is None:
        raise ConfigError(faults)
    return SlurmStarter(nodes, request.launcher, folder)


def threads_on_slurm(options: LauncherOptions, node: Node) -> list[str]:
    """Return the override of the threads of each rank on a CPU: as many as Slurm gives it cores.

    node: a node of the inventory, whose options replace those of the launcher.
    """
    by_name = {key.replace("_", "-"): value for key, value in options.sbatch.items()}
    own = None if node.slurm is None else node.slurm.cpus_per_task
    return [f"launcher.threads={own or by_name.get('cpus-per-task', 1)}"]
