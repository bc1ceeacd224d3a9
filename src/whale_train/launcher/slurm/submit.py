"""Submit jobs to Slurm for `launcher=slurm`. A sweep becomes an array of jobs.

The file for sbatch is in a folder of its own in the run directory, beside the job's output. Every
task of a job runs the same command, and finds its rank as a task of srun (`task.py`).
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from whale_train.config import Request
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.ranks.run_dir import write_json, write_text
from whale_train.launcher.slurm.components import AROUND_S, components_of
from whale_train.launcher.slurm.queue import cancel
from whale_train.launcher.slurm.sbatch_file import Component, Option, SbatchFile
from whale_train.launcher.slurm.slurm_job import SlurmJob

FOLDER = "slurm"  # of a run or a sweep: the files for sbatch, and the output of jobs
FILE = "submission.sh"
_COMMANDS = ("sbatch", "squeue")
_SUBMIT_S = 120.0  # how long sbatch may take
_MOST_AT_ONCE = 256  # jobs of an array that may run at the same time


@dataclass(frozen=True)
class Submission:
    """A job to submit to Slurm.

    request: the request of the job.
    arguments: command-line arguments that make the request.
    run_dir: the run directory.
    components: the components of the job.
    log: the file that the output of rank 0 is appended to; None for the job's own output.
    requeues: whether Slurm queues the job again when it takes the job off its nodes. If not, the
        job has saved, and ends with the status of a job that is interrupted.
    """

    request: Request
    arguments: tuple[str, ...]
    run_dir: Path
    components: tuple[Component, ...]
    log: Path | None = None
    requeues: bool = True

    @classmethod
    def of(
        cls,
        request: Request,
        arguments: Sequence[str],
        run_dir: Path,
        commands: Sequence[str] = _COMMANDS,
    ) -> "Submission":
        """Return the submission of a request.

        commands: the commands of Slurm that must be here.

        Raises ConfigError where commands are missing, and where the size or time limit of the job
        is not known.
        """
        faults = missing_for_slurm(commands)
        components = components_of(request, faults)
        if faults:
            raise ConfigError(faults)
        # The command within the job must not submit a job.
        return cls(request, (*arguments, "launcher.kind=auto"), run_dir, components)

    @property
    def notice(self) -> str:
        """Return the answer of the job to Slurm's notice, as in `TaskOptions`."""
        if not self.requeues:
            return "end"
        return "requeue" if self.request.checkpoint.saves else "ignore"


def missing_for_slurm(commands: Sequence[str]) -> list[Fault]:
    """Return a fault for each of Slurm's commands that is not here."""
    faults = []
    for name in commands:
        if shutil.which(name) is None:
            rule = f"needs the command {name}, which is not here"
            faults.append(Fault("launcher", "slurm", rule, "run it where jobs are submitted"))
    return faults


