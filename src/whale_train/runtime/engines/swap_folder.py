"""Give a rank a folder of its own on an NVMe disk, and remove folders whose rank has ended.

A rank holds a lock on a file in its folder. The lock ends with the process, whatever ended it, so a
folder with such a file and no lock on it has no owner. Folders without such a file are never
touched.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from whale_train.errors import LaunchError
from whale_train.strategies.plan.plan import Plan

_PREFIX = "whale-train-state-"
_LOCK = "lock_of_whale_train"
_STATES = ("offload_optimizer", "offload_param")


class SwapFolder:
    """A new folder inside `parent`, with a file that this process has locked.

    Raises LaunchError where none can be made, or where files in it cannot be read and written
    without the page cache, which DeepSpeed's library needs.
    """

    def __init__(self, parent: Path) -> None:
        remove_unowned(parent)
        while True:
            try:
                self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
                self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                os.close(os.open(self.path / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
                return
            except FileNotFoundError:  # removed by another process before it was locked
                if parent.is_dir():
                    continue
                _refuse(parent, "is no folder")
            except OSError as error:
                _refuse(parent, f"cannot hold what is offloaded ({error.strerror})")

    def remove(self) -> None:
        """Remove the folder with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            os.close(self._lock)


def remove_unowned(parent: Path) -> None:
    """Remove the folders of ranks inside `parent` whose process has ended."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


def remove_unowned_of(run_dir: Path) -> None:
    """Remove what ranks of the plan in `run_dir` that have ended left in folders on NVMe disks."""
    text = (run_dir / "plan.json").read_text(encoding="utf-8")
    if '"nvme_path"' in text:
        for parent in swap_parents(Plan.from_json(text)):
            remove_unowned(parent)


def swap_parents(plan: Plan) -> frozenset[Path]:
    """Return the folders in which the ranks of `plan` make folders of their own."""
    configs = (x for rank in plan.ranks for x in rank.deepspeed.values() if x is not None)
    return frozenset(path for config in configs for path in nvme_paths(config))


def nvme_paths(config: Mapping[str, Any]) -> frozenset[Path]:
    """Return the folders on NVMe disks that a DeepSpeed config names."""
    zero = config["zero_optimization"]
    given = (zero.get(state, {}).get("nvme_path") for state in _STATES)
    return frozenset(Path(path) for path in given if path is not None)


def within(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return `config` with `folder` in place of the folders on NVMe disks that it names."""
    zero = dict(config["zero_optimization"])
    for state in _STATES:
        if "nvme_path" in zero.get(state, {}):
            zero[state] = {**zero[state], "nvme_path": str(folder)}
    return {**config, "zero_optimization": zero}


def _refuse(parent: Path, rule: str) -> None:
    remedy = "name a writable folder of a local disk, by offload.path of the strategy"
    raise LaunchError(f"{parent} {rule}; {remedy}")
