"""Submit jobs to Slurm for `launcher=slurm`, through submitit. A sweep becomes an array of jobs.

Every task runs the same command, and finds its rank as a task of srun. Slurm signals a job before
taking its nodes away. The job then saves a checkpoint, is queued again, and continues from the
checkpoint.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import IO, Any

from whale_train.config import AUTO, Request
from whale_train.errors import ConfigError, Fault
from whale_train.extras import how_to_install
from whale_train.launcher.planning.devices.machine import facts_of
from whale_train.launcher.ranks.job_key import SECRET
from whale_train.launcher.ranks.run_dir import installed_version
from whale_train.launcher.ranks.slurm_queue import queue_states
from whale_train.machine.hosts import this_host
from whale_train.strategies.hardware.inventory import read_inventory

_POLL_S = 1.0
# Seconds to wait for the result file of a job that has left the queue, on a network file system.
_RESULT_S = 30.0
# Seconds, besides the time for saving, in which Slurm signals a job and queues it again.
_AROUND_S = 60
_MOST_TIMEOUTS = 1000  # a job that saves may reach its time limit this many times
_LAST_LINES = 30
# Slurm's forms of a time: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on.
_TIME = re.compile(r"(?:(?P<d>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")


@dataclass(frozen=True)
class Submission:
    """A job to submit to Slurm.

    request: the request of the job.
    arguments: command-line arguments that make the request.
    run_dir: the run directory.
    nodes: number of nodes.
    ranks_per_node: number of ranks on each node.
    log: the file that the output of rank 0 is appended to; None for one of submitit's files.
    requeues: whether Slurm queues the job again when it takes the job off its nodes. If not, the
        job has saved, and ends with the status of a job that is interrupted.
    """

    request: Request
    arguments: tuple[str, ...]
    run_dir: Path
    nodes: int
    ranks_per_node: int
    log: Path | None = None
    requeues: bool = True

    @classmethod
    def of(cls, request: Request, arguments: Sequence[str], run_dir: Path) -> "Submission":
        """Return the submission of a request. Raises ConfigError where Slurm's commands or submitit
        are missing, and where the size or time limit of the job is not known."""
        faults = missing_for_slurm(("sbatch", "squeue"))
        nodes, ranks = _size(request, faults)
        minutes(request, faults)
        if faults:
            raise ConfigError(faults)
        # The command within the job must not submit a job.
        return cls(request, (*arguments, "launcher.kind=auto"), run_dir, nodes, ranks)


def missing_for_slurm(commands: Sequence[str]) -> list[Fault]:
    """Return a fault for each of Slurm's commands that is not here, and for submitit likewise."""
    faults = []
    for name in commands:
        if shutil.which(name) is None:
            rule = f"needs the command {name}, which is not here"
            faults.append(Fault("launcher", "slurm", rule, "run it where jobs are submitted"))
    if installed_version("submitit") is None:
        rule, remedy = "needs submitit", how_to_install("submitit")
        faults.append(Fault("launcher", "slurm", rule, remedy))
    return faults


@dataclass
class SlurmTask:
    """The program that each task of a job runs on its node.

    arguments: command-line arguments of the job.
    goes_on: whether the job saves checkpoints, and continues when it has lost its nodes.
    grace_s: seconds that the job has for saving.
    log: the file that the output of rank 0's command is appended to; None for this program's own.
    requeues: whether submitit queues the job again when it has lost its nodes.
    command: the process of the running command; None before the start.
    is_told: whether the command has been told to save and end, by `_save_and_end`.
    """

    arguments: tuple[str, ...]
    goes_on: bool
    grace_s: float
    log: Path | None = None
    requeues: bool = True
    command: "subprocess.Popen[bytes] | None" = None
    is_told: bool = False

    def __call__(self) -> int:
        """Run the command until it ends, and return the exit status."""
        program = (sys.executable, "-m", "whale_train.launcher.cli", *self.arguments)
        # The command inherits that SIGUSR2, Slurm's signal to the task, is ignored, since it would
        # end the command. A task whose job does not save ignores it as well, being unable to react.
        submitits = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        with self._output() as output:
            self.command = subprocess.Popen(
                program, start_new_session=True, stdout=output, stderr=output
            )
        if self.goes_on:
            signal.signal(signal.SIGUSR2, submitits if self.requeues else self._save_and_end)
        for number in (signal.SIGTERM, signal.SIGCONT):
            signal.signal(number, self._pass_on)
        while not self._has_ended():
            time.sleep(_POLL_S / 5)
        return self.command.wait()

    def checkpoint(self) -> Any:
        """Ask the job to save and end, wait for that, and return the submission to queue again.

        submitit calls this method. Returns None where no command runs.
        """
        import submitit

        if self.command is None:
            return None
        self.command.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + self.grace_s + _AROUND_S
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(_POLL_S / 5)
        resumes = "train.resume=auto"
        arguments = tuple(x for x in self.arguments if not x.startswith("train.resume="))
        return submitit.helpers.DelayedSubmission(
            SlurmTask((*arguments, resumes), self.goes_on, self.grace_s)
        )

    @contextmanager
    def _output(self) -> Iterator[IO[bytes] | None]:
        """Yield the file for the command's output, or None for this program's own."""
        if self.log is None or not _is_first():
            yield None
            return
        with self.log.open("ab") as file:
            yield file

    def _save_and_end(self, number: int, frame: object) -> None:
        """Ask the job to save and end, once, without waiting for it.

        Only rank 0 tells its command: another rank's may not handle signals yet, and rank 0's tells
        all others. Later signals change nothing: a second one would end the command unsaved.
        """
        if self.command is not None and _is_first() and not self.is_told:
            self.is_told = True
            self.command.send_signal(signal.SIGUSR1)

    def _has_ended(self) -> bool:
        """Return whether the command has ended.

        Popen's methods are not used, since a signal handler calls this method as well, and the wait
        that the signal interrupts may hold Popen's lock.
        """
        assert self.command is not None
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.command.pid, look) is not None

    def _pass_on(self, number: int, frame: object) -> None:
        """Pass SIGTERM on to the running command, and no other signal."""
        if number == signal.SIGTERM and self.command is not None and not self._has_ended():
            self.command.send_signal(number)