def submit(submissions: Sequence[Submission], folder: Path) -> list[SlurmJob]:
    """Submit jobs to Slurm, and return the job of each submission.

    Jobs of equal components and options form one array. Slurm has no arrays of heterogeneous jobs,
    which are submitted one by one.

    submissions: the jobs.
    folder: the folder of their files, which need not exist.

    Raises ConfigError where Slurm refuses a job; those that it has taken before are cancelled.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    groups: list[list[int]] = []
    for number, submission in enumerate(submissions):
        alike = (g for g in groups if _are_alike(submissions[g[0]], submission))
        group = next(alike, None)
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    jobs: dict[int, SlurmJob] = {}
    for group in groups:
        path = _free_path(folder)
        first, num = submissions[group[0]], len(group)
        if num > 1:
            write_json(_commands_path(path), [submissions[number].arguments for number in group])
        path.write_text(sbatch_file(first, path, Path.cwd(), num).text(), encoding="utf-8")
        try:
            job_id = _sbatch(path, first)
        except ConfigError:
            for job in jobs.values():
                cancel(job.job_id)
            raise
        for index, number in enumerate(group):
            own_id = f"{job_id}_{index}" if num > 1 else job_id
            jobs[number] = SlurmJob(own_id, folder, len(first.components))
    return [jobs[number] for number in range(len(submissions))]


def planned_file(request: Request, arguments: Sequence[str], run_dir: Path) -> SbatchFile:
    """Return the content of the file that submits the job of a plan.

    The job trains in a run directory of its own below that of the plan, `run`.

    request: the request, of `mode=plan`.
    arguments: command-line arguments that make the request.
    run_dir: the run directory of the plan.

    Raises ConfigError where the size or time limit of the job is not known.
    """
    replaced = ("mode", "rehearse", "hydra.run.dir")
    others = [text for text in arguments if text.lstrip("+").partition("=")[0] not in replaced]
    own = f"hydra.run.dir={run_dir / 'run'}"
    submission = Submission.of(request, [own, *others], run_dir / "run", commands=())
    return sbatch_file(submission, run_dir / FOLDER / FILE, Path.cwd())


def write_planned(file: SbatchFile, run_dir: Path) -> Path:
    """Write the file that submits the job of a plan into the run directory of the plan, and return
    its path."""
    path = run_dir / FOLDER / FILE
    path.parent.mkdir(exist_ok=True)
    write_text(path, file.text())
    return path


def sbatch_file(
    submission: Submission,
    path: Path,
    working_dir: Path,
    num_jobs: int = 1,
    python: str = sys.executable,
) -> SbatchFile:
    """Return the content of the file that submits a job, or several as an array.

    submission: the job; of an array, one of its jobs.
    path: the path of the file, whose folder gets the job's output.
    working_dir: the folder that the command is given in.
    num_jobs: number of jobs.
    python: the path of Python on the nodes.
    """
    folder = str(path.parent).replace("%", "%%")  # sbatch replaces %j and the like
    job_id = "%A_%a" if num_jobs > 1 else "%j"
    options: dict[str, Option] = {
        "chdir": str(working_dir),
        "output": f"{folder}/{job_id}.out",
        "error": f"{folder}/{job_id}.err",
        "open-mode": "append",
    }
    if num_jobs > 1:
        options["array"] = f"0-{num_jobs - 1}%{min(num_jobs, _MOST_AT_ONCE)}"
    notice, srun, components = submission.notice, dict[str, Option](), submission.components
    command = [python, "-m", "whale_train.launcher.slurm.task", f"--folder={path.parent}"]
    command += [f"--notice={notice}"]
    if notice == "requeue":
        components = tuple(replace(x, options={"requeue": True, **x.options}) for x in components)
        command.append(f"--grace-s={submission.request.checkpoint.grace_s + AROUND_S:g}")
    elif notice == "end":  # a task that was told before it could listen has ended by that
        srun["kill-on-bad-exit"] = 1
    if submission.log is not None:
        command.append(f"--log={submission.log}")
    if num_jobs > 1:
        command.append(f"--commands={_commands_path(path)}")
    else:
        command += ["--", *submission.arguments]
    return SbatchFile(components, tuple(command), options, srun)


def _are_alike(first: Submission, second: Submission) -> bool:
    """Return whether two submissions may be jobs of one array."""
    if len(first.components) > 1:
        return False
    kinds = [(x.components, x.notice, x.log, x.request.checkpoint.grace_s) for x in (first, second)]
    return kinds[0] == kinds[1]


def _free_path(folder: Path) -> Path:
    """Make a file for sbatch that no other job of the folder has, and return the path."""
    number = 1
    while True:
        path = folder / (FILE if number == 1 else f"{number}_{FILE}")
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return path


def _commands_path(path: Path) -> Path:
    """Return the path of the file with the commands of an array, beside that for sbatch."""
    return path.with_suffix(".json")


def _sbatch(path: Path, submission: Submission) -> str:
    """Submit a file, and return the id of the job. Raises ConfigError where Slurm refuses it."""
    done = subprocess.run(
        ["sbatch", "--parsable", str(path)],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
        timeout=_SUBMIT_S,
    )
    if done.returncode == 0:
        return done.stdout.strip().partition(";")[0]  # the name of a cluster may follow
    lines = [line for line in done.stderr.splitlines() if "error:" in line]
    said = (lines or [done.stderr.strip() or f"sbatch ended with {done.returncode}"])[0]
    rule = f"is not taken by Slurm ({said.strip().removeprefix('sbatch: ')})"
    remedy = "change what it names"
    if len(submission.components) > 1:
        remedy = "change what it, or slurm of hardware.nodes, names"
    raise ConfigError([Fault("launcher.sbatch", "", rule, remedy)])
