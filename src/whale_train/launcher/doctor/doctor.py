"""Run `whale-train doctor`: report the state of this installation and machine, and the missing
packages and programs of each feature."""

import sys
from collections.abc import Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whale_train.launcher.doctor.checks import Check, all_checks
from whale_train.launcher.ranks.early_host import DOCTOR
from whale_train.launcher.ui.terminal import Portable, open_console


def asks_doctor(arguments: Sequence[str]) -> bool:
    """Return whether the command line is `whale-train doctor`."""
    return list(arguments) == [DOCTOR]


def run_doctor() -> int:
    """Print the report. Return the exit status: 1 where runs would fail, else 0."""
    checks = all_checks()
    open_console(sys.stdout).print(Portable(report(checks)))
    return int(any(check.is_broken for check in checks))


def report(checks: Sequence[Check]) -> RenderableType:
    """Return the report: a table of checks for each section, and the verdict as the last line."""
    parts: list[RenderableType] = []
    for part, of_part in groupby(checks, lambda check: check.part):
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for check in of_part:
            table.add_row(_mark(check), Text(check.name), _said(check))
        parts += [Text(part, style="bold"), table, Text()]
    return Group(*parts, _verdict(checks))


def _mark(check: Check) -> Text:
    if check.is_broken:
        return Text("  broken", style="bold red")
    return Text("  missing", style="yellow") if check.remedy else Text("  ok", style="green")


def _said(check: Check) -> Text:
    text = Text(check.found)
    if check.remedy:
        text.append("; " if check.found else "").append(check.remedy, style="yellow")
    return text


def _verdict(checks: Sequence[Check]) -> Text:
    broken = [check.name for check in checks if check.is_broken]
    missing = sum(bool(check.remedy) for check in checks) - len(broken)
    if broken:
        return Text(f"runs will fail: {', '.join(broken)}", style="bold red")
    if missing:
        return Text(f"runs work; {missing} of {len(checks)} things are missing for some features")
    return Text("all is here")
