"""The fork server with real processes: ranks end well together, badly together, never alone."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.distributed.host_program import program
from tests.pairs import some

from whale_train.launcher.ranks.early_host import EarlyHost
from whale_train.launcher.ranks.host_process import HostProcess, RunFailure
from whale_train.launcher.ranks.run_dir import create_run_dir
from whale_train.machine.limits import cores

DEADLINE_S = 60.0


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Running or about to; a zombie that nobody reaps is neither."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def session_of(pid: int) -> list[int]:
    """The living processes of the session that `pid` leads or led."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == pid and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found


def pids(run_dir: Path, world_size: int) -> list[int]:
    """The ranks' pids, once all have written them."""
    files = [run_dir / f"pid_{rank}" for rank in range(world_size)]
    eventually(lambda: all(f.exists() and f.read_text() for f in files), "all ranks running")
    return [int(file.read_text()) for file in files]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return create_run_dir(tmp_path / "run")


@pytest.fixture
def start(run_dir: Path) -> Iterator[Callable[[str, int], HostProcess]]:
    hosts: list[HostProcess] = []

    def started(entry: str, world_size: int) -> HostProcess:
        host = HostProcess.start(run_dir, program(entry, world_size))
        hosts.append(host)
        (run_dir / "ready").touch()
        return host

    yield started
    for host in hosts:
        host.stop()


Start = Callable[[str, int], HostProcess]


