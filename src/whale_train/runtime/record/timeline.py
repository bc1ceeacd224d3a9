"""Write a timeline of the ranks' work, as a file for chrome://tracing and ui.perfetto.dev."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from whale_train.checkpoints.checkpoint_files import FileRecord
from whale_train.runtime.base.trace import Trace
from whale_train.runtime.state.tensor_files import record_text


def write_events(trace: Trace, run_dir: Path) -> FileRecord:
    """Write the events of a rank to `run_dir/trace/rank_N.json`; return the file's record."""
    text = json.dumps({"traceEvents": trace.events})
    return record_text(run_dir, f"trace/rank_{trace.rank}.json", text)


def is_timeline(file: FileRecord) -> bool:
    """Return whether a file of a run directory is the events of a rank, by `write_events`."""
    return file.path.startswith("trace/")


def merge(run_dir: Path, files: Iterable[FileRecord]) -> None:
    """Merge the ranks' event files `files`, one of each rank, into one timeline,
    `run_dir/trace.json`."""
    events: list[dict[str, Any]] = []
    for file in files:
        events += json.loads((run_dir / file.path).read_text(encoding="utf-8"))["traceEvents"]
    (run_dir / "trace.json").write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