def _is_first() -> bool:
    """Return whether this program is the task of rank 0."""
    return os.environ.get("SLURM_PROCID", "0") == "0"


def submit(submissions: Sequence[Submission], folder: Path) -> list[Any]:
    """Submit jobs to Slurm, and return submitit's job for each submission.

    Jobs of equal size, time limit and options form one array.

    submissions: the jobs.
    folder: the folder of submitit's files and of the jobs' logs.

    Raises ConfigError where Slurm refuses a job.
    """
    import submitit

    # The ranks of a job trust each other by a secret, which sbatch copies from this environment.
    os.environ[SECRET] = os.environ.get(SECRET) or token_hex(32)
    jobs_by_number: dict[int, Any] = {}
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, submission in enumerate(submissions):
        launcher = submission.request.launcher
        alike = (
            submission.nodes,
            submission.ranks_per_node,
            tuple(sorted(launcher.sbatch.items())),
            submission.requeues,
        )
        groups.setdefault((*alike, submission.request.checkpoint.grace_s), []).append(number)
    for numbers in groups.values():
        first = submissions[numbers[0]]
        executor = submitit.SlurmExecutor(folder, max_num_timeout=_MOST_TIMEOUTS)
        executor.update_parameters(**_parameters(first))
        tasks = [_task(submissions[number]) for number in numbers]
        try:
            with executor.batch():
                jobs = [executor.submit(task) for task in tasks]
        except submitit.core.utils.FailedJobError as error:
            said = [line for line in str(error).splitlines() if "error:" in line] or [str(error)]
            rule = f"is not taken by Slurm ({said[0].strip().removeprefix('sbatch: ')})"
            raise ConfigError(
                [Fault("launcher.sbatch", "", rule, "change what it names")]
            ) from None
        jobs_by_number |= dict(zip(numbers, jobs, strict=True))
    return [jobs_by_number[number] for number in range(len(submissions))]


def wait_for(jobs: Sequence[Any], changed: Callable[[int, str], None]) -> list[int]:
    """Wait until all jobs have ended, and return the exit status of each.

    jobs: submitit's jobs.
    changed: called at every change of a job's state, with the index of the job and the new state as
        squeue names it.
    """
    states, ended, lost = [""] * len(jobs), [False] * len(jobs), dict[int, float]()
    while not all(ended):
        queued = queue_states([job.job_id for job in jobs])
        for number, job in enumerate(jobs):
            if ended[number]:
                continue
            if job.paths.result_pickle.exists():
                ended[number] = True
                continue
            state = queued.get(job.job_id, "")
            if state and state != states[number]:
                states[number] = state
                changed(number, state)
            if not state:  # the job has left the queue, and its result file may still follow
                lost.setdefault(number, time.monotonic())
                ended[number] = time.monotonic() - lost[number] > _RESULT_S
            else:
                lost.pop(number, None)
        if not all(ended):
            time.sleep(_POLL_S)
    return [slurm_status(job) for job in jobs]