def test_ranks_run_together_and_end_with_nothing_left(
    run_dir: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    host = start("succeed", 3)
    polls: list[int] = []
    assert host.wait(lambda: polls.append(1)).status == "done"
    assert polls
    for rank in range(3):
        report = json.loads((run_dir / f"report_{rank}.json").read_text())
        assert report["total"] == 6.0
        assert report["row"] == 1_000_000.0
        assert report["product"] == 300.0**3
        assert report["threads"] == 2
        assert report["tasks"] > 1
        assert report["environment"] == [str(rank), "3", str(rank), "3"]
        # Prepared once, in the host, and inherited.
        assert report["prepared"] == report["host"] == host.pid
        log = (run_dir / "logs" / f"rank_{rank}.log").read_text()
        assert f"I am {rank}\n" in log
        assert "so says a child\n" in log
        assert f"I am {(rank + 1) % 3}\n" not in log
    assert (run_dir / "forgotten").read_text() == f"{host.pid} in {host.pid}\n"
    assert session_of(host.pid) == []
    assert not (run_dir / "rendezvous").exists()
    assert not (run_dir / "failure.json").exists()


def test_cores_are_shared_between_the_ranks(
    run_dir: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert start("succeed", 2).wait(lambda: None).status == "done"
    report = json.loads((run_dir / "report_0.json").read_text())
    assert report["threads"] == max(1, cores() // 2)


def test_the_rank_that_raised_is_named_not_those_it_took_along(run_dir: Path, start: Start) -> None:
    host = start("raise_at_2", 4)
    outcome = host.wait(lambda: None)
    assert outcome.status == "failed"
    failure = outcome.failure
    assert failure is not None
    assert (failure.rank, failure.kind, failure.type) == (2, "exception", "KeyError")
    assert failure.traceback is not None
    assert 'lookup["absent"]' in failure.traceback
    assert "become_rank" not in failure.traceback
    # 20 collectives: steps 0 to 19 are finished, or rank 0 had not written the last one yet.
    assert failure.step in (19, 20)
    assert 'lookup["absent"]' in (run_dir / "logs" / "rank_2.log").read_text()
    assert session_of(host.pid) == []


@pytest.mark.full  # test_faults asks it of a whole job
def test_a_killed_rank_is_named(run_dir: Path, start: Start) -> None:
    host = start("loop_forever", 4)
    ranks = pids(run_dir, 4)
    victim = random.randrange(4)
    os.kill(ranks[victim], signal.SIGKILL)
    outcome = host.wait(lambda: None)
    assert outcome.status == "failed"
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.signal) == (victim, "SIGKILL")
    assert outcome.failure.step is not None
    assert outcome.failure.step > 2
    assert not any(is_alive(pid) for pid in ranks)


def test_an_exit_status_is_a_failure(run_dir: Path, start: Start) -> None:
    outcome = start("exit_3_at_1", 3).wait(lambda: None)
    assert outcome.failure == RunFailure(1, "exit", "logs/rank_1.log", exit_status=3)


def test_a_host_that_fails_itself_says_of_what(run_dir: Path, start: Start) -> None:
    outcome = start("never_called", 2).wait(lambda: None)
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.message) == (None, "no such model")
    assert not (run_dir / "called").exists()
    assert "no such model" in (run_dir / "logs" / "host.log").read_text()


def test_a_killed_host_takes_its_ranks_along(run_dir: Path, start: Start) -> None:
    host = start("ignore_sigterm", 2)
    ranks = pids(run_dir, 2)
    os.kill(host.pid, signal.SIGKILL)
    # By themselves: the parent has not looked yet.
    eventually(lambda: not any(is_alive(pid) for pid in ranks), "ranks of a killed host gone")
    outcome = host.wait(lambda: None)
    assert outcome.failure == RunFailure(None, "signal", "logs/host.log", signal="SIGKILL")


@pytest.mark.parametrize("entry", some(["loop_forever", "ignore_sigterm"], ["ignore_sigterm"]))
def test_sigterm_to_the_host_ends_all(run_dir: Path, start: Start, entry: str) -> None:
    host = start(entry, 3)
    ranks = pids(run_dir, 3)
    os.kill(host.pid, signal.SIGTERM)
    assert host.wait(lambda: None).status == "interrupted"
    assert not any(is_alive(pid) for pid in ranks)
    assert not (run_dir / "failure.json").exists()


@pytest.mark.full  # test_faults asks it of a whole job
def test_ctrl_c_in_the_parent_ends_all(run_dir: Path, start: Start) -> None:
    host = start("loop_forever", 3)
    ranks = pids(run_dir, 3)

    def ctrl_c() -> None:
        raise KeyboardInterrupt

    assert host.wait(ctrl_c).status == "interrupted"
    assert not any(is_alive(pid) for pid in ranks)
    assert session_of(host.pid) == []


def test_an_error_of_the_display_ends_all_and_is_raised(run_dir: Path, start: Start) -> None:
    host = start("loop_forever", 2)
    ranks = pids(run_dir, 2)
    with pytest.raises(ZeroDivisionError):
        host.wait(lambda: print(1 // 0))  # noqa: T201
    assert not any(is_alive(pid) for pid in ranks)


def test_a_host_can_be_stopped_before_it_is_ready(run_dir: Path) -> None:
    host = HostProcess.start(run_dir, program("succeed", 2))
    host.stop()
    assert session_of(host.pid) == []
    assert list((run_dir / "logs").glob("rank_*")) == []


@pytest.mark.parametrize("entry", some(["loop_forever", "ignore_sigterm"], ["loop_forever"]))
def test_a_killed_parent_leaves_nothing(run_dir: Path, entry: str) -> None:
    parent = subprocess.Popen([*program(entry, 2, "parent"), "--run-dir", str(run_dir)])
    try:
        ranks = pids(run_dir, 2)
        host = int((run_dir / "pid_host").read_text())
        assert set(session_of(host)) >= {host, *ranks}
    finally:
        parent.kill()
        parent.wait()
    try:
        eventually(lambda: not session_of(host), "host and ranks of a killed parent gone")
    finally:
        for pid in session_of(host):
            os.kill(pid, signal.SIGKILL)


# A host that says of what it fails is above; this one is of the program that the command starts.
@pytest.mark.full
def test_the_host_program_itself_reports_what_it_cannot_do(run_dir: Path) -> None:
    host = HostProcess.start(run_dir)
    (run_dir / "ready").touch()  # without the request that the parent writes first
    outcome = host.wait(lambda: None)
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.kind) == (None, "exception")
    assert "request.json" in (outcome.failure.message or "")


# Jobs of tests/cli take early hosts of forks of `warm.py`; this one is a program.
@pytest.mark.full
def test_an_early_host_is_taken_once_and_logs_where_it_is_told(run_dir: Path) -> None:
    early = EarlyHost.start()
    try:
        host = HostProcess.of(run_dir, early)
        (run_dir / "ready").touch()  # without the request that the parent writes first
        assert early.take(run_dir) is None
        outcome = host.wait(lambda: None)
    finally:
        early.stop()
    assert outcome.failure is not None
    assert "request.json" in (outcome.failure.message or "")
    assert "request.json" in (run_dir / "logs" / "host.log").read_text()


def test_an_early_host_is_ended_where_another_would_differ(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = EarlyHost.start()
    try:
        pid = early.pid
        monkeypatch.setenv("WHALE_TRAIN_TEST_OTHER", "1")
        assert early.take(run_dir) is None
        assert session_of(pid) == []
    finally:
        early.stop()


def test_a_stop_before_there_are_ranks_takes_the_compilers_along(tmp_path: Path) -> None:
    """`stop_before_ranks` in a process that leads a session, as the host does, with a child."""
    program_text = (
        "import signal, subprocess, sys, time\n"
        "from whale_train.runtime.process.fork_server import stop_before_ranks\n"
        "signal.signal(signal.SIGTERM, stop_before_ranks)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    host = subprocess.Popen(
        [sys.executable, "-c", program_text],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert host.stdout is not None
    child = int(host.stdout.readline())
    assert child in session_of(host.pid)
    host.terminate()
    assert host.wait(timeout=10) == 130
    eventually(lambda: not session_of(host.pid), "the compiler gone")
