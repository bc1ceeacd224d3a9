"""Format the faults of a refused request as text for standard error.

This file owns the wording around the faults, and the line breaks. A fault gives the rule and the
remedy. The text has no colour and no markup, so it is the same on a terminal, in a log and in a
test.
"""

import os
import textwrap
from typing import TextIO

from whale_train.errors import RequestError


def error_text(error: RequestError, width: int | None = None) -> str:
    """Return the text of every fault of `error`, without a trailing newline.

    One fault reads `error: KEY=VALUE RULE; REMEDY`. Several faults are counted, then listed in the
    order of `error`. Lines are broken between words at `width` columns, with a hanging indent. With
    `width=None` (a pipe, a file) each fault stays on one line, where a search can find it.
    """
    faults = [" ".join(str(fault).splitlines()) for fault in error.faults]
    if len(faults) == 1:
        return _broken("error: " + faults[0], width, indent="       ")
    lines = [f"{len(faults)} things are wrong with this request:"]
    lines += [_broken("  " + fault, width, indent="    ") for fault in faults]
    return "\n".join(lines)


def terminal_width(stream: TextIO) -> int | None:
    """Return the number of columns of the terminal that `stream` writes to, or None where `stream`
    is no terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):  # not a terminal, no file descriptor, or a closed one
        return None


def _broken(line: str, width: int | None, indent: str) -> str:
    """Return `line` broken between words alone, so that a key or a path can be copied whole."""
    if width is None:
        return line
    wrapped = textwrap.wrap(
        line,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(wrapped)
