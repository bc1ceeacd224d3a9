"""Ask Slurm for the states of jobs, and tell jobs to end, by the commands squeue and scancel."""

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

    with_ended: whether to return states of `ENDED` as well. Slurm forgets them after some minutes.
    """
    array_ids = {job_id.partition("_")[0] for job_id in ids}
    states = ["--states=all"] if with_ended else []
    command = ("squeue", "--noheader", "--array", "--format=%i %T", f"--jobs={','.join(array_ids)}")
    try:
        done = subprocess.run(
            [*command, *states],
            capture_output=True,
            encoding="utf-8",
            check=False,
            timeout=_ANSWER_S,
        )
    except subprocess.TimeoutExpired:
        return dict.fromkeys(ids, UNKNOWN)
    if done.returncode and "Invalid job id" not in done.stderr:
        return dict.fromkeys(ids, UNKNOWN)
    lines = (line.split() for line in done.stdout.splitlines())
    return {words[0]: words[1] for words in lines if len(words) == 2}


def notify(job_id: str) -> None:
    """Cancel a job that has no nodes yet, and send the tasks of any other SIGUSR2, by which they
    save and end."""
    _scancel("--state=PENDING", job_id)
    _scancel("--signal=USR2", job_id)


def cancel(job_id: str) -> None:
    """End a job at once: Slurm sends SIGTERM, and later SIGKILL."""
    _scancel(job_id)


def _scancel(*arguments: str) -> None:
    """Run scancel. A job that has ended meanwhile is no fault, and neither is a controller that
    does not answer: whoever waits for the job's end asks again."""
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(
            ["scancel", "--quiet", *arguments],
            capture_output=True,
            check=False,
            timeout=_ANSWER_S,
        )
