"""Which of several failures was first, and how it is said."""

from pathlib import Path

import pytest

from whale_train.launcher.ranks.host_process import RunFailure, describe_failure
from whale_train.runtime.failures import failure as rank_failure
from whale_train.runtime.failures.failure import (
    RankEnd,
    RankError,
    first_failure,
    is_communication_error,
    record_failure,
    step_in_progress,
)


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
    assert list(RunFailure.__annotations__) == list(rank_failure.Failure.__annotations__)


PLACE = "V100_SXM2_32GB, node 0, TaskGraphs 0 and 1"


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            RunFailure(3, "signal", "logs/rank_3.log", step=12, signal="SIGKILL"),
            f"rank 3 ({PLACE}) was killed by SIGKILL at step 12\nIts log: logs/rank_3.log",
        ),
        (
            RunFailure(3, "exit", "logs/rank_3.log", exit_status=7),
            f"rank 3 ({PLACE}) ended with exit status 7\nIts log: logs/rank_3.log",
        ),
        (
            RunFailure(
                3, "exception", "l", step=1, type="E", message="m", traceback="T:\n  E: m\n"
            ),
            f"rank 3 ({PLACE}) failed at step 1:\nT:\n  E: m\nIts log: l",
        ),
        (
            RunFailure(None, "signal", "logs/host.log", signal="SIGSEGV"),
            "the host process was killed by SIGSEGV\nIts log: logs/host.log",
        ),
    ],
)
def test_a_failure_is_one_message(failure: RunFailure, message: str) -> None:
    assert describe_failure(failure, PLACE) == message


def test_a_failure_that_says_its_step_is_of_that(tmp_path: Path) -> None:
    """Though the next is in progress by then."""
    (tmp_path / "logs").mkdir()
    error = ValueError("no number")
    error.step = 4  # type: ignore[attr-defined]
    assert record_failure(tmp_path, 1, error, step=5).step == 4
    error.step = "four"  # type: ignore[attr-defined]
    assert record_failure(tmp_path, 1, error, step=5).step == 5


def test_after_the_last_step_none_is_in_progress(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 6}\n')
    assert step_in_progress(tmp_path) == 7
    (tmp_path / "request.json").write_text('{"train": {"steps": 6}}')
    assert step_in_progress(tmp_path) is None


def test_what_is_known_whole_is_said_in_a_line() -> None:
    failure = RunFailure(0, "exception", "logs/rank_0.log", 3, type="LaunchError", message="full")
    said = "rank 0 (a GPU) failed at step 3: full\nIts log: logs/rank_0.log"
    assert describe_failure(failure, "a GPU") == said
