"""Show the progress of tokenising a corpus."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from whale_train.data.tokens.make_store import Watch
from whale_train.quantities import in_bytes

_PATIENCE_S = 10.0  # between lines of progress, where the console is no terminal


@contextmanager
def tokenising_shown(console: Console) -> Iterator[Watch]:
    """Yield a function that shows the progress of tokenising a corpus.

    The function takes the number of bytes done and the number of all bytes. A terminal shows a bar,
    any other console a line every ten seconds. Nothing is shown before the first call.
    """
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (
        *(TextColumn("tokenising"), BarColumn(), DownloadColumn()),
        *(TransferSpeedColumn(), TimeRemainingColumn()),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = None

        def watch(done: int, total: int) -> None:
            nonlocal task
            if task is None:
                task = bar.add_task("", total=total)
            bar.update(task, completed=done, total=total)

        yield watch


def _lines(console: Console) -> Watch:
    said_s, said_bytes = -_PATIENCE_S, -1

    def watch(done: int, total: int) -> None:
        nonlocal said_s, said_bytes
        is_due = time.monotonic() - said_s >= _PATIENCE_S or done == total
        if is_due and done != said_bytes:
            said_s, said_bytes = time.monotonic(), done
            line = f"tokenising: {in_bytes(done)} of {in_bytes(total)}"
            console.print(line, soft_wrap=True, markup=False)

    return watch
