"""Jobs whose ranks somebody else starts, as processes of a test."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

COMMAND = (
    *("-m", "whale_train.launcher.cli", "strategy=zero1", "hardware=cpu", "hardware.devices=2"),
    *("data.max_bytes=100000", "data.sequence_length=16", "train.global_batch=8"),
    *("model.sequence_length=16", "model.width=32", "model.depth=2"),
)
# The one that the product is for: processes for eight V100 on one host, and eight P100 on another.
MIXED = (
    *("-m", "whale_train.launcher.cli", "strategy=hybrid_split_dp", "hardware=v100_p100_mix"),
    "train.steps=5",
)
MARK = "WHALE_TRAIN_TEST_JOB"
DEADLINE_S = 120.0  # for what takes seconds when nothing is wrong


class Job:
    """The processes of one job and all they start, told by a mark in their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        inside: Sequence[str] = (),
    ) -> None:
        """Start Python with `arguments`, by the command `inside` if there is one."""
        number = len(self.started)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        # torchrun sets the threads itself, and other numbers of them would add up otherwise.
        own = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", MARK: self.mark}
        own["XDG_CONFIG_HOME"] = str(self.folder / "config")  # where a user's own secret is made
        with (
            (self.folder / f"out_{number}").open("w") as out,
            (self.folder / f"err_{number}").open("w") as err,
        ):
            process = subprocess.Popen(
                [*inside, sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                cwd=self.folder,
                env=inherited | own | (environment or {}),
                start_new_session=True,  # as a terminal gives its foreground job
            )
        self.started.append(process)

    def wait(self, deadline_s: float = DEADLINE_S) -> list[int]:
        """The exit status of each, once all have ended."""
        deadline = time.monotonic() + deadline_s
        return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.started]

    def said(self, stream: str) -> str:
        """All that came on `out` or `err`, process by process."""
        numbers = range(len(self.started))
        return "".join((self.folder / f"{stream}_{n}").read_text() for n in numbers)

    def run_dirs(self) -> list[Path]:
        return [*self.folder.glob("runs/*/*")]

    def metrics(self) -> list[dict[str, float]]:
        (run_dir,) = self.run_dirs()
        return metrics_in(run_dir)

    def losses(self) -> list[float]:
        (run_dir,) = self.run_dirs()
        return losses_in(run_dir)

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not [*self.folder.glob("runs/*/*/metrics.jsonl")] or len(self.metrics()) < step:
            assert all(p.poll() is None for p in self.started), self.said("err")
            assert time.monotonic() < deadline, "no step was made in time"
            time.sleep(0.05)

    def processes(self) -> dict[int, list[str]]:
        """Every living process of the job: pid to command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    line = (entry / "cmdline").read_text().split("\0")
                    if entry.name.isdigit() and line != [""]:  # a zombie has neither
                        found[int(entry.name)] = line
            except OSError:
                continue
        return found

    def member(self, rank: int) -> int:
        """The process that trains as this rank: it has the rank's log open."""
        (run_dir,) = self.run_dirs()
        log = str(run_dir / "logs" / f"rank_{rank}.log")
        (pid,) = (p for p in self.processes() if os.readlink(f"/proc/{p}/fd/1") == log)
        return pid

    def assert_nothing_left(self) -> None:
        deadline = time.monotonic() + 5.0  # the kernel's own time to end them
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.processes() == {}
        assert not [*self.folder.rglob("rendezvous")]


def metrics_in(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses_in(run_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics_in(run_dir)]


def losses_alone(job: Job, *arguments: str) -> list[float]:
    """The losses of a job of this process's own host, in the folder above that of `job`."""
    with job_in(job.folder.parent) as alone:
        alone.start(*arguments)
        assert alone.wait() == [0], alone.said("err")
        return alone.losses()


@contextmanager
def job_in(folder: Path) -> Iterator[Job]:
    """A job, of which nothing is left afterwards."""
    job = Job(folder)
    try:
        yield job
    finally:
        for pid in job.processes():
            os.kill(pid, signal.SIGKILL)
        for process in job.started:
            process.wait()
