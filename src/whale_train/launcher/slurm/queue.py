"""Ask Slurm for the states of jobs, and tell jobs to end, by the commands squeue, scancel and
scontrol."""

import subprocess
from collections.abc import Sequence
from contextlib import suppress

UNKNOWN = "UNKNOWN"  # the state of a job while Slurm's controller does not answer
_ANSWER_S = 60.0  # how long a command may take
# States of squeue's manual in which a job has ended. Nothing of it holds a node any more.
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
}


def queue_states(ids: Sequence[str], *, with_ended: bool = False) -> dict[str, str]:
    """Return the state of each job that is in the queue, by job id, as squeue names it. Every state
    is `UNKNOWN` where Slurm does not answer.

    The components of a heterogeneous job have its id, and end together: its state is that of the
    first component which has not ended, or else of the first.

    with_ended: whether to return states of `ENDED` as well. Slurm forgets them after some minutes.
    """
    array_ids = {job_id.partition("_")[0] for job_id in ids}
    states = ["--states=all"] if with_ended else []
    jobs = f"--jobs={','.join(array_ids)}"
    said = _answer("squeue", "--noheader", "--array", "--format=%i %T", jobs, *states)
    if said is None:
        return dict.fromkeys(ids, UNKNOWN)
    by_id: dict[str, list[str]] = {}
    for words in (line.split() for line in said.splitlines()):
        if len(words) == 2:
            by_id.setdefault(words[0].partition("+")[0], []).append(words[1])
    return {
        job_id: next((state for state in components if state not in ENDED), components[0])
        for job_id, components in by_id.items()
    }


def is_overlooked(job_id: str) -> bool:
    """Return whether a job waits in the queue for no reason that Slurm says: not for resources, and
    not for a time to come."""
    options = ("--noheader", "--states=PENDING", "--format=%r %S")  # the reason, and the start
    lines = (_answer("squeue", *options, f"--jobs={job_id}") or "").splitlines()
    return bool(lines) and set(lines) <= {"None N/A", "BeginTime N/A"}


def make_eligible(job_id: str) -> None:
    """Have a job of the queue begin as soon as it can, by which Slurm looks at the queue anew."""
    with suppress(OSError):  # without scontrol, the job waits until another one comes or goes
        _answer("scontrol", "update", f"jobid={job_id}", "starttime=now")


def notify(job_id: str) -> None:
    """Cancel a job that has no nodes yet, and send the tasks of a running one SIGUSR2, by which
    they save and end.

    A running job that has no tasks yet does not hear of it, and scancel does not say so.
    """
    _scancel("--state=PENDING", job_id)
    _scancel("--state=RUNNING", "--signal=USR2", job_id)


def cancel(job_id: str) -> None:
    """End a job at once: Slurm sends SIGTERM, and later SIGKILL."""
    _scancel(job_id)


def _scancel(*arguments: str) -> None:
    """Run scancel. A job that has ended meanwhile is no fault, and neither is a controller that
    does not answer: whoever waits for the job's end asks again."""
    _answer("scancel", "--quiet", *arguments)


def _answer(*command: str) -> str | None:
    """Run a command of Slurm, and return the text that it prints; '' for jobs that Slurm does not
    know any more, and None where it does not answer."""
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", check=False, timeout=_ANSWER_S
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode and "Invalid job id" not in done.stderr:
        return None
    return done.stdout
