"""The task of a rank in a job of Slurm: what it tells its command, and what it leaves.

The command is a script that says when it runs, ends with 130 on SIGUSR1, as one that has saved, and
with 7 on SIGTERM. `scontrol` is a script that notes its arguments.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from whale_train.launcher.slurm.task import job_id_of, with_resume

COMMAND = """
import signal, sys, time
from pathlib import Path
for number, status in ((signal.SIGUSR1, 130), (signal.SIGTERM, 7)):
    signal.signal(number, lambda n, frame, status=status: sys.exit(status))
if Path("deaf").exists():
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
Path("runs").write_text(" ".join(sys.argv[1:]))
until = time.monotonic() + 60
while not Path("end").exists() and time.monotonic() < until:
    time.sleep(0.02)
sys.exit(int(Path("end").read_text()))
"""
TASK = """
import os, sys
from pathlib import Path
from whale_train.launcher.slurm.task import TaskOptions, run_task
options = TaskOptions(Path("."), sys.argv[1], grace_s=30.0)
program = (sys.executable, "command.py")
sys.exit(run_task(options, sys.argv[2:], os.environ, program))
"""
DEADLINE_S = 60.0


class Task:
    """A task of job 7 in a folder of its own, whose command runs."""

    def __init__(self, folder: Path, notice: str, scontrol: int = 0, **variables: str) -> None:
        self.folder = folder
        (folder / "command.py").write_text(COMMAND)
        script = folder / "bin" / "scontrol"
        script.parent.mkdir()
        script.write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\nexit {scontrol}\n')
        script.chmod(0o755)
        others = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        own = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "PATH": path}
        self.process = subprocess.Popen(
            [sys.executable, "-c", TASK, notice, "a=b", "train.resume=old"],
            cwd=folder,
            env=others | own | variables,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + DEADLINE_S
        while not self.said("runs"):
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def said(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def ends(self, number: int | None = None) -> int:
        """Return the exit status after a signal to the task."""
        if number is not None:
            self.process.send_signal(number)
        self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode


@pytest.mark.parametrize(("status", "expected"), [("0", "0\n"), ("1", "1\n"), ("2", "2\n")])
def test_the_status_of_a_job_is_its_commands(tmp_path: Path, status: str, expected: str) -> None:
    task = Task(tmp_path, "requeue")
    (tmp_path / "end").write_text(status)
    assert task.ends() == int(status)
    assert (task.said("7.status"), task.said("asked")) == (expected, "")
    assert task.said("runs") == "a=b train.resume=old"


def test_a_job_that_has_saved_is_queued_again(tmp_path: Path) -> None:
    task = Task(tmp_path, "requeue")
    assert task.ends(signal.SIGUSR2) == 0
    assert (task.said("7.status"), task.said("asked")) == ("", "requeue 7\n")


@pytest.mark.parametrize(("notice", "status"), [("requeue", ""), ("end", "130\n")])
def test_a_command_that_does_not_listen_runs_again(
    tmp_path: Path, notice: str, status: str
) -> None:
    """As one that has begun just now, or is about to end."""
    (tmp_path / "deaf").touch()
    task = Task(tmp_path, notice)
    assert task.ends(signal.SIGUSR2) == 0
    assert task.said("7.status") == status
    assert task.said("asked") == ("requeue 7\n" if notice == "requeue" else "")


def test_a_job_that_slurm_does_not_queue_again_has_ended(tmp_path: Path) -> None:
    task = Task(tmp_path, "requeue", scontrol=1)
    assert task.ends(signal.SIGUSR2) == 130
    assert (task.said("7.status"), task.said("asked")) == ("130\n", "requeue 7\n")


def test_a_job_of_a_schedule_saves_and_ends(tmp_path: Path) -> None:
    task = Task(tmp_path, "end")
    assert task.ends(signal.SIGUSR2) == 0  # a bad exit would end the other ranks of the step
    assert (task.said("7.status"), task.said("asked")) == ("130\n", "")


@pytest.mark.parametrize("notice", ["ignore", "requeue"])
def test_other_ranks_and_jobs_that_cannot_save_heed_no_notice(tmp_path: Path, notice: str) -> None:
    rank = "0" if notice == "ignore" else "1"
    task = Task(tmp_path, notice, SLURM_PROCID=rank)
    task.process.send_signal(signal.SIGUSR2)
    (tmp_path / "end").write_text("3")
    assert task.ends() == (3 if rank == "0" else 0)
    assert (task.said("7.status"), task.said("asked")) == ("3\n" if rank == "0" else "", "")


def test_sigterm_is_passed_on(tmp_path: Path) -> None:
    task = Task(tmp_path, "requeue")
    assert task.ends(signal.SIGTERM) == 7
    assert (task.said("7.status"), task.said("asked")) == ("7\n", "")


def test_a_job_that_runs_again_goes_on(tmp_path: Path) -> None:
    (tmp_path / "7.status").write_text("130\n")  # of the start before
    task = Task(tmp_path, "requeue", SLURM_RESTART_COUNT="1")
    assert task.said("7.status") == ""
    assert task.said("runs") == "a=b train.resume=auto"
    assert task.ends(signal.SIGTERM) == 7
    assert with_resume(["a=b"], 0) == ["a=b"]


def test_a_task_of_an_array_has_its_own_command(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps([["--version"], ["no_key=1"]]))
    ids = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "1"}
    task = (sys.executable, "-m", "whale_train.launcher.slurm.task", f"--folder={tmp_path}")
    done = subprocess.run(
        [*task, f"--commands={tmp_path / 'c.json'}"],
        cwd=tmp_path,
        env=os.environ | ids,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: no_key=1 is not a key")
    assert (tmp_path / "8_1.status").read_text() == "2\n"
    assert job_id_of({"SLURM_JOB_ID": "7"}) == "7"
