"""Name files of an object store by URL, and read, write and remove them through fsspec.

A `UrlPath` has the methods of `pathlib.Path` that readers of checkpoints use, so that they accept
both; `Place` is the union of the two. Files are read by byte ranges. Failed operations are retried,
and the last failure is raised as `StoreError`.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)")
# Seconds to wait before each retry of an operation that has failed.
PAUSES_S = (0.5, 1.5, 4.5)
_Result = TypeVar("_Result")


class StoreError(OSError):
    """An operation of a store has failed. The message has the URL and the store's own error."""


def is_url(text: str) -> bool:
    """Return whether a text is a URL, as `s3://bucket/run` or `dir::file:///run`, and not a
    path."""
    return _URL.match(text) is not None


def place_of(text: str) -> "Place":
    """Return the file or folder that a path or a URL names."""
    return UrlPath.of(text) if is_url(text) else Path(text)


def patiently(
    url: str, call: Callable[[], _Result], pauses_s: Sequence[float] | None = None
) -> _Result:
    """Return the result of an operation of a store, which is retried where it fails.

    url: the file or folder, for the message.
    call: the operation.
    pauses_s: seconds before each retry; None is PAUSES_S.

    Raises FileNotFoundError at once, and StoreError where the last attempt fails.
    """
    pauses = iter(PAUSES_S if pauses_s is None else pauses_s)
    while True:
        try:
            return call()
        except FileNotFoundError:
            raise
        except Exception as error:  # every fsspec implementation has errors of its own
            pause_s = next(pauses, None)
            if pause_s is None:
                raise StoreError(f"{url}: {words_of(error)}") from error
            time.sleep(pause_s)


def words_of(error: Exception) -> str:
    """Return a store's error as one line."""
    if isinstance(error, StoreError):
        return str(error)
    said = str(getattr(error, "strerror", None) or error).strip()
    lines = said.splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass(frozen=True, order=True)
