"""What a process may use of its machine, under limits as the kernel writes them."""

import os
from pathlib import Path

import pytest

from whale_train.machine import limits

CORES = len(os.sched_getaffinity(0))
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
GIB = 2**30
V1 = "12:pids:/jobs/one\n4:memory:/jobs/one\n2:cpu,cpuacct:/jobs/one\n"


def limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str]
) -> None:
    """Groups as in `files`, of which the process is in those that `own` says."""
    (tmp_path / "own").write_text(own)
    for path, content in files.items():
        file = tmp_path / "groups" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    monkeypatch.setattr(limits, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(limits, "OWN_GROUPS", tmp_path / "own")


@pytest.mark.parametrize(
    ("own", "files", "memory"),
    [
        ("0::/\n", {"memory.max": str(2 * GIB)}, 2 * GIB),
        ("0::/\n", {"memory.max": "max"}, MEMORY),
        ("0::/\n", {"memory.max": str(2**62)}, MEMORY),
        (
            "0::/jobs/one\n",
            {"jobs/one/memory.max": "max", "jobs/memory.max": str(GIB)},
            GIB,
        ),
        ("0::/jobs/one\n", {"jobs/two/memory.max": str(GIB)}, MEMORY),
        (V1, {"memory/jobs/one/memory.limit_in_bytes": str(GIB)}, GIB),
        # A container's folders begin with its own group.
        (V1, {"memory/memory.limit_in_bytes": str(2 * GIB)}, 2 * GIB),
        (V1, {"pids/jobs/one/memory.limit_in_bytes": str(2 * GIB)}, MEMORY),
        ("", {"memory.max": str(GIB)}, MEMORY),
    ],
    ids=["v2", "none", "more", "around", "another", "v1", "container", "other", "no_groups"],
)
def test_memory(
    own: str, files: dict[str, str], memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(tmp_path, monkeypatch, own, files)
    assert limits.memory_bytes() == memory - limits.PROGRAMS_BYTES


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "100000 100000"}, 1),
        ("0::/\n", {"cpu.max": "max 100000"}, CORES),
        ("0::/\n", {"cpu.max": f"{CORES}99999 100000"}, CORES),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/jobs/one\n", {"jobs/cpu.max": "150000 100000"}, 1),
        (
            V1,
            {"cpu/jobs/one/cpu.cfs_quota_us": "100000", "cpu/jobs/one/cpu.cfs_period_us": "100000"},
            1,
        ),
        (
            V1,
            {"cpu/jobs/one/cpu.cfs_quota_us": "-1", "cpu/jobs/one/cpu.cfs_period_us": "100000"},
            CORES,
        ),
        (V1, {"cpu/cpu.cfs_quota_us": "100000"}, CORES),
    ],
    ids=["one", "none", "more", "half", "around", "v1", "v1_none", "v1_half_written"],
)
def test_cores(
    own: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(tmp_path, monkeypatch, own, files)
    assert limits.cores() == cores


def test_several_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole ones: a rank more would take turns with the others."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    limited(tmp_path, monkeypatch, "0::/a\n", {"a/cpu.max": "350000 100000", "cpu.max": "max 1"})
    assert limits.cores() == 3


def test_programs_alone_may_be_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(tmp_path, monkeypatch, "0::/\n", {"memory.max": "500000000"})
    assert limits.memory_bytes() == 1
