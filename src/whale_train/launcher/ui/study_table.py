"""Show the trials of a study: parameters, outcomes, and the reasons of trials without a result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whale_train.errors import shortened
from whale_train.launcher.ui.terminal import Portable


@dataclass(frozen=True)
class TrialRow:
    """One trial of a study.

    number: the number of the trial in the study.
    values: the value of every parameter, by key.
    status: the end of the trial's job, such as `done`, `pruned at step 20` or `refused`.
    results: the value of each objective; empty for a trial without a result.
    reason: why the trial has no result; '' for a trial with one.
    run_dir: the run directory; None for a trial without one.
    is_best: whether no other trial is better.
    """

    number: int
    values: Mapping[str, Any]
    status: str
    results: tuple[float, ...]
    reason: str
    run_dir: Path | None
    is_best: bool


def study_table(
    rows: Sequence[TrialRow], keys: Sequence[str], names: Sequence[str], width: int = 120
) -> RenderableType:
    """Return the table at the end of a study, with the best trial marked, or all trials of the
    Pareto front.

    keys: the config keys of the parameters.
    names: the names of the objectives.
    width: columns of the console. If the keys do not fit, each is shortened to the part after the
        last dot.
    """
    short = [key.rpartition(".")[2] for key in keys]
    wide = sum(map(len, keys)) + sum(map(len, names)) + 14 * (len(names) + 1) > width
    heads = short if wide and len(set(short)) == len(short) else keys
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for head in ("trial", *heads, "status"):
        table.add_column(head, overflow="fold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    best = "best" if len(names) == 1 else "on the Pareto front"
    for row in rows:
        style = "bold green" if row.is_best else "red" if row.reason else ""
        cells = [Text(_text(row.values[key]) if key in row.values else "") for key in keys]
        status = Text(f"{row.status}, {best}" if row.is_best else row.status, style=style)
        results = [f"{result:.6g}" for result in row.results] or [""] * len(names)
        table.add_row(str(row.number), *cells, status, *map(Text, results))
    notes = [
        Text(f"trial {row.number} {row.status}: {shortened(' '.join(row.reason.split()))}")
        for row in rows
        if row.reason
    ]
    parents = {str(row.run_dir.parent) for row in rows if row.run_dir is not None}
    where = [Text(f"runs are in {parent}", style="dim") for parent in sorted(parents)]
    return Portable(Group(table, *notes, *where))


def _text(value: Any) -> str:
    """Return a parameter's value as text for the table, a float with five digits."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)
