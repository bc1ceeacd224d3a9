"""Read what a page shows: a plan, and what a run has measured beside it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whale_train.errors import ConfigError, Fault
from whale_train.launcher.attempts import RECORD
from whale_train.launcher.ranks.run_dir import ATTEMPTS, METRICS
from whale_train.strategies.plan.plan import Plan

PLAN = "plan.json"
Events = Sequence[Mapping[str, Any]]
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ShownRun:
    """A plan, and the run of it where there is one.

    path: the path that the user named.
    title: the names of model, strategy and hardware, or the name of the plan's file.
    plan: the plan.
    predicted_events: the timeline of a predicted step, as the Trace Event Format has it; empty
        where nothing was simulated.
    measured_events: the timeline of a run with `train.trace`; empty without.
    steps: the lines of `metrics.jsonl`, in order.
    earlier_steps: the lines of each earlier attempt, which later attempts may have replaced.
    attempts: the content of `attempts.json`.
    summary: the content of `summary.json`; empty for a plan alone, and for a run that is not done.
    failure: the content of `failure.json`; None for a run that has not failed.
    """

    path: Path
    title: str
    plan: Plan
    predicted_events: Events = ()
    measured_events: Events = ()
    steps: Rows = ()
    earlier_steps: tuple[Rows, ...] = ()
    attempts: Rows = ()
    summary: Mapping[str, Any] | None = None
    failure: Mapping[str, Any] | None = None

    @property
    def is_run(self) -> bool:
        """Return whether steps were taken under the plan."""
        return bool(self.steps)


def read_run(path: Path, key: str) -> ShownRun:
    """Return the plan of a file, or the plan and the run of a run directory.

    key: the key of the config that names the path, for messages.

    Raises ConfigError where there is no plan, or a file of it cannot be read.
    """
    plan_path = path / PLAN if path.is_dir() else path
    if not plan_path.is_file():
        rule = f"has no {PLAN}" if path.is_dir() else "is not there"
        remedy = f"name a run directory, or the {PLAN} that mode=plan wrote"
        raise ConfigError([Fault(key, str(path), rule, remedy)])
    try:
        plan = Plan.from_json(plan_path.read_text(encoding="utf-8"))
        run_dir = plan_path.parent
        if plan_path.name != PLAN:  # as one of several strategies of a comparison
            return ShownRun(path, plan_path.stem, plan)
        return _with_run(path, run_dir, plan)
    except (OSError, ValueError) as error:
        said = str(error).splitlines()[0]
        rule, remedy = f"cannot be read ({said})", "name another, or make the plan anew"
        raise ConfigError([Fault(key, str(path), rule, remedy)]) from error


def _with_run(path: Path, run_dir: Path, plan: Plan) -> ShownRun:
    """Return a plan with what else its directory has. Raises OSError and ValueError."""
    request = _json(run_dir / "request.json") or {}
    names = request.get("names", {})
    chosen = (f"{x}={names[x]}" for x in ("model", "strategy", "hardware") if x in names)
    earlier = sorted((run_dir / ATTEMPTS).glob("*"), key=lambda x: (len(x.name), x.name))
    return ShownRun(
        path=path,
        title=" ".join(chosen) or run_dir.absolute().name,
        plan=plan,
        predicted_events=_events(run_dir / "predicted_trace.json"),
        measured_events=_events(run_dir / "trace.json"),
        steps=_rows(run_dir / METRICS),
        earlier_steps=tuple(rows for x in earlier if (rows := _rows(x / METRICS))),
        attempts=_json(run_dir / RECORD) or (),
        summary=_json(run_dir / "summary.json"),
        failure=_json(run_dir / "failure.json"),
    )


def _json(path: Path) -> Any:
    """Return the content of a file, or None where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _events(path: Path) -> Events:
    content = _json(path)
    return () if content is None else tuple(content["traceEvents"])


def _rows(path: Path) -> Rows:
    """Return the lines of a file of metrics. A last line that is cut off is left out."""
    if not path.is_file():
        return ()
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines) - 1:
                raise
    return tuple(rows)
