"""A timeline of what one rank does, for chrome://tracing and ui.perfetto.dev.

Its form is `strategies/simulate/chrome_trace.py`'s. On a GPU a span is the time its work took to be
asked for, unless what is asked for waits.
"""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from whale_train.checkpoint_files import FileRecord
from whale_train.runtime.state.tensor_files import write_text
from whale_train.strategies.schedule.instructions import Instruction
from whale_train.strategies.simulate.chrome_trace import event, named


class Trace:
    """Events of one rank, kept until `write`. `device` names it in the timeline."""

    def __init__(self, rank: int, device: str) -> None:
        self._rank = rank
        self._events = [named(rank, device)]

    @contextmanager
    def span(self, what: Instruction | str) -> Iterator[None]:
        """Note how long the body takes."""
        started = time.time_ns()
        try:
            yield
        finally:
            took = time.time_ns() - started
            self._events.append(event(self._rank, what, started / 1e3, took / 1e3))

    def write(self, run_dir: Path) -> FileRecord:
        """`run_dir/trace/rank_N.json`."""
        text = json.dumps({"traceEvents": self._events})
        return write_text(run_dir, f"trace/rank_{self._rank}.json", text)


def span(trace: Trace | None, what: Instruction | str) -> AbstractContextManager[None]:
    """Begin a span of `trace`, if there is one."""
    return nullcontext() if trace is None else trace.span(what)


def merge(run_dir: Path, files: Iterable[FileRecord]) -> None:
    """Write one timeline of all ranks, `run_dir/trace.json`, out of the `files` of each."""
    events: list[dict[str, Any]] = []
    for file in files:
        events += json.loads((run_dir / file.path).read_text(encoding="utf-8"))["traceEvents"]
    (run_dir / "trace.json").write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
