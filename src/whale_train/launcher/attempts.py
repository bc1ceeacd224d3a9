"""Describe the attempts of one job, and write their record.

A rank that dies ends an attempt. The next attempt continues from the newest checkpoint.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from whale_train.launcher.ranks.host_process import RunFailure
from whale_train.launcher.ranks.run_dir import METRICS, write_json
from whale_train.quantities import in_seconds

RECORD = "attempts.json"  # in the run directory


@dataclass(frozen=True)
class Attempt:
    """One attempt of a job.

    began: the optimizer step after which the attempt started.
    reached: the last optimizer step that the attempt finished.
    seconds: duration of the attempt, in seconds.
    ranks: number of ranks.
    status: the status of a job, `done`, `failed` or `interrupted`.
    failure: the reason of a `failed` attempt; None for every other status.
    """

    began: int
    reached: int
    seconds: float
    ranks: int
    status: str
    failure: RunFailure | None = None

    @property
    def why(self) -> str:
        """Return one line on the end of the attempt: the status, or the failure of a rank or
        host."""
        if self.failure is None:
            return self.status
        failure = self.failure
        who = "the host" if failure.rank is None else f"rank {failure.rank}"
        if failure.kind == "signal":
            return f"{who} was killed by {failure.signal}"
        if failure.kind == "exit":
            return f"{who} ended with exit status {failure.exit_status}"
        return f"{who}: {(failure.message or '').partition(chr(10))[0]}"


def steps_done(run_dir: Path, began: int) -> int:
    """Return the number of the last optimizer step in a run's metrics.

    A line cut off by the end of the attempt is skipped. Returns `began`, the last step before the
    attempt, where the metrics have no whole line.
    """
    path = run_dir / METRICS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError):  # a line cut off by the end of the attempt
            continue
    return began


def is_its_own(attempts: Sequence[Attempt]) -> bool:
    """Return whether the last two attempts failed in the same way at the same step.

    A third attempt would fail likewise. Two failures are the same if kind, exception type, message,
    signal, exit status and step are equal.
    """
    if len(attempts) < 2:
        return False
    first, second = (attempt.failure for attempt in attempts[-2:])
    if first is None or second is None:
        return False
    keys = ("kind", "type", "message", "signal", "exit_status", "step")
    return all(getattr(first, key) == getattr(second, key) for key in keys)


def write_attempts(run_dir: Path, attempts: Sequence[Attempt]) -> None:
    """Write a job's attempts so far to `attempts.json` in the run directory."""
    write_json(run_dir / RECORD, [asdict(attempt) for attempt in attempts])


def attempts_view(attempts: Sequence[Attempt]) -> Table:
    """Return a table with one row for each attempt."""
    table = Table("attempt", "steps", "ranks", "time", "ended by", box=None, pad_edge=False)
    for number, attempt in enumerate(attempts, start=1):
        steps = f"{attempt.began} to {attempt.reached}"
        spent = in_seconds(attempt.seconds)
        table.add_row(str(number), steps, str(attempt.ranks), spent, attempt.why)
    return table
