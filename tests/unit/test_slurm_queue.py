"""What is read of squeue's answers, and which jobs of the queue are made eligible again."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from whale_train.launcher.slurm import wait
from whale_train.launcher.slurm.queue import (
    UNKNOWN,
    is_overlooked,
    make_eligible,
    notify,
    queue_states,
)
from whale_train.launcher.slurm.slurm_job import SlurmJob
from whale_train.launcher.slurm.wait import wait_for

Says = Callable[[str, int], None]


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    """Return what sets the answer of Slurm's commands, which note their arguments."""
    for name in ("squeue", "scancel", "scontrol"):
        (tmp_path / name).write_text(
            f'#!/bin/sh\necho "$(basename $0) $@" >> {tmp_path}/asked\n'
            f"if [ $(cat {tmp_path}/status) = 0 ]; then cat {tmp_path}/out; exit 0; fi\n"
            f"cat {tmp_path}/out >&2\nexit 1\n"
        )
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def answer(text: str, status: int = 0) -> None:
        (tmp_path / "out").write_text(text)
        (tmp_path / "status").write_text(str(status))

    return answer


def test_the_state_of_a_job_is_that_of_a_component_which_has_not_ended(says: Says) -> None:
    says("3+0 COMPLETED\n3+1 COMPLETING\n5_0 RUNNING\n7+1 PENDING\n7+0 PENDING\n9 FAILED\n", 0)
    assert queue_states(["3", "5_0", "7", "9", "11"]) == {
        "3": "COMPLETING",
        "5_0": "RUNNING",
        "7": "PENDING",
        "9": "FAILED",
    }
    says("slurm_load_jobs error: Invalid job id specified\n", 1)
    assert queue_states(["3"]) == {}
    says("slurm_load_jobs error: Unable to contact slurm controller\n", 1)
    assert queue_states(["3"]) == {"3": UNKNOWN}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("None N/A\nNone N/A\n", True),
        ("BeginTime N/A\nBeginTime N/A\n", True),
        ("BeginTime 2026-11-29T11:08:43\nNone N/A\n", False),
        ("Resources N/A\nNone N/A\n", False),
        ("(Nodes required for job are DOWN) N/A\n", False),
        ("", False),
    ],
)
def test_a_job_that_waits_for_no_reason_is_overlooked(
    lines: str, expected: bool, says: Says, tmp_path: Path
) -> None:
    says(lines, 0)
    assert is_overlooked("3") == expected
    make_eligible("3")
    notify("3")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[1:] == [
        "scontrol update jobid=3 starttime=now",
        "scancel --quiet --state=PENDING 3",
        "scancel --quiet --state=RUNNING --signal=USR2 3",
    ]


def test_a_job_that_slurm_ends_and_queues_again_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where `PreemptMode=REQUEUE` preempts a job: its tasks get SIGTERM, and it saves."""
    job = SlurmJob("3", tmp_path)
    seen = iter(["RUNNING", "COMPLETING", "PENDING", "RUNNING", "COMPLETING", ""])
    changes: list[str] = []

    def look(ids: object) -> dict[str, str]:
        state = next(seen)
        if state == "RUNNING":  # the task of rank 0 removes what the start before has left
            job.status_path.unlink(missing_ok=True)
        else:
            job.status_path.write_text("130")
        return {"3": state} if state else {}

    monkeypatch.setattr(wait.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(wait, "queue_states", look)
    assert wait_for([job], lambda number, state: changes.append(state)) == [130]
    assert changes == ["RUNNING", "COMPLETING", "PENDING", "RUNNING", "COMPLETING"]
    monkeypatch.setattr(wait, "queue_states", lambda ids: {"3": "RUNNING"})
    job.status_path.write_text("1")  # any other status is final
    assert wait_for([job], lambda number, state: None) == [1]


@pytest.mark.parametrize(("components", "told"), [(1, 0), (2, 2)])
def test_an_overlooked_job_is_made_eligible_until_it_runs(
    components: int, told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = SlurmJob("3", tmp_path, components)
    clock, states, asked = [0.0], [*("PENDING",) * 14, "RUNNING", "RUNNING"], list[str]()

    def look(ids: object) -> dict[str, str]:
        if len(states) == 1:
            job.status_path.write_text("0")
        return {"3": states.pop(0)}

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(wait.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(wait.time, "sleep", sleep)
    monkeypatch.setattr(wait, "queue_states", look)
    monkeypatch.setattr(wait, "is_overlooked", lambda job_id: True)
    monkeypatch.setattr(wait, "make_eligible", asked.append)
    changes: list[tuple[int, str]] = []
    assert wait_for([job], lambda number, state: changes.append((number, state))) == [0]
    assert changes == [(0, "PENDING"), (0, "RUNNING")]
    assert asked == ["3"] * told
