"""Find the shards that patterns name: paths with `*`, and with braces as in a shell."""

import os
import re
from glob import glob, has_magic
from itertools import product

from whale_train.data.paths import missing_path, path_error, refuse_special, unreadable

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"^(\d+)\.\.(\d+)$")
_COMPRESSIONS = {  # magic bytes of files, and the program that unpacks them
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
}


def shard_files(pattern: str) -> list[str]:
    """Return the shards that a pattern names, those of each `*` sorted.

    `{000..009}` stands for ten numbers of three digits, `{a,b}` for a and b. Raises ConfigError
    where no shard matches, where one is missing or cannot be read, and where one is compressed.
    """
    files: list[str] = []
    for path in _expanded(pattern):
        if has_magic(path) and not os.path.exists(path):
            files += sorted(x for x in glob(path, recursive=True) if os.path.isfile(x))
        elif os.path.isdir(path):
            inside = f"use 'data.path={os.path.join(path, '*.tar')}'"
            raise path_error(path, "is a folder, not a shard", inside)
        elif not os.path.exists(path):
            raise missing_path(path)
        else:
            files.append(path)
    if not files:
        raise path_error(pattern, "names no file", "name tar files, as shards/train-*.tar")
    for file in files:
        _refuse_compressed(file)
    return files


def _expanded(pattern: str) -> list[str]:
    """Return the paths that a pattern with braces expands to, in order."""
    parts = _BRACES.split(pattern)  # every second one was inside of braces
    choices = [[x] if number % 2 == 0 else _choices(x) for number, x in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def _choices(inside: str) -> list[str]:
    span = _RANGE.match(inside)
    if span is None:
        return inside.split(",") if "," in inside else [f"{{{inside}}}"]
    first, last = span.groups()
    return [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]


def _refuse_compressed(file: str) -> None:
    try:
        refuse_special(file)
        with open(file, "rb") as opened:
            begins = opened.read(6)
    except OSError as error:
        raise unreadable(error, file) from error
    program = next((x for mark, x in _COMPRESSIONS.items() if begins.startswith(mark)), None)
    if program is not None:
        rule = "is compressed, and samples are read at their places in a tar"
        remedy = f"unpack it with {program} (images are compressed already)"
        raise path_error(file, rule, remedy)
