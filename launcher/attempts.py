"""The attempts of one job: a rank that dies ends one, and the next goes on from the newest
checkpoint."""

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
    """One attempt: it went on after step `began`, and had done step `reached` when it ended after
    `seconds`. `status` is a job's; `failure` is given where that is `failed`."""

    began: int
    reached: int
    seconds: float
    ranks: int
    status: str
    failure: RunFailure | None = None

    @property
    def why(self) -> str:
        """What ended it, in a line."""
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
    """Return how many steps the metrics of a run have, of which `began` were done before."""
    path = run_dir / METRICS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError):  # cut off by the end of the attempt
            continue
    return began


def is_its_own(attempts: Sequence[Attempt]) -> bool:
    """Return whether the last two attempts failed of the same at the same step: a third would."""
    if len(attempts) < 2:
        return False
    first, second = (attempt.failure for attempt in attempts[-2:])
    if first is None or second is None:
        return False
    keys = ("kind", "type", "message", "signal", "exit_status", "step")
    return all(getattr(first, key) == getattr(second, key) for key in keys)


def write_attempts(run_dir: Path, attempts: Sequence[Attempt]) -> None:
    """Write what became of a job's attempts so far."""
    write_json(run_dir / RECORD, [asdict(attempt) for attempt in attempts])


def attempts_view(attempts: Sequence[Attempt]) -> Table:
    """Return the attempts, a row each."""
    table = Table("attempt", "steps", "ranks", "time", "ended by", box=None, pad_edge=False)
    for number, attempt in enumerate(attempts, start=1):
        steps = f"{attempt.began} to {attempt.reached}"
        spent = in_seconds(attempt.seconds)
        table.add_row(str(number), steps, str(attempt.ranks), spent, attempt.why)
    return table
