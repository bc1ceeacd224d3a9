"""The fork server with real processes: ranks end well together, badly together, never alone.

Run as a program, this file is a host of one of ENTRIES below, or a parent of such a host:
both need a process of their own.
"""

import argparse
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

from whale_train.launcher.run_dir import create_run_dir
from whale_train.launcher.supervise import Failure, Host, describe_failure
from whale_train.runtime import failure as rank_failure
from whale_train.runtime.failure import (
    RankEnd,
    RankError,
    first_failure,
    is_communication_error,
    step_in_progress,
)

DEADLINE_S = 60.0


# What ranks do, in processes of their own.


def join(run_dir: Path, rank: int, world_size: int) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{run_dir}/rendezvous", rank=rank, world_size=world_size
    )


def succeed(run_dir: Path, rank: int, world_size: int, prepared: int) -> None:
    import numpy
    import torch
    import torch.distributed as dist

    join(run_dir, rank, world_size)
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    # Both pools of threads that a fork could have broken.
    row = torch.ones(2_000_000).mul(0.5).sum().item()
    product = float((numpy.ones((300, 300)) @ numpy.ones((300, 300))).sum())
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    report = {
        "total": total.item(),
        "row": row,
        "product": product,
        "threads": torch.get_num_threads(),
        "tasks": len(os.listdir("/proc/self/task")),
        "prepared": prepared,
        "host": os.getppid(),
        "environment": [os.environ[name] for name in names],
    }
    (run_dir / f"report_{rank}.json").write_text(json.dumps(report))
    print(f"I am {rank}")  # noqa: T201
    os.system("echo so says a child")
    dist.barrier()
    dist.destroy_process_group()


def raise_at_2(run_dir: Path, rank: int, world_size: int, prepared: int) -> None:
    join(run_dir, rank, world_size)
    loop(run_dir, rank, until=20 if rank == 2 else 10**9)
    lookup: dict[str, int] = {}
    lookup["absent"]


def loop_forever(run_dir: Path, rank: int, world_size: int, prepared: int) -> None:
    join(run_dir, rank, world_size)
    loop(run_dir, rank, until=10**9)


def loop(run_dir: Path, rank: int, until: int) -> None:
    import torch
    import torch.distributed as dist

    for step in range(until):
        dist.all_reduce(torch.ones(1000))
        if rank == 0:
            with (run_dir / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps({"step": step}) + "\n")
        if step == 2:
            (run_dir / f"pid_{rank}").write_text(str(os.getpid()))
        time.sleep(0.005)


