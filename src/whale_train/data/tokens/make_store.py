"""Tokenise a corpus, once on each machine, and open its store of tokens.

Stores are kept in a cache, under a key of all that the tokens depend on: the content of the files,
the tokenizer and the fields. A process of its own tokenises (`tokenising/main.py`), so that no
library of tokenizers is loaded into a process that forks ranks. Other processes wait while one
process makes the store.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from whale_train.data.tokens.token_store import TokenStore
from whale_train.data.tokens.tokenizer_files import tokenizer_files
from whale_train.errors import ConfigError, Fault
from whale_train.user_cache import user_cache

Watch = Callable[[int, int], None]  # called with the bytes that are tokenised and the bytes in all
FORMAT = 2  # the format of stores, which is a part of their key
PROGRAM = (sys.executable, "-P", "-m", "whale_train.tokenising.main")
_LOOK_S = 0.1
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class StoreRequest:
    """The inputs of a store.

    files: files of the corpus, in order.
    fields: fields of a row whose texts follow each other as documents.
    tokenizer: folder of the tokenizer.
    key: key of the config that names the files, for messages.
    """

    files: tuple[str, ...]
    fields: tuple[str, ...]
    tokenizer: str
    key: str = "data.path"

    @property
    def size_bytes(self) -> int:
        """Return the size of all files together, in bytes."""
        return sum(os.path.getsize(file) for file in self.files)


def cache_folder(given: str | None, kind: str = "tokens") -> Path:
    """Return the folder of stores: `given`, or the folder of a `kind` in the user's cache."""
    if given is not None:
        return Path(given)
    return user_cache(kind)


def open_store(request: StoreRequest, cache: Path, watch: Watch | None = None) -> TokenStore:
    """Return the store of `request` in the folder `cache`, after making it where it does not exist.

    Raises ConfigError where a file cannot be read, a row cannot be used, the tokenizer cannot be
    loaded, or the store cannot be written.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder = cache / _key(request, cache)
        lock = os.open(cache / f"{folder.name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _unwritable(cache, error) from error
    try:
        while (store := _opened(folder)) is None:
            if _locked(lock):
                store = _opened(folder)  # another process may have made it meanwhile
                if store is None:
                    _make(request, folder, watch)
            else:
                _tell(folder, request, watch)
                time.sleep(_LOOK_S)
        return store
    finally:
        os.close(lock)  # releases the lock


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _opened(folder: Path) -> TokenStore | None:
    try:
        return TokenStore(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _make(request: StoreRequest, folder: Path, watch: Watch | None) -> None:
    """Make the store in `folder` by a process of its own. The caller holds the store's lock."""
    unfinished = folder.with_name(folder.name + ".partial")
    progress = _progress(folder)
    process = None
    try:
        for left in (unfinished, folder):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        order = {**asdict(request), "store": str(unfinished), "progress": str(progress)}
        # Files are used, since a pipe without a reader is full after 64 kB.
        with TemporaryFile() as orders, TemporaryFile() as said, TemporaryFile() as complained:
            orders.write(json.dumps(order).encode())
            orders.seek(0)
            process = subprocess.Popen(
                [*PROGRAM, "--parent", str(os.getpid())],
                stdin=orders,
                stdout=said,
                stderr=complained,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "true"},
            )
            while process.poll() is None:
                _tell(folder, request, watch)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
            if process.returncode:
                raise _failure(_text(said), _text(complained), request)
        unfinished.rename(folder)
        if watch is not None:
            watch(request.size_bytes, request.size_bytes)
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    finally:
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        shutil.rmtree(unfinished, ignore_errors=True)
        progress.unlink(missing_ok=True)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def _progress(folder: Path) -> Path:
    return folder.with_name(folder.name + ".progress")


def _tell(folder: Path, request: StoreRequest, watch: Watch | None) -> None:
    """Report the progress of the process that makes the store to `watch`."""
    if watch is None:
        return
    with suppress(OSError, ValueError):  # the file may be missing or half written
        watch(int(_progress(folder).read_text(encoding="ascii")), request.size_bytes)


def _failure(said: str, complained: str, request: StoreRequest) -> ConfigError:
    """Return the error that the process reported, or one with the last line of its standard
    error."""
    with suppress(ValueError, KeyError, TypeError):
        return ConfigError([Fault(**json.loads(said))])
    last = complained.strip().splitlines()[-1:] or ["no message"]
    rule = f"could not be tokenised ({last[0][:500]})"
    return ConfigError([Fault(request.key, request.files[0], rule, "see the message")])


def _unwritable(cache: Path, error: OSError) -> ConfigError:
    said = error.strerror or str(error)
    rule = f"cannot keep the tokens ({said})"
    remedy = "name another folder with data.cache, or make room"
    return ConfigError([Fault("data.cache", str(error.filename or cache), rule, remedy)])


def _key(request: StoreRequest, cache: Path) -> str:
    """Return the name of the request's store: a digest of all that the tokens depend on."""
    digests = _Digests(cache)
    names = [*tokenizer_files(Path(request.tokenizer)), Path(request.tokenizer, "config.json")]
    parts = [str(FORMAT), *request.fields, *_versions()]
    parts += [f"{x.name} {digests.of(str(x))}" for x in names if x.is_file()]
    parts += [f"{_form(file)} {digests.of(file)}" for file in request.files]
    digests.keep()
    return blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def _versions() -> list[str]:
    """Return the versions of the packages that determine the tokens of a text."""
    from importlib.metadata import PackageNotFoundError, version

    texts = []
    for package in ("tokenizers", "transformers"):
        with suppress(PackageNotFoundError):
            texts.append(f"{package} {version(package)}")
    return texts


def _form(file: str) -> str:
    return "".join(Path(file).suffixes[-2:])


class _Digests:
    """Digests of files' contents, cached by path, size, time of the last change and inode."""

    def __init__(self, cache: Path) -> None:
        self._path = cache / "digests.json"
        self._known: dict[str, list[object]] = {}
        with suppress(OSError, ValueError):
            content = json.loads(self._path.read_text(encoding="utf-8"))
            self._known = content if isinstance(content, Mapping) else {}  # type: ignore[assignment]
        self._changed = False

    def of(self, file: str) -> str:
        """Return the digest of a file. Raises OSError."""
        stat = os.stat(file)
        stamp: list[object] = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        known = self._known.get(file)
        if known is not None and known[:-1] == stamp:
            return str(known[-1])
        digest = blake2b(digest_size=16)
        with open(file, "rb") as content:
            while chunk := content.read(_CHUNK_BYTES):
                digest.update(chunk)
        self._known[file] = [*stamp, digest.hexdigest()]
        self._changed = True
        return digest.hexdigest()

    def keep(self) -> None:
        """Write the digests to the cache."""
        if not self._changed:
            return
        with suppress(OSError):  # the cache only saves time
            made = self._path.with_name(f"digests.{os.getpid()}")
            made.write_text(json.dumps(self._known), encoding="utf-8")
            made.replace(self._path)
