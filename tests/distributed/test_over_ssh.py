"""`launcher=ssh`, between hosts with a real sshd each that share no files.

Not every run of the tests has all of them: that losses are those of one host is shown between such
hosts by test_on_slurm, too.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.distributed.apart import HostApart, can_be_apart
from tests.distributed.jobs import MIXED, Job, losses_alone, losses_in
from tests.distributed.sshd import SSHD, sshd_on
from tests.distributed.test_hosts_apart import MIX, SMALL

from whale_train.checkpoints.checkpoint_files import checkpoints_in

pytestmark = [
    pytest.mark.skipif(not can_be_apart(), reason="needs root, to make namespaces"),
    pytest.mark.skipif(SSHD is None, reason="needs sshd"),
]
OVER_SSH = ("launcher=ssh", "launcher.hosts=[apple,pear]", "hydra.run.dir=runs/a/b")


@pytest.fixture
def path(hosts: list[HostApart], tmp_path: Path) -> Iterator[str]:
    (tmp_path / "sshd").mkdir()
    with sshd_on(hosts, tmp_path / "sshd") as folder:
        yield os.pathsep.join((str(folder), os.environ["PATH"]))


def start(job: Job, hosts: list[HostApart], path: str, *overrides: str) -> None:
    inside = hosts[0].command()
    job.start(*SMALL, *overrides, environment={"PATH": path}, inside=inside)


def left_on(host: HostApart) -> str:
    """Return the commands of ours that run on a host."""
    found = subprocess.run(
        host.command("pgrep", "-af", "whale_train"), capture_output=True, text=True, check=False
    )
    return found.stdout


@pytest.mark.full
def test_ranks_are_started_on_hosts(job: Job, hosts: list[HostApart], path: str) -> None:
    """From the first of them, by a sweep: the same losses as on one host."""
    sweep = ("-m", "seed=0", "hydra.sweep.dir=runs/a")
    start(job, hosts, path, *MIX, *OVER_SSH[:2], "strategy=zero1", "train.steps=4", *sweep)
    assert job.wait() == [0], job.said("err")
    assert job.said("out").count("ranks: 2 on apple, 1 on pear\n") == 1
    expected = losses_alone(job, *SMALL, *MIX, "strategy=zero1", "train.steps=4")
    found = losses_in(job.folder / "runs" / "a" / "0")
    assert found == pytest.approx(expected, rel=2e-5)
    assert [left_on(host) for host in hosts] == ["", ""]


@pytest.mark.full
def test_the_mix_of_eight_and_eight(job: Job, hosts: list[HostApart], path: str) -> None:
    job.start(*MIXED, *OVER_SSH, environment={"PATH": path}, inside=hosts[0].command())
    assert job.wait(600.0) == [0], job.said("err")
    assert job.losses() == pytest.approx(losses_alone(job, *MIXED), rel=2e-5)
    assert [left_on(host) for host in hosts] == ["", ""]


def test_what_hosts_lack_is_said_of_all_before_anything_starts(
    job: Job, hosts: list[HostApart], path: str
) -> None:
    (job.folder / "text.txt").write_text("what only the first host has. " * 1000)
    wanted = ("launcher=ssh", "launcher.hosts=[apple,pear,fig]", "data.path=text.txt")
    start(job, hosts, path, *MIX, *wanted, "hydra.run.dir=runs/a/b")
    assert job.wait() == [2]
    assert job.said("err").replace("\n    ", "\n  ") == (
        "2 things are wrong with this request:\n"
        f"  launcher.hosts[1]=pear has no {job.folder}/text.txt; put it there: nothing is copied\n"
        "  launcher.hosts[2]=fig cannot be reached (ssh: Could not resolve hostname fig: Temporary "
        "failure in name resolution); `ssh fig true` has to do without a password\n"
    )
    job.started.clear()
    wanted = ("launcher=ssh", "launcher.hosts=[apple,pear]", "launcher.python=/no/python")
    start(job, hosts, path, *MIX, *wanted, "hydra.run.dir=runs/a/b")
    assert job.wait() == [2]
    rule = "has no /no/python; install it there, or say where it is by launcher.python"
    assert f"launcher.hosts[1]=pear {rule}\n" in job.said("err")
    job.started.clear()
    wanted = ("launcher=ssh", "launcher.hosts=[apple]", "hydra.run.dir=runs/a/b")
    start(job, hosts, path, *MIX, *wanted)
    assert job.wait() == [2]
    assert job.said("err") == (
        "error: launcher.hosts=apple are 1, and hardware=v100_p100_mix has 2 nodes; name a host "
        "for each node, in their order\n"
    )
    assert not job.run_dirs()


def test_ctrl_c_saves_on_all_hosts(job: Job, hosts: list[HostApart], path: str) -> None:
    endless = ("strategy=zero1", "train.steps=1000000", "checkpoint.every=1000000")
    start(job, hosts, path, *MIX, *OVER_SSH, *endless)
    job.wait_for_step(3)
    os.kill(_command_on(hosts[0]), signal.SIGINT)
    assert job.wait() == [130], job.said("err")
    done = len(job.metrics())
    assert f"interrupted after step {done}, which is saved" in job.said("err")
    (saved,) = checkpoints_in(job.run_dirs()[0] / "checkpoints")
    assert saved.name == f"step_{done}"
    assert [left_on(host) for host in hosts] == ["", ""]


@pytest.mark.full
def test_hosts_are_left_alone_when_the_command_is_killed(
    job: Job, hosts: list[HostApart], path: str
) -> None:
    start(job, hosts, path, *MIX, *OVER_SSH, "strategy=dp", "train.steps=1000000")
    job.wait_for_step(2)
    os.kill(_command_on(hosts[0]), signal.SIGKILL)
    job.wait()
    deadline = time.monotonic() + 30.0
    while any(left_on(host) for host in hosts):
        assert time.monotonic() < deadline, [left_on(host) for host in hosts]
        time.sleep(0.2)


def _command_on(host: HostApart) -> int:
    """Return the process, as this one knows it, of the command that was given on a host."""
    namespace = os.readlink(f"/proc/{host.pid}/ns/pid")
    command = [sys.executable, *SMALL]
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            line = (entry / "cmdline").read_text().split("\0")
            is_there = entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == namespace
            is_rank = b"\0RANK=" in (entry / "environ").read_bytes()
            if is_there and line[: len(command)] == command and not is_rank:
                return int(entry.name)
    raise AssertionError("no such process")
