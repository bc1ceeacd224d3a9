"""Show why a strategy is not used: its plan, the plans of changes, what makes it the fastest."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from whale_train.config import Request
from whale_train.launcher.ranks.run_files import in_flow
from whale_train.quantities import in_bytes, in_rate, in_seconds
from whale_train.strategies.explain.explain_strategy import Condition, Explanation, TriedPlan

_MOST_ROWS = 16  # changes that are shown; explanation.json has all
_LONGEST_COMMAND = 400  # characters; of a longer one there is the strategy's file
TRIAL_COLUMNS = ("change", "step", "samples/s", "x fastest", "memory", "of its device")


@contextmanager
def explaining_shown(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that is told what is tried next, which a terminal shows."""
    if not console.is_terminal:
        yield lambda said: None
        return
    with console.status("explaining") as status:
        yield lambda said: status.update(f"trying: {said}")


def explanation_view(request: Request, explained: Explanation) -> RenderableType:
    """Return the view of an explanation, which fits 60 columns and more."""
    names = request.names
    title = f"why not strategy={request.explain}?  " + " ".join(
        f"{group}={names[group]}" for group in ("model", "hardware") if group in names
    )
    parts: list[RenderableType] = [Text(title, style="bold")]
    parts += [Padding(Text(line), (0, 0, 0, 2)) for line in verdict_lines(explained)]
    if trial_rows(explained):
        parts += [Text(""), Text("what each change would give", style="bold"), _trials(explained)]
    refused = sum(not trial.is_legal for trial in explained.trials)
    if refused:
        said = f"no plan comes of {refused} changes: explanation.json says why"
        if refused == 1:
            said = "no plan comes of 1 change: explanation.json says why"
        parts.append(Padding(Text(said, style="dim"), (0, 0, 0, 2)))
    if explained.conditions:
        parts += [Text(""), Text("what would make it the fastest", style="bold")]
        parts += [Padding(Text(condition_line(x)), (0, 0, 0, 2)) for x in explained.conditions]
    return Group(*parts)


def verdict_lines(explained: Explanation) -> list[str]:
    """Return the lines that answer the question: the plan or why there is none, the fastest
    strategy, and the nearest plan."""
    asked, fastest, nearest = explained.asked, explained.fastest, explained.nearest
    lines = []
    if asked.is_legal:
        lines.append(f"it has a plan: {_figures(asked)}")
    else:
        lines += [f"it has no plan: {fault}" for fault in asked.faults]
    if explained.least_memory is not None:
        times = f"{explained.least_memory:.2f} times"
        lines.append(f"it has one with {times} the memory of each device")
    if fastest is None:
        lines.append("no strategy fits")
    elif explained.is_fastest:
        lines.append("no strategy simulated is faster")
    else:
        lines.append(f"the fastest is strategy=auto's: {_figures(fastest)}")
    if not asked.is_legal and nearest is None:
        lines.append("no change that was tried makes a plan of it")
    elif not asked.is_legal and nearest is not None:
        lines.append(f"the nearest plan: {nearest.change}: {_figures(nearest)}")
    return lines


def trial_rows(explained: Explanation) -> list[tuple[str, ...]]:
    """Return the rows of the table of changes, under `TRIAL_COLUMNS`: of those that make a plan."""
    fastest_s = None if explained.fastest is None else explained.fastest.step_s
    rows: list[tuple[str, ...]] = []
    for trial in explained.trials:
        if trial.step_s is None or trial.needed_bytes is None or trial.room_bytes is None:
            continue
        is_comparable = fastest_s is not None and trial.samples == explained.asked.samples
        times = f"{trial.step_s / fastest_s:.2f}" if is_comparable and fastest_s else ""
        rows.append(
            (
                trial.change,
                in_seconds(trial.step_s),
                in_rate(trial.samples / trial.step_s),
                times,
                in_bytes(trial.needed_bytes),
                f"{trial.needed_bytes / trial.room_bytes:.0%}",
            )
        )
    return rows


def condition_line(condition: Condition) -> str:
    """Return the line about what would make a strategy the fastest, or would not."""
    amounts = {
        "samples": f"{condition.amount:,.0f} samples a step",
        "memory": f"{in_bytes(condition.amount)} of memory on the smallest device",
        "network": f"{in_bytes(condition.amount)}/s between nodes",
    }
    amount = amounts[condition.quantity]
    if condition.times is None:
        return f"not even {amount} would make it the fastest"
    return f"it would be the fastest with {amount}, {condition.times:g} times as here"


def nearest_command(explained: Explanation, arguments: Sequence[str]) -> str:
    """Return the command of the nearest plan of a strategy without one; '' where there is none, or
    the command is longer than anybody reads."""
    if explained.asked.is_legal or explained.nearest is None:
        return ""
    command = command_of(explained.nearest, arguments)
    return command if len(command) <= _LONGEST_COMMAND else ""


def command_of(trial: TriedPlan, arguments: Sequence[str]) -> str:
    """Return the command that plans a trial, to be pasted into a shell.

    arguments: command-line arguments of the request.
    """
    strategy = [
        f"strategy.{key}={in_flow(value)}"
        for key, value in trial.written.items()
        if (key, value) != ("balance", "hardware")
    ]
    changes = [*strategy, *trial.overrides]
    replaced = {"mode", "explain", "strategy", "hydra.run.dir"}
    replaced |= {change.partition("=")[0] for change in changes}
    stays = [x for x in arguments if x.partition("=")[0].lstrip("+") not in replaced]
    return shlex.join(["whale-train", "mode=plan", *stays, *changes])


def _figures(trial: TriedPlan) -> str:
    assert trial.step_s is not None
    assert trial.needed_bytes is not None
    assert trial.room_bytes is not None
    rate = f"{in_rate(trial.samples / trial.step_s)} samples/s"
    memory = f"{in_bytes(trial.needed_bytes)} of {in_bytes(trial.room_bytes)}"
    return f"{in_seconds(trial.step_s)} a step, {rate}, {memory}"


def _trials(explained: Explanation) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in TRIAL_COLUMNS:
        is_text = name == "change"
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    rows = trial_rows(explained)
    for row in rows[:_MOST_ROWS]:
        table.add_row(*(Text(cell) for cell in row))
    return table
