"""A store that commands of tests reach by `watched:///FOLDER`: files of a folder, each read written
down, writes that fail or take long where the environment says so.

    WATCHED_LOG     a file that gets a line `PID BYTES` for each range that is read of tensors
    WATCHED_FAILS   PART:TIMES, how often a file whose path has PART cannot be written
    WATCHED_WAITS   PART: writing a file whose path has PART waits for ever, once it is said in
                    the file WATCHED_WAITING

fsspec finds it by the entry point that `environment` writes.
"""

import os
import time
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

ROOT = Path(__file__).resolve().parents[2]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a command that knows the store, whose package is made in `folder`."""
    package = folder / "watched" / "watched_store-1.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: watched-store\nVersion: 1\n")
    entry = "watched = tests.cli.watched_store:WatchedFileSystem"
    (package / "entry_points.txt").write_text(f"[fsspec.specs]\n{entry}\n")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(package.parent)])
    return {"PYTHONPATH": path, **more}


class WatchedFileSystem(LocalFileSystem):  # type: ignore[misc]
    """A folder of this machine as a store."""

    protocol = "watched"
    _failed = 0

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("watched://"))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        content: bytes = super().cat_file(path, start=start, end=end, **options)
        log = os.environ.get("WATCHED_LOG")
        if log and path.endswith(".safetensors"):
            with open(log, "a") as file:
                file.write(f"{os.getpid()} {len(content)}\n")
        return content

    def put_file(self, path1: str, path2: str, callback: Any = None, **options: Any) -> None:
        part, _, times = os.environ.get("WATCHED_FAILS", "").rpartition(":")
        if part and part in path2 and WatchedFileSystem._failed < int(times):
            WatchedFileSystem._failed += 1
            raise PermissionError("the store is closed")
        waits = os.environ.get("WATCHED_WAITS")
        if waits and waits in path2:
            Path(os.environ["WATCHED_WAITING"]).touch()
            time.sleep(1000)
        super().put_file(path1, path2, callback, **options)
