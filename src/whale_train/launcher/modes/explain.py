"""Run `mode=plan explain=STRATEGY`: say what would make a strategy run here, or the fastest."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from whale_train.config import Request
from whale_train.launcher.job_end import JobEnd
from whale_train.launcher.planning.plan_request import planning_base
from whale_train.launcher.ranks.run_dir import write_environment, write_json, write_text
from whale_train.launcher.ranks.run_files import STRATEGY, write_strategy
from whale_train.launcher.report.page_parts import Row, Section, Table
from whale_train.launcher.report.report_files import write_explanation
from whale_train.launcher.ui.show_explanation import (
    TRIAL_COLUMNS,
    condition_line,
    explaining_shown,
    explanation_view,
    nearest_command,
    trial_rows,
    verdict_lines,
)
from whale_train.launcher.ui.terminal import Portable
from whale_train.strategies.explain.explain_strategy import Explanation, explain_strategy
from whale_train.strategies.explain.reliefs import Setting
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.simulate.prediction import Simulated

EXPLANATION = "explanation.json"


def explain_job(
    request: Request,
    content: Mapping[str, Any],
    run_dir: Path,
    console: Console,
    arguments: Sequence[str],
) -> JobEnd:
    """Show what would have to be true for a strategy, and write it into `run_dir`.

    content: the content of the strategy's file.
    arguments: command-line arguments of the request.

    Raises ConfigError where the request is wrong whatever the strategy.
    """
    assert request.explain is not None
    base = planning_base(request)
    setting = Setting(content, base.cluster, base.training)
    with explaining_shown(console) as progress:
        explained = explain_strategy(
            *(setting, request.explain, base.profile),
            can_offload=base.can_offload,
            progress=progress,
        )
    write_environment(run_dir)
    write_json(run_dir / EXPLANATION, explained.to_plain())
    if explained.nearest is not None and explained.nearest.plan is not None:
        write_text(run_dir / "plan.json", explained.nearest.plan.to_json())
        write_strategy(run_dir, explained.nearest.written, request)
    command = nearest_command(explained, arguments)
    answer = _section(request, explained, command)
    page = write_explanation(run_dir, answer, _plans(request, explained))
    console.print(Portable(explanation_view(request, explained)))
    files: list[tuple[str, Path | str]] = [("the page", page), ("all of it", run_dir / EXPLANATION)]
    if explained.nearest is not None:
        files.append(("the nearest strategy, as a file", run_dir / STRATEGY))
    if command:
        files.append(("the nearest plan", command))
    for name, text in files:
        console.print(f"{name}: {text}", soft_wrap=True, markup=False, highlight=False)
    return JobEnd("done", run_dir)


def _section(request: Request, explained: Explanation, command: str) -> Section:
    """Return the section of the page that answers the question, with the nearest plan's command."""
    rows = [Row(row) for row in trial_rows(explained)]
    refused = [
        Row((trial.change, fault))
        for trial in explained.trials
        for fault in trial.faults
        if not trial.is_legal
    ]
    tables = [Table("What each change would give", TRIAL_COLUMNS, rows, TRIAL_COLUMNS[1:])]
    if refused:
        tables.append(Table("Changes that make no plan", ("change", "because"), refused))
    lines = [*verdict_lines(explained), *map(condition_line, explained.conditions)]
    lines = [line[:1].upper() + line[1:] for line in lines]
    lines += [command] if command else []
    return Section("why-not", f"Why not strategy={request.explain}?", lines, tables=tables)


def _plans(request: Request, explained: Explanation) -> dict[str, tuple[Plan, Simulated]]:
    """Return the plans that the page shows, by their titles: what was asked or is nearest to it,
    and the fastest."""
    plans = {}
    for trial, title in ((explained.nearest, request.explain), (explained.fastest, "auto")):
        if trial is not None and trial.plan is not None and trial.step is not None:
            changed = f" ({trial.change})" if trial.change and trial.kind else ""
            is_auto = title == "auto"
            plans[f"strategy={title}{'' if is_auto else changed}"] = (trial.plan, trial.step)
    return plans
