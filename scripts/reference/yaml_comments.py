"""Read the keys of a config file with their values and the comments beside them, as written."""

import re
from dataclasses import dataclass

_KEY = re.compile(r"^( *)([\w./]+):(?: +(.*))?$")
_COMMENT = re.compile(r"(?:^|\s+)# ?(.*)$")


@dataclass(frozen=True)
class WrittenKey:
    """A key of a config file.

    path: path of the key in the file, with dots.
    value: the value as written; '' of a mapping that goes on in the lines below.
    comment: the comment beside it or in the lines above it; '' where there is none.
    """

    path: str
    value: str
    comment: str


def written_keys(text: str) -> tuple[str, list[WrittenKey]]:
    """Return the comment at the head of a config file, and the file's keys in order.

    A comment goes on in the next lines that have nothing else and are indented further than the
    key. One that fills lines of its own, below the first key, is about the key that follows.
    """
    head: list[str] = []
    above: list[str] = []
    keys: list[WrittenKey] = []
    parents: list[tuple[int, str]] = []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith("#"):
            words = line.strip().removeprefix("#").strip()
            if not keys:
                head.append(words)
            elif keys[-1].comment and parents and indent > parents[-1][0]:
                last = keys.pop()
                keys.append(WrittenKey(last.path, last.value, f"{last.comment} {words}"))
            else:
                above.append(words)
            continue
        match = _KEY.match(line)
        if match is None:
            continue
        while parents and parents[-1][0] >= len(match[1]):
            parents.pop()
        parents.append((len(match[1]), match[2]))
        rest = match[3] or ""
        beside = _COMMENT.search(rest)
        comment = beside[1] if beside else " ".join(above)
        value = rest[: beside.start()].strip() if beside else rest.strip()
        keys.append(WrittenKey(".".join(name for _, name in parents), value, comment))
        above = []
    return " ".join(x for x in head if not x.startswith("@package")), keys
