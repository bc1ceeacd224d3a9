"""Open the console that views are printed to, and adapt views to the console's encoding."""

from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

# Every replacement has one cell, so that columns stay aligned.
_ASCII = str.maketrans("█░━╌…", "#.=.~")


def open_console(stream: TextIO) -> Console:
    """Return a console on `stream`, as wide as the terminal, or 120 columns where `stream` is no
    terminal."""
    if stream.isatty():
        return Console(file=stream, highlight=False)
    # The environment may force colours on a log, but must not force lines rewritten in place.
    return Console(file=stream, width=120, force_interactive=False, highlight=False)


@dataclass(frozen=True)
class Portable:
    """A view without trailing blanks, for a console of any encoding.

    Characters that an ASCII console cannot print are replaced by characters of the same width.
    """

    body: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in Segment.split_lines(console.render(self.body, options)):
            while line and not line[-1].text.rstrip():
                line.pop()
            if line:
                line[-1] = Segment(line[-1].text.rstrip(), *line[-1][1:])
            for text, style, control in line:
                if options.ascii_only:
                    text = text.translate(_ASCII).encode("ascii", "replace").decode()
                yield Segment(text, style, control)
            yield Segment.line()
