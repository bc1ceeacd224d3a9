"""Show the audit of a run: the attempts, the epochs, and the samples of one step."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whale_train.data.stream import ENDLESS
from whale_train.launcher.modes.run_history import StepRange
from whale_train.launcher.modes.sample_audit import Audit, Epochs, TakenSamples
from whale_train.launcher.ui.terminal import Portable
from whale_train.quantities import fold_numbers

_SHOWN = 16  # samples of a rank


def audit_view(audit: Audit, name: str) -> RenderableType:
    """Return the view of an audit: a row for each attempt, lines on the epochs, and the verdict if
    the proof holds.

    name: the run directory as the user gave it.
    """
    table = _table("steps", "samples a step", "places of the order", "of attempt")
    for segment in audit.history.segments:
        again = f" ({segment.repeated:,} of its steps were done again)" if segment.repeated else ""
        table.add_row(
            f"{segment.began + 1:,}-{segment.ended:,}",
            f"{segment.batch:,}",
            f"{segment.first:,}-{segment.after - 1:,}",
            Text(f"{segment.files}{again}"),
        )
    title = f"audit of {name}: {audit.steps:,} steps, {audit.samples:,} samples"
    named = len({epochs.steps for epochs in audit.epochs}) > 1
    lines = [Text(line) for epochs in audit.epochs for line in _epochs(epochs, named)]
    parts: list[RenderableType] = [Text(title, style="bold"), table, *lines]
    if not audit.wrong:
        said = "proven: every sample was taken once an epoch"
        parts.append(Text(said, style="bold green"))
    return Portable(Group(*parts))


def step_view(segment: StepRange, step: int, taken: Sequence[TakenSamples]) -> RenderableType:
    """Return the view of one step: a row for each group of ranks that took the same samples."""
    start, stop = segment.places(step)
    title = f"step {step:,}: places {start:,}-{stop - 1:,} of the order"
    table = _table("ranks", "device", "node", "samples")
    for rank in taken:
        more = len(rank.samples) - _SHOWN
        numbers = " ".join(map(str, rank.samples[:_SHOWN]))
        table.add_row(
            fold_numbers(rank.ranks),
            rank.device,
            fold_numbers(rank.nodes),
            numbers + (f" and {more:,} more" if more > 0 else ""),
        )
    return Portable(Group(Text(title, style="bold"), table))


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _epochs(epochs: Epochs, named: bool) -> Iterator[str]:
    """Yield the lines on the epochs of a source, each with the range of steps if `named`."""
    of = f"steps {epochs.steps[0]:,}-{epochs.steps[1]:,}, " if named else ""
    of += "" if epochs.source is None else f"source {epochs.source}, "
    if epochs.num_samples == ENDLESS:
        yield f"{of}{epochs.begun:,} samples of a stream, one after another"
        return
    over = f"{epochs.whole:,} epochs of {epochs.num_samples:,} samples are over"
    if epochs.whole == 1:
        over = f"1 epoch of {epochs.num_samples:,} samples is over"
    if epochs.whole:
        yield of + over
    if epochs.begun:
        yield f"{of}epoch {epochs.whole + 1:,}: {epochs.begun:,} of {epochs.num_samples:,} samples"
