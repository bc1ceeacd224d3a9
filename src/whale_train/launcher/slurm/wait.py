"""Wait for jobs of Slurm, and say how each of them ended."""

import time
from collections.abc import Callable, Sequence

from whale_train.launcher.ranks.host_process import INTERRUPTED
from whale_train.launcher.slurm.queue import is_overlooked, make_eligible, queue_states
from whale_train.launcher.slurm.slurm_job import SlurmJob

_POLL_S = 1.0
# Seconds to wait for the status of a job that has left the queue, on a network file system.
_STATUS_S = 30.0
# Seconds after which a heterogeneous job that waits for no reason is brought to Slurm's attention.
_OVERLOOKED_S = 5.0


def wait_for(jobs: Sequence[SlurmJob], changed: Callable[[int, str], None]) -> list[int]:
    """Wait until all jobs have ended, and return the exit status of each.

    changed: called at every change of a job's state, with the index of the job and the new state as
        squeue names it.
    """
    states, ended, lost = [""] * len(jobs), [False] * len(jobs), dict[int, float]()
    pending = [_PendingJob(job) for job in jobs]
    while not all(ended):
        queued = queue_states([job.job_id for job in jobs])
        for number, job in enumerate(jobs):
            if ended[number]:
                continue
            state = queued.get(job.job_id, "")
            # Slurm may queue a job again that it has ended by SIGTERM, and that has saved.
            if job.status_path.exists() and (job.status() != INTERRUPTED or not state):
                ended[number] = True
                continue
            pending[number].see(state)
            if state and state != states[number]:
                states[number] = state
                changed(number, state)
            if not state:  # the job has left the queue, and its status may still follow
                lost.setdefault(number, time.monotonic())
                ended[number] = time.monotonic() - lost[number] > _STATUS_S
            else:
                lost.pop(number, None)
        if not all(ended):
            time.sleep(_POLL_S)
    return [job.status() for job in jobs]


class _PendingJob:
    """A job in the queue, which is made eligible again where Slurm overlooks it.

    Slurm's scheduler passes over heterogeneous jobs, which its backfill starts. Backfill looks at
    the queue only after a change, and that the delay of a job which was queued again is over is
    none: where no other job comes or goes, such a job would wait for ever
    (`findings/slurm_overlooks_a_delayed_heterogeneous_job.sh`).
    """

    def __init__(self, job: SlurmJob) -> None:
        self._job = job
        self._since_s: float | None = None

    def see(self, state: str) -> None:
        """Note the state of the job in the queue, and make it eligible if it is overlooked."""
        if self._job.num_components == 1 or state != "PENDING":
            self._since_s = None
            return
        if self._since_s is None:
            self._since_s = time.monotonic()
        if time.monotonic() - self._since_s > _OVERLOOKED_S:
            self._since_s = time.monotonic()
            if is_overlooked(self._job.job_id):
                make_eligible(self._job.job_id)
