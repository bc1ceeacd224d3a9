"""Show a verification: the largest differences, and the verdict.

This file owns wording and layout. launcher/modes/verification.py owns every figure.
"""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whale_train.launcher.modes.verification import MARGIN, ROUNDED_RUNS, Difference, Verification
from whale_train.launcher.ui.terminal import Portable

_ROWS = 8  # for parameters; verify.json has all of them


def verification_view(verified: Verification) -> RenderableType:
    """Return the table of the largest differences, notes, and the verdict `equal`.

    The verdict `different` is left out, since the job reports it as its error (`verdict_line`).
    """
    shown = [_largest(verified, "loss"), _largest(verified, "gradient norm")]
    of_parameters = [x for x in verified.differences if x.path]
    # An allowed difference of initial values is not worth a row.
    shown += [x for x in of_parameters if x.what != "initial value" or not x.within][:_ROWS]
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("compared", overflow="fold")
    table.add_column("step", justify="right")
    for name in ("difference", "of the largest", "of what is allowed"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in shown:
        style = "" if row.within else "red"
        table.add_row(*(Text(cell, style=style) for cell in _cells(row)))
    notes = [Text(note, style="dim") for note in _notes(verified)]
    if verified.equal:
        notes.append(Text(verdict_line(verified), style="bold green"))
    return Portable(Group(table, *notes))


def rounded_line(verified: Verification) -> str:
    """Return the line that announces the runs which measure rounding."""
    return (
        f"not within {verified.tolerance:g} of one process; running that {ROUNDED_RUNS} times more "
        "with weights rounded otherwise, to see what rounding does"
    )


def verdict_line(verified: Verification) -> str:
    """Return the verdict in one line: `equal: ...`, or `different: ...` with the reasons, such as
    the worst parameter and the first step with different losses."""
    run = f"{_counted(verified.steps, 'step')} on {_counted(verified.ranks, 'rank')}"
    if verified.equal and not verified.tolerance:
        return f"equal: {run} computed the bits that one process does ({verified.precision})"
    if verified.equal:
        said = f"equal: {run} computed what one process does, within {verified.tolerance:g} "
        if verified.stretched <= 1:
            return f"{said}({verified.precision})"
        return (
            f"{said}({verified.precision}) or {MARGIN:g} times what rounding does to this model, "
            f"{verified.tolerance * verified.stretched:.1e} at most"
        )
    return (
        f"different: {run} did not compute what one process does: {'; '.join(_reasons(verified))}"
    )


def _reasons(verified: Verification) -> Iterator[str]:
    """Yield the reasons for the verdict `different`, starting with the one nearest to the cause."""
    if verified.skipped[0] != verified.skipped[1]:
        plan, alone = (", ".join(map(str, steps)) or "none" for steps in verified.skipped)
        yield f"fp16 overflowed in other steps ({plan}; on one process {alone})"
    if verified.not_finite is not None:
        yield (
            f"the loss or gradient norm of step {verified.not_finite} is no number on either "
            "side, which compares with nothing"
        )
    elif verified.no_gradient:
        yield "no gradient but 0 reached any parameter on one process, so nothing was compared"
        return
    if verified.worst is not None:
        worst = verified.worst
        yield f"the {worst.what} of {worst.path} is off by {_share(worst)}"
    if verified.parted is not None:
        yield (f"the losses part at step {verified.parted.step} (by {_share(verified.parted)})")
    elif verified.not_finite is None:
        yield "the losses agree"
    norms = [x for x in verified.differences if x.what == "gradient norm" and not x.within]
    if norms and verified.worst is None:
        first = min(norms, key=lambda x: x.step or 0)
        yield f"the gradient norms part at step {first.step} (by {_share(first)})"


def _largest(verified: Verification, name: str) -> Difference:
    """Return the worst difference of the quantity `name`, such as `loss`. `verified.differences` is
    ordered worst first."""
    return next(x for x in verified.differences if x.what == name)


def _cells(row: Difference) -> tuple[str, ...]:
    """Return the cells of a difference's row in the table."""
    return (
        f"{row.path} {row.what}".strip(),
        "" if row.step is None else str(row.step),
        f"{row.difference:.1e}",
        f"{row.relative:.1e}",
        _percent(row.of_allowed),
    )


def _notes(verified: Verification) -> Iterator[str]:
    """Yield the notes below the table of differences."""
    kinds = {x.path: x.what for x in verified.differences if x.path}
    constants = sum(kind in ("buffer", "untrained parameter") for kind in kinds.values())
    updates = "first and last update" if verified.steps > 1 else "update"
    said = f"{_counted(len(kinds) - constants, 'parameter')} by initial value, first gradient and "
    said += updates
    if constants:
        said += f", {_counted(constants, 'untrained tensor')} by value"
    yield f"{said}; all in verify.json"
    if verified.rounding:
        moved = max(verified.rounding.values())
        yield (
            f"rounding alone, in {ROUNDED_RUNS} runs of one process with weights rounded "
            f"otherwise, comes to {_percent(moved)} of the tolerance"
        )
    if verified.skipped[1]:
        yield (
            f"{_counted(len(verified.skipped[1]), 'step')} overflowed in fp16 and changed nothing"
        )
    if verified.undecided:
        yield (
            f"{verified.undecided:,} of {verified.elements:,} elements have gradients so "
            "small that their error decides the direction of an optimizer's step"
        )
    if verified.dropout_off:
        yield "dropout was off: its masks differ from plan to plan"
    if verified.drew_random:
        yield "the model drew random numbers of its own, which differ from plan to plan"
    if verified.shared:
        yield f"not compared, as both sides share it: {'; '.join(verified.shared)}"


def _share(difference: Difference) -> str:
    """Return text on a difference and its allowance, both relative to the largest element of the
    reference."""
    allowed = difference.relative / difference.of_allowed if difference.of_allowed else 0.0
    return f"{difference.relative:.1e} of its size, {allowed:.1e} being allowed"


def _percent(of_allowed: float) -> str:
    """Return a ratio as text: a percentage below 100, such as `35%`, else a multiple, such as
    `120x`."""
    return f"{of_allowed:.0%}" if of_allowed < 100 else f"{of_allowed:.0f}x"


def _counted(number: int, noun: str) -> str:
    """Return a count with a noun, in the plural unless the count is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