def last_lines(job: Any) -> str:
    """Return the last _LAST_LINES lines that rank 0 of a job wrote to stderr; '' without a file.

    job: submitit's job.
    """
    try:
        lines: list[str] = job.paths.stderr.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    own = [line for line in lines if not line.startswith(("submitit ", "srun: ", "slurmstepd: "))]
    return "\n".join(own[-_LAST_LINES:])


def slurm_summary(job: Any) -> str:
    """Return the summary that a finished job printed; '' for a job that is not done.

    job: submitit's job.
    """
    try:
        output: str = job.paths.stdout.read_text(encoding="utf-8")
    except OSError:
        return ""
    _, done, rest = output.rpartition("\ndone: ")
    if not done:
        return ""
    own = [line for line in (done + rest).splitlines() if not line.startswith("submitit ")]
    return "\n".join(own).strip()


def minutes(request: Request, faults: list[Fault]) -> int:
    """Return the time limit of a job in minutes, rounded up; 0 after adding a fault for a time that
    is in no form of Slurm's."""
    text = str(request.launcher.sbatch.get("time", 60))
    match = _TIME.fullmatch(text)
    if match is None:
        rule, remedy = "is no time of Slurm's", "give minutes, or as 12:00:00 or 2-00:00:00"
        faults.append(Fault("launcher.sbatch.time", text, rule, remedy))
        return 0
    days = match["d"]
    a, b, c = (int(match[name] or 0) for name in "abc")
    if days is not None:  # days-hours:minutes:seconds
        seconds = ((int(days) * 24 + a) * 60 + b) * 60 + c
    elif match["c"] is not None:  # hours:minutes:seconds
        seconds = (a * 60 + b) * 60 + c
    else:  # minutes:seconds
        seconds = a * 60 + b
    return max(1, -(-seconds // 60))


def _size(request: Request, faults: list[Fault]) -> tuple[int, int]:
    """Return the number of nodes of a job, and the number of ranks on each node.

    faults: receives a fault where the number of ranks is not known, and where the nodes have
        different numbers of devices.
    """
    launcher, hardware = request.launcher, request.hardware
    name = request.names.get("hardware", "hardware")
    nodes, ranks = launcher.nodes, launcher.ranks_per_node
    if "kind" not in hardware:
        cluster = read_inventory(hardware, name, faults, facts_of(this_host(())))
        if cluster is None:
            return 0, 0
        counts = [len(node.devices) for node in cluster.nodes]
        if nodes is None and ranks is None and len(set(counts)) > 1:
            rule = f"starts as many ranks on every node, and those of hardware={name} have "
            rule += ", ".join(map(str, counts)) + " devices"
            faults.append(Fault("launcher", "slurm", rule, "start them by srun in a job of yours"))
        return nodes or len(counts), ranks or counts[0]
    nodes = nodes or 1
    if ranks is None:
        devices = hardware.get("devices", AUTO)
        if not isinstance(devices, int) or devices % nodes:
            remedy = "say it, as launcher.ranks_per_node=8"
            rule = f"is not known of hardware={name}, on {nodes} nodes"
            faults.append(Fault("launcher.ranks_per_node", "null", rule, remedy))
            return nodes, 0
        ranks = devices // nodes
    return nodes, ranks


def _task(submission: Submission) -> SlurmTask:
    """Return the task of a submission."""
    checkpoint, requeues = submission.request.checkpoint, submission.requeues
    goes_on = checkpoint.saves or not requeues
    return SlurmTask(submission.arguments, goes_on, checkpoint.grace_s, submission.log, requeues)


def _parameters(submission: Submission) -> dict[str, Any]:
    """Return the parameters of a job for submitit."""
    request = submission.request
    given = {key.replace("_", "-"): value for key, value in request.launcher.sbatch.items()}
    limit = minutes(request, [])
    cores = given.get("cpus-per-task")
    srun = [] if cores is None else [f"--cpus-per-task={cores}"]
    if not submission.requeues:  # a task that was told before it could listen has ended by that
        srun.append("--kill-on-bad-exit=1")
    return {
        "job_name": "whale-train",
        "wckey": None,
        "nodes": submission.nodes,
        "ntasks_per_node": submission.ranks_per_node,
        "time": limit,
        "signal_delay_s": int(request.checkpoint.grace_s) + _AROUND_S,
        "additional_parameters": {k: v for k, v in given.items() if k != "time"},
        # Since Slurm 22.05, srun does not inherit this option from the job.
        "srun_args": srun,
    }


def slurm_status(job: Any) -> int:
    """Return the exit status of a job that has ended: rank 0's, or 1 without a result."""
    import submitit

    if not job.paths.result_pickle.exists():
        return 1
    kind, status = submitit.core.utils.pickle_load(job.paths.result_pickle)
    return status if kind == "success" and status >= 0 else 1
