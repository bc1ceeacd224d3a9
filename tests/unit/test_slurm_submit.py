"""Which jobs are arrays, under which names their files are, and what is said of a refusal.

`sbatch` is a script that notes the file it is given, and counts job ids from 7 up.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.unit.test_started_elsewhere import MIX, OLD, request_of

from whale_train.errors import ConfigError
from whale_train.launcher.slurm.submit import Submission, submit

SBATCH = """#!/bin/sh
echo "$2" >> {folder}/asked
number=$(wc -l < {folder}/asked)
echo "$((number + 6));cluster"
"""
REFUSES = """#!/bin/sh
echo "sbatch: error: invalid partition specified: nowhere" >&2
echo "sbatch: error: Batch job submission failed: Invalid partition name specified" >&2
exit 1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the jobs' files, beside those of `sbatch`."""
    (tmp_path / "sbatch").write_text(SBATCH.format(folder=tmp_path))
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "slurm"


def jobs_of(*sweep: Sequence[str]) -> list[Submission]:
    """Return the submissions of a sweep, by the overrides of each job."""
    requests = [request_of("launcher=slurm", *overrides) for overrides in sweep]
    return [
        Submission.of(request, [f"seed={number}"], Path("runs"), commands=())
        for number, request in enumerate(requests)
    ]


def asked(folder: Path) -> list[str]:
    """Return the names of the files that `sbatch` was given."""
    return [Path(line).name for line in (folder.parent / "asked").read_text().splitlines()]


def test_jobs_that_are_alike_are_one_array(folder: Path) -> None:
    saves = "checkpoint.every=5"
    jobs = submit(jobs_of([MIX], [MIX, saves], [MIX], ["hardware=dgx_a100"], [MIX]), folder)
    assert [job.job_id for job in jobs] == ["7_0", "8", "7_1", "9", "7_2"]
    assert asked(folder) == ["submission.sh", "2_submission.sh", "3_submission.sh"]
    text = (folder / "submission.sh").read_text()
    assert "#SBATCH --array=0-2%3\n" in text
    assert f"--commands={folder}/submission.json" in text
    commands = json.loads((folder / "submission.json").read_text())
    assert commands == [[f"seed={number}", "launcher.kind=auto"] for number in (0, 2, 4)]
    assert f"#SBATCH --output={folder}/%A_%a.out\n" in text
    assert jobs[2].stdout == folder / "7_1.out"
    assert "    seed=1\n" in (folder / "2_submission.sh").read_text()
    (again,) = submit(jobs_of([MIX]), folder)  # as a run that goes on
    assert (again.job_id, asked(folder)[-1]) == ("10", "4_submission.sh")


def test_heterogeneous_jobs_are_no_array(folder: Path) -> None:
    jobs = submit(jobs_of([MIX, OLD], [MIX, OLD]), folder)
    assert [(job.job_id, job.num_components) for job in jobs] == [("7", 2), ("8", 2)]
    assert asked(folder) == ["submission.sh", "2_submission.sh"]
    assert "--array" not in (folder / "submission.sh").read_text()


def test_a_sweep_is_refused_as_one(folder: Path) -> None:
    scancel = folder.parent / "scancel"
    scancel.write_text(f'#!/bin/sh\necho "$@" >> {folder.parent}/cancelled\n')
    scancel.chmod(0o755)
    one, two = folder.parent / "sbatch", folder.parent / "second"
    two.write_text(REFUSES)
    two.chmod(0o755)
    one.write_text(f"{SBATCH.format(folder=folder.parent)}mv {two} {one}\n")
    with pytest.raises(ConfigError):
        submit(jobs_of([MIX, OLD], [MIX, OLD]), folder)
    assert (folder.parent / "cancelled").read_text() == "--quiet 7\n"


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        ([MIX], "change what it names"),
        ([MIX, OLD], "change what it, or slurm of hardware.nodes, names"),
    ],
)
def test_the_reason_of_a_refusal_is_slurms(overrides: list[str], remedy: str, folder: Path) -> None:
    (folder.parent / "sbatch").write_text(REFUSES)
    with pytest.raises(ConfigError) as error:
        submit(jobs_of(overrides), folder)
    assert [str(fault) for fault in error.value.faults] == [
        "launcher.sbatch is not taken by Slurm (error: invalid partition specified: nowhere); "
        + remedy
    ]