class UrlPath:
    """A file or a folder of a store.

    url: the URL, without a slash at its end.
    """

    url: str

    @classmethod
    def of(cls, url: str) -> "UrlPath":
        """Return the path of a URL, which may have slashes at its end."""
        short = url.rstrip("/")
        return cls(url if short.endswith(":") else short)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "UrlPath":
        return UrlPath(f"{self.url}{'' if self.url.endswith('/') else '/'}{name}")

    @property
    def name(self) -> str:
        """Return the last part of the path; '' for the top of a store."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "UrlPath":
        """Return the folder that contains the file or folder."""
        return UrlPath.of(self.url.rpartition("/")[0] + "/")

    @property
    def suffix(self) -> str:
        """Return the suffix of the name, from the last dot on."""
        return Path(self.name).suffix

    def absolute(self) -> "UrlPath":
        """Return the path itself, since a URL is always absolute."""
        return self

    def opened(self) -> tuple[Any, str]:
        """Return fsspec's file system of the URL, and the path in that file system.

        Raises what fsspec and its implementation raise: ImportError where the implementation is not
        installed.
        """
        from fsspec.core import url_to_fs

        system, path = url_to_fs(self.url)
        return system, path

    def exists(self) -> bool:
        """Return whether the path is a file or a folder. Raises StoreError."""
        return self._entry() is not None

    def is_file(self) -> bool:
        """Return whether the path is a file. Raises StoreError."""
        entry = self._entry()
        return entry is not None and entry["type"] == "file"

    def is_dir(self) -> bool:
        """Return whether the path is a folder. In a store without folders, a path with files below
        it is one. Raises StoreError."""
        entry = self._entry()
        return entry is not None and entry["type"] == "directory"

    def size(self) -> int:
        """Return the bytes of a file. Raises FileNotFoundError and StoreError."""
        entry = self._entry()
        if entry is None:
            raise FileNotFoundError(self.url)
        if entry["type"] != "file":
            raise StoreError(f"{self.url}: not a file")
        return int(entry["size"])

    def _entry(self) -> dict[str, Any] | None:
        """Return fsspec's description of the file or folder, or None where neither exists."""

        def described() -> dict[str, Any]:
            system, path = self.opened()
            system.invalidate_cache()
            entry: dict[str, Any] = system.info(path)
            return entry

        try:
            return patiently(self.url, described)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every file below a folder, by path in the folder; empty where the
        folder does not exist. Raises StoreError."""

        def listed_below() -> dict[str, int]:
            system, path = self.opened()
            system.invalidate_cache()
            top = path.rstrip("/") + "/"
            files = system.find(path, detail=True).items()
            return {x.removeprefix(top): int(entry["size"] or 0) for x, entry in files}

        try:
            return patiently(self.url, listed_below)
        except FileNotFoundError:
            return {}

    def glob(self, pattern: str) -> Iterator["UrlPath"]:
        """Yield the entries of a folder whose names match a pattern, as `step_*`. Raises
        StoreError."""

        def names() -> list[str]:
            system, path = self.opened()
            system.invalidate_cache()
            return [x.rstrip("/").rpartition("/")[2] for x in system.ls(path, detail=False)]

        try:
            entries = sorted(patiently(self.url, names))
        except (FileNotFoundError, NotADirectoryError):
            return
        yield from (self / name for name in entries if fnmatchcase(name, pattern))

    def read_bytes(
        self, start: int = 0, stop: int | None = None, pauses_s: Sequence[float] | None = None
    ) -> bytes:
        """Return the bytes of a file from `start` up to but not including `stop`.

        pauses_s: as in `patiently`.

        Raises FileNotFoundError, and StoreError where the file has fewer bytes.
        """

        def read() -> bytes:
            system, path = self.opened()
            content = bytes(system.cat_file(path, start=start, end=stop))
            if stop is not None and len(content) != stop - start:
                raise StoreError(f"gave {len(content):,} of {stop - start:,} bytes")
            return content

        return b"" if start == stop else patiently(self.url, read, pauses_s)

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the text of a file. Raises FileNotFoundError, StoreError and ValueError."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: bytes, pauses_s: Sequence[float] | None = None) -> None:
        """Write a file with the bytes `content`. Raises StoreError.

        pauses_s: as in `patiently`.
        """

        def write() -> None:
            system, path = self.opened()
            _make_folder(system, path)
            system.pipe_file(path, content)

        self._written(write, pauses_s)

    def put(self, source: Path) -> None:
        """Write a file with the content of the local file `source`. Raises StoreError, and
        FileNotFoundError where the local file does not exist."""

        def put() -> None:
            system, path = self.opened()
            _make_folder(system, path)
            system.put_file(str(source), path)

        self._written(put, None, source)

    def _written(
        self,
        write: Callable[[], None],
        pauses_s: Sequence[float] | None,
        source: Path | None = None,
    ) -> None:
        """Call `write` with retries. A FileNotFoundError of the store, and not of the local
        `source`, is a failure and is retried."""

        def attempt() -> None:
            try:
                write()
            except FileNotFoundError as error:
                if source is not None and not source.exists():
                    raise
                raise StoreError(words_of(error)) from error

        patiently(self.url, attempt, pauses_s)

    def remove(self, pauses_s: Sequence[float] | None = None) -> None:
        """Remove a file, or a folder with all that is in it; do nothing where the path does not
        exist. Raises StoreError.

        pauses_s: as in `patiently`.
        """

        def remove() -> None:
            system, path = self.opened()
            system.invalidate_cache()
            system.rm(path, recursive=True)

        try:
            patiently(self.url, remove, pauses_s)
        except FileNotFoundError:
            return


Place = Path | UrlPath


def _make_folder(system: Any, path: str) -> None:
    """Make the folder of a file, in a store that has folders.

    Object stores, whose fsspec implementations are asynchronous, have none, and some would make a
    bucket.
    """
    if not system.async_impl:
        system.makedirs(path.rpartition("/")[0], exist_ok=True)
