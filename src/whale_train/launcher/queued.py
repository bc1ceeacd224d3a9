"""Submit all jobs of one command to Slurm together, after every job is composed."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from os.path import commonpath
from pathlib import Path

from rich.console import Console
from rich.text import Text

from whale_train.errors import RequestError
from whale_train.launcher.job_end import JobEnd, started_elsewhere
from whale_train.launcher.slurm.submit import FOLDER, submit
from whale_train.launcher.slurm.wait import wait_for
from whale_train.launcher.ui.show_error import error_text, terminal_width


def from_queue(ends: Sequence[JobEnd], console: Console) -> list[JobEnd]:
    """Submit to Slurm every job in `ends` that has a submission, and return the ends of all jobs.

    With `launcher.wait` the function waits for the submitted jobs and returns their final status.
    Without it, the ends are returned unchanged, submissions included. A submission that Slurm
    refuses gives the status `refused`.
    """
    numbers = [number for number, end in enumerate(ends) if end.submission is not None]
    submissions = [end.submission for end in ends if end.submission is not None]
    if not submissions:
        return list(ends)
    final_ends = list(ends)
    folders = [submission.run_dir for submission in submissions]
    folder = (folders[0] if len(folders) == 1 else Path(commonpath(folders))) / FOLDER
    try:
        jobs = submit(submissions, folder)
    except RequestError as error:
        sys.stderr.write(error_text(error, terminal_width(sys.stderr)) + "\n")
        for number in numbers:
            final_ends[number] = replace(
                final_ends[number], status="refused", submission=None, reason=str(error)
            )
        return final_ends
    for job, run_dir in zip(jobs, folders, strict=True):
        _say(console, f"job {job.job_id}: {run_dir}, its output {job.stdout}")
    if not submissions[0].request.launcher.wait:
        return final_ends

    def changed(number: int, state: str) -> None:
        _say(console, f"job {jobs[number].job_id}: {state.lower()}")

    try:
        statuses = wait_for(jobs, changed)
    except KeyboardInterrupt:
        first = " ".join(dict.fromkeys(str(job.job_id).partition("_")[0] for job in jobs))
        sys.stderr.write(
            f"interrupted; the jobs stay in the queue, and scancel {first} ends them\n"
        )
        return [replace(end, status="interrupted", submission=None) for end in final_ends]
    for number, job, status in zip(numbers, jobs, statuses, strict=True):
        final_ends[number] = started_elsewhere(status, final_ends[number].run_dir)
        _say(console, f"job {job.job_id}: {final_ends[number].status}")
        if len(jobs) == 1:
            _say(console, job.summary())
        if final_ends[number].status in ("failed", "refused"):
            output = job.last_lines() or "it ended without a word"
            sys.stderr.write(f"error: job {job.job_id} {final_ends[number].status}:\n{output}\n")
    return final_ends


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)
