"""The index of a shard: the place of each member of each sample, made once and cached.

A shard is a tar file by WebDataset's rules. A member is named KEY.EXTENSION, where KEY goes up to
the first dot of the file's name. Consecutive members of one key are a sample. Whole numbers (`cls`)
are in the index itself.

An index depends only on the headers of the tar. Its name in the cache is a digest of the shard's
size, the time of its last change, its beginning and its end. A reader of a member compares the
member's header with the checksum in the index.
"""

import fcntl
import os
import re
import tarfile
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from zipfile import BadZipFile
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from whale_train.data.paths import path_error, unreadable
from whale_train.errors import ConfigError, Fault

FORMAT = 1  # the format of indexes, which is a part of their name
NUMBERS = ("cls", "cls2", "class", "count", "id", "index", "inx")  # extensions of whole numbers
NO_NUMBER = np.iinfo(np.int64).min  # stands for a value that is no whole number of 64 bits
HEADER_BYTES = 512
_ENDS_BYTES = 1 << 16
_MOST_DIGITS = 64
_AFTER_BYTES = 1 << 20  # bytes after a tar's end that are checked
_MEMBER = re.compile(r"^((?:.*/)?[^./]+)\.([^/]+)$", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")
_WHOLE = "write it again, or copy it whole"


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Members of the samples of a shard.

    keys: keys of the samples, in UTF-8, with zero bytes between them.
    extensions: extensions that any sample has, in lower case.
    starts: byte offsets of members' contents, int64 `[samples, extensions]`; -1 for no member.
    sizes: sizes of members' contents in bytes, int64 `[samples, extensions]`.
    checks: CRC-32 of members' headers, uint32 `[samples, extensions]`.
    numbers: whole numbers in members, int64 `[samples, extensions]`; `NO_NUMBER` elsewhere.
    """

    keys: bytes
    extensions: tuple[str, ...]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    checks: NDArray[np.uint32]
    numbers: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def key(self, row: int) -> str:
        """Return the key of a sample."""
        return self.keys.split(b"\0")[row].decode("utf-8", "backslashreplace")


def indexed(file: str, cache: Path) -> ShardIndex:
    """Return the index of a shard, after making it where the folder `cache` has none.

    Raises ConfigError where the shard is not a complete tar, has no samples, has a member twice, or
    cannot be read, and where the index cannot be written.
    """
    try:
        name = _name(file)
    except OSError as error:
        raise unreadable(error, file) from error
    path = cache / f"{name}.npz"
    index = _kept(path)
    if index is not None:
        return index
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with open(cache / f"{name}.lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process of a host makes the index
            index = _kept(path)
            if index is None:
                index = _made(file)
                _keep(index, path)
            return index
    except OSError as error:
        rule = f"cannot keep the index of a shard ({error.strerror or error})"
        remedy = "name another folder with data.cache, or make room"
        fault = Fault("data.cache", str(error.filename or cache), rule, remedy)
        raise ConfigError([fault]) from error


def _name(file: str) -> str:
    """Return the name of a shard's index in the cache: a digest that changes with the shard."""
    with open(file, "rb") as opened:
        stat = os.fstat(opened.fileno())
        digest = blake2b(f"{FORMAT} {stat.st_size} {stat.st_mtime_ns}\n".encode(), digest_size=16)
        digest.update(opened.read(_ENDS_BYTES))
        opened.seek(max(0, stat.st_size - _ENDS_BYTES))
        digest.update(opened.read())
    return digest.hexdigest()


def _kept(path: Path) -> ShardIndex | None:
    """Return the index in a file of the cache, or None where the file is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as saved:
            extensions = tuple(saved["extensions"].tobytes().decode().split("\0"))
            starts, sizes = saved["starts"], saved["sizes"]
            checks, numbers = saved["checks"], saved["numbers"]
            keys = saved["keys"].tobytes()
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None
    shape = (keys.count(b"\0") + 1, len(extensions))
    if any(table.shape != shape for table in (starts, sizes, checks, numbers)):
        return None
    return ShardIndex(keys, extensions, starts, sizes, checks, numbers)


def _keep(index: ShardIndex, path: Path) -> None:
    """Write an index into the cache, first under another name."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            np.savez(
                file,
                keys=np.frombuffer(index.keys, np.uint8),
                extensions=np.frombuffer("\0".join(index.extensions).encode(), np.uint8),
                starts=index.starts,
                sizes=index.sizes,
                checks=index.checks,
                numbers=index.numbers,
            )
        unfinished.replace(path)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


