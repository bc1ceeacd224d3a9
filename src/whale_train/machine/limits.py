"""Measure the cores and the memory that this process may use.

In a container, control groups limit the process, and the system's own figures do not show it. Read
are cgroup v2's `cpu.max` and `memory.max`, and v1's `cpu.cfs_quota_us` and `memory.limit_in_bytes`
(the kernel's admin-guide/cgroup-v2, scheduler/sched-bwc and cgroup-v1/memory), of the process's
groups and of all groups around them.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")

# The memory of the command, of the host process of the ranks, and of the libraries of all. Four
# ranks of a tiny Llama had 0.9 GB resident in all, two of a tiny GPT 0.74 GB (Pss of proc(5)).
PROGRAMS_BYTES = 800_000_000


def cores() -> int:
    """Return the number of cores that this process can use at one time, at least 1.

    It is the smaller of the number of cores that the process may run on and the CPU quota of its
    control groups, rounded down to whole cores.
    """
    limits = [len(os.sched_getaffinity(0)), *(int(quota) for quota in _quotas())]
    return max(1, min(limits))


def memory_bytes() -> int:
    """Return the bytes of memory that ranks may hold, at least 1.

    It is the machine's memory, or the limit of the control groups where that is less, minus
    `PROGRAMS_BYTES`.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _groups("memory"):
        said = _words(group / "memory.max") + _words(group / "memory.limit_in_bytes")
        limits += [int(word) for word in said if word.isdigit()]  # not "max"
    return max(1, min(limits) - PROGRAMS_BYTES)


def _quotas() -> Iterator[float]:
    """Yield the CPU quota, in cores, of every control group that limits this process."""
    for group in _groups("cpu"):
        limit = _words(group / "cpu.max")
        limit = limit or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if len(limit) == 2 and all(word.isdigit() for word in limit) and int(limit[1]) > 0:
            yield int(limit[0]) / int(limit[1])


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups under `controller`, and of the groups
    around them, for either version of cgroups.

    Inside a container the paths begin at the container's own group, whatever its path is outside.
    """
    for line in _lines(OWN_GROUPS):
        number, controllers, path = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        root = GROUPS if number == "0" else GROUPS / controller
        inner = root / path.lstrip("/")
        yield from (inner, *(folder for folder in inner.parents if folder.is_relative_to(root)))


def _words(path: Path) -> list[str]:
    """Return the words of a file, or an empty list where it cannot be read."""
    return [word for line in _lines(path) for word in line.split()]


def _lines(path: Path) -> list[str]:
    """Return the lines of a file, or an empty list where it does not exist or may not be read."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8").splitlines()
    return []
