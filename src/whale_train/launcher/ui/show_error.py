"""Write a refused request as text for standard error.

This file owns the wording around the faults and where lines break. The faults themselves say what
is wrong, and what would be right. There is no colour and no markup: the text is the same on a
terminal, in a log and in a test.
"""

import os
import textwrap
from typing import TextIO

from whale_train.errors import RequestError


def error_text(error: RequestError, width: int | None = None) -> str:
    """Return the text of every fault of `error`, without a trailing newline.

    One fault reads `error: KEY=VALUE RULE; REMEDY`. Several are counted, then listed in the order
    in which they were found. Lines are broken between words at `width` columns, with a hanging
    indent. None (a pipe, a file) keeps each fault on one line, so that it can be searched for.
    """
    faults = [" ".join(str(fault).splitlines()) for fault in error.faults]
    if len(faults) == 1:
        return _broken("error: " + faults[0], width, indent="       ")
    lines = [f"{len(faults)} things are wrong with this request:"]
    lines += [_broken("  " + fault, width, indent="    ") for fault in faults]
    return "\n".join(lines)


def terminal_width(stream: TextIO) -> int | None:
    """Return the number of columns of the terminal that `stream` writes to, or None where it is no
    terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):  # not a terminal, no file descriptor, or a closed one
        return None


def _broken(line: str, width: int | None, indent: str) -> str:
    """Return `line` broken between words only. A key or a path stays whole, so that it can be
    copied."""
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