def ignore_sigterm(run_dir: Path, rank: int, world_size: int, prepared: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (run_dir / f"pid_{rank}").write_text(str(os.getpid()))
    time.sleep(10**6)


def exit_3_at_1(run_dir: Path, rank: int, world_size: int, prepared: int) -> None:
    if rank == 1:
        sys.exit(3)
    time.sleep(10**6)


def never_called(run_dir: Path, rank: int, world_size: int, prepared: int) -> None:
    (run_dir / "called").touch()


ENTRIES: dict[str, Callable[[Path, int, int, int], None]] = {
    entry.__name__: entry
    for entry in (
        succeed,
        raise_at_2,
        loop_forever,
        ignore_sigterm,
        exit_3_at_1,
        never_called,
    )
}


def prepare(name: str, run_dir: Path) -> int:
    if name == "never_called":
        raise ValueError("no such model")
    return os.getpid()


def forget(run_dir: Path, prepared: int) -> None:
    with (run_dir / "forgotten").open("a") as file:
        file.write(f"{prepared} in {os.getpid()}\n")


def be_host(options: argparse.Namespace) -> int:
    from whale_train.runtime.host import (
        record_host_failure,
        serve,
        set_num_threads,
        wait_until_ready,
    )

    set_num_threads(1)
    try:
        wait_until_ready(options.run_dir, options.parent)
        return serve(
            options.run_dir,
            options.world_size,
            lambda: prepare(options.entry, options.run_dir),
            ENTRIES[options.entry],
            options.parent,
            lambda prepared: forget(options.run_dir, prepared),
        )
    except Exception as error:
        record_host_failure(options.run_dir, error)
        return 1


def be_parent(options: argparse.Namespace) -> int:
    host = Host.start(options.run_dir, program(options.entry, options.world_size))
    (options.run_dir / "pid_host").write_text(str(host.pid))
    (options.run_dir / "ready").touch()
    return 0 if host.wait(lambda: None).status == "done" else 1


def program(entry: str, world_size: int, role: str = "host") -> tuple[str, ...]:
    return (sys.executable, __file__, role, entry, str(world_size))


# How the tests look at processes.


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
def start(run_dir: Path) -> Iterator[Callable[[str, int], Host]]:
    hosts: list[Host] = []

    def started(entry: str, world_size: int) -> Host:
        host = Host.start(run_dir, program(entry, world_size))
        hosts.append(host)
        (run_dir / "ready").touch()
        return host

    yield started
    for host in hosts:
        host.stop()


Start = Callable[[str, int], Host]


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
    cores = len(os.sched_getaffinity(0))
    report = json.loads((run_dir / "report_0.json").read_text())
    assert report["threads"] == max(1, cores // 2)


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
    assert outcome.failure == Failure(1, "exit", "logs/rank_1.log", exit_status=3)


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
    assert outcome.failure == Failure(None, "signal", "logs/host.log", signal="SIGKILL")


@pytest.mark.parametrize("entry", ["loop_forever", "ignore_sigterm"])
def test_sigterm_to_the_host_ends_all(run_dir: Path, start: Start, entry: str) -> None:
    host = start(entry, 3)
    ranks = pids(run_dir, 3)
    os.kill(host.pid, signal.SIGTERM)
    assert host.wait(lambda: None).status == "interrupted"
    assert not any(is_alive(pid) for pid in ranks)
    assert not (run_dir / "failure.json").exists()


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
    host = Host.start(run_dir, program("succeed", 2))
    host.stop()
    assert session_of(host.pid) == []
    assert list((run_dir / "logs").glob("rank_*")) == []


@pytest.mark.parametrize("entry", ["loop_forever", "ignore_sigterm"])
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


def test_the_host_program_itself_reports_what_it_cannot_do(run_dir: Path) -> None:
    host = Host.start(run_dir)
    (run_dir / "ready").touch()  # without the request that the parent writes first
    outcome = host.wait(lambda: None)
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.kind) == (None, "exception")
    assert "request.json" in (outcome.failure.message or "")


# Which failure was first: no processes.


def error(rank: int, time_s: float, communication: bool) -> RankError:
    return RankError(rank, time_s, "E", "m", communication, 5, f"traceback of {rank}")


@pytest.mark.parametrize(
    ("ends", "errors", "culprit"),
    [
        # Killed, while the others' collectives broke a moment earlier than it was noticed.
        ([(0, 1, 10.0), (1, -9, 10.5)], [error(0, 9.9, True)], (1, "signal")),
        # Killed, and another's error is not known as a broken collective.
        ([(0, 1, 10.0), (1, -11, 10.5)], [error(0, 9.9, False)], (1, "signal")),
        # The first own error, whoever was reaped first.
        ([(0, 1, 10.0), (2, 1, 10.1)], [error(0, 9.0, True), error(2, 9.5, False)], (2, None)),
        ([(0, 1, 10.0), (2, 1, 10.1)], [error(0, 9.6, False), error(2, 9.5, False)], (2, None)),
        # An abort is what communication libraries do when a peer is lost ...
        ([(0, -6, 10.0), (2, 1, 10.1)], [error(2, 9.5, False)], (2, None)),
        # ... unless it came first.
        ([(0, -6, 10.0), (2, 1, 10.1)], [error(2, 9.5, True)], (0, "signal")),
        # An exit without a word outranks the errors it caused.
        ([(0, 1, 10.0), (1, 7, 10.1)], [error(0, 9.5, True)], (1, "exit")),
        # Recorded, but still on its way out.
        ([(0, 1, 10.0)], [error(0, 9.0, True), error(3, 9.5, False)], (3, None)),
        # Only broken collectives: the earliest.
        ([(0, 1, 10.0), (1, 1, 10.0)], [error(0, 9.8, True), error(1, 9.7, True)], (1, None)),
        # A rank that ended well failed of nothing.
        ([(0, 0, 9.0), (1, -9, 10.0)], [], (1, "signal")),
    ],
)
def test_the_cause_is_told_from_its_echoes(
    ends: list[tuple[int, int, float]],
    errors: list[RankError],
    culprit: tuple[int, str | None],
) -> None:
    failure = first_failure([RankEnd(*end) for end in ends], {e.rank: e for e in errors}, step=8)
    assert (failure.rank, failure.kind) == (culprit[0], culprit[1] or "exception")
    assert failure.step == (8 if culprit[1] else 5)
    assert failure.log == f"logs/rank_{culprit[0]}.log"


def test_communication_errors_are_known_by_type_or_text() -> None:
    import torch.distributed as dist

    closed = RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:3")
    wrapped = ValueError("no batch")
    wrapped.__cause__ = closed
    for broken in (closed, wrapped, dist.DistBackendError("x"), ConnectionResetError("x")):
        assert is_communication_error(broken)
    for own in (RuntimeError("shape '[2]' is invalid"), KeyError("timeout"), MemoryError()):
        assert not is_communication_error(own)


def test_the_step_is_the_one_after_the_last_whole_line(tmp_path: Path) -> None:
    assert step_in_progress(tmp_path) is None
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("")
    assert step_in_progress(tmp_path) is None
    metrics.write_text('{"step": 3}\n{"step": 4}\n{"st')
    assert step_in_progress(tmp_path) == 5


def test_both_sides_of_failure_json_have_the_same_fields() -> None:
    assert list(Failure.__annotations__) == list(rank_failure.Failure.__annotations__)


PLACE = "V100_SXM2_32GB, node 0, TaskGraphs 0 and 1"


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            Failure(3, "signal", "logs/rank_3.log", step=12, signal="SIGKILL"),
            f"rank 3 ({PLACE}) was killed by SIGKILL at step 12\nIts log: logs/rank_3.log",
        ),
        (
            Failure(3, "exit", "logs/rank_3.log", exit_status=7),
            f"rank 3 ({PLACE}) ended with exit status 7\nIts log: logs/rank_3.log",
        ),
        (
            Failure(3, "exception", "l", step=1, type="E", message="m", traceback="T:\n  E: m\n"),
            f"rank 3 ({PLACE}) failed at step 1:\nT:\n  E: m\nIts log: l",
        ),
        (
            Failure(None, "signal", "logs/host.log", signal="SIGSEGV"),
            "the host process was killed by SIGSEGV\nIts log: logs/host.log",
        ),
    ],
)
def test_a_failure_is_one_message(failure: Failure, message: str) -> None:
    assert describe_failure(failure, PLACE) == message


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["host", "parent"])
    parser.add_argument("entry")
    parser.add_argument("world_size", type=int)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--parent", type=int)
    given = parser.parse_args()
    sys.exit(be_host(given) if given.role == "host" else be_parent(given))


def test_a_stop_before_there_are_ranks_takes_the_compilers_along(tmp_path: Path) -> None:
    """`stop_before_ranks` in a process that leads a session, as the host does, with a child."""
    program_text = (
        "import signal, subprocess, sys, time\n"
        "from whale_train.runtime.host import stop_before_ranks\n"
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