@dataclass
class _Rows:
    """The samples of a shard that have been read so far.

    keys: the key of each sample.
    members: for each sample, the members by extension: place, size, checksum and number.
    """

    keys: list[str] = field(default_factory=list)
    members: list[dict[str, tuple[int, int, int, int]]] = field(default_factory=list)

    def index(self) -> ShardIndex:
        """Return the samples as an index."""
        extensions = tuple(sorted({x for row in self.members for x in row}))
        absent = (-1, 0, 0, int(NO_NUMBER))
        table = np.array([[row.get(x, absent) for x in extensions] for row in self.members])
        table = table.reshape(len(self.keys), len(extensions), 4).astype(np.int64)
        starts, sizes, checks, numbers = (np.ascontiguousarray(table[..., i]) for i in range(4))
        keys = "\0".join(self.keys).encode("utf-8", "surrogateescape")
        return ShardIndex(keys, extensions, starts, sizes, checks.astype(np.uint32), numbers)


def _made(file: str) -> ShardIndex:
    """Return the index of a shard, from its headers. Raises ConfigError where the shard is not a
    complete tar, or has no samples."""
    rows = _Rows()
    size = os.path.getsize(file)
    try:
        with tarfile.open(file, "r:") as tar, open(file, "rb") as opened:
            reader = opened.fileno()
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # it keeps all of them
                if member.offset_data + member.size > size:
                    raise tarfile.ReadError(f"{member.name} ends behind the file's end")
                _add(rows, member, reader, file)
            _refuse_open_end(file, reader, tar.offset)
    except tarfile.TarError as error:
        raise path_error(file, f"is no whole tar ({error})", _WHOLE) from error
    if not rows.keys:
        remedy = "name its files KEY.EXTENSION, as 000001.jpg and 000001.cls"
        raise path_error(file, "has no samples", remedy)
    return rows.index()


def _add(rows: _Rows, member: tarfile.TarInfo, reader: int, file: str) -> None:
    """Add a member of a tar to the samples. Members that WebDataset does not name, and members
    other than files, are skipped. Raises ConfigError for a link, for a sparse file, and for a
    member that a sample has twice."""
    parts = _MEMBER.match(member.name)
    if parts is None or _META.match(member.name):
        return
    if member.islnk() or member.issym():
        rule = f"keeps {member.name} as a link to {member.linkname}"
        remedy = "write the tar with files, as tar --dereference --hard-dereference does"
        raise path_error(file, rule, remedy)
    if not member.isreg():
        return
    if member.issparse():
        remedy = "write the tar without --sparse"
        raise path_error(file, f"keeps {member.name} as a sparse file", remedy)
    key, extension = parts[1], parts[2].lower()
    if not rows.keys or rows.keys[-1] != key:
        rows.keys.append(key)
        rows.members.append({})
    if extension in rows.members[-1]:
        remedy = "give every member a name of its own, and samples of one key other keys"
        raise path_error(file, f"has {key}.{extension} twice in a sample", remedy)
    header = os.pread(reader, HEADER_BYTES, member.offset_data - HEADER_BYTES)
    number = int(NO_NUMBER)
    if extension.rpartition(".")[2] in NUMBERS and member.size <= _MOST_DIGITS:
        with suppress(ValueError):
            read = int(os.pread(reader, member.size, member.offset_data))
            number = read if -(2**63) < read < 2**63 else number
    rows.members[-1][extension] = (member.offset_data, member.size, crc32(header), number)


def _refuse_open_end(file: str, reader: int, end: int) -> None:
    """Raise ConfigError where a tar has no end mark at byte `end`, or more content after it."""
    after = os.pread(reader, _AFTER_BYTES, end)
    if len(after) < HEADER_BYTES:
        raise path_error(file, "is cut off: it has no mark of a tar's end", _WHOLE)
    if any(after[:HEADER_BYTES]):  # tarfile stops at a damaged header without an error
        raise path_error(file, f"is no whole tar (at byte {end:,} is no header)", _WHOLE)
    if any(after):
        rule = f"goes on behind its end (at byte {end:,}), as tars do that were joined by cat"
        raise path_error(file, rule, "keep them as shards of their own")
