"""The runs of a sweep side by side: what differed between them, and what came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whale_train.launcher.ui.terminal import Portable
from whale_train.quantities import in_bytes, in_rate, in_seconds


@dataclass(frozen=True)
class SweepRow:
    """One job. `overrides` as Hydra lists them (`strategy=dp`); `status` is `done` or what ended
    it; what a failed job did not reach is None. `peak_memory_bytes` is the heaviest rank's."""

    overrides: tuple[str, ...]
    status: str
    final_loss: float | None
    samples_per_s: float | None
    step_time_s: float | None
    predicted_step_time_s: float | None
    peak_memory_bytes: float | None
    run_dir: Path


@dataclass(frozen=True)
class _Job:
    """What is shown of one row; a number there is none of is empty."""

    run: str
    settings: Mapping[str, str]
    status: Text
    loss: str
    rate: str
    step: str
    predicted: str
    memory: str


@dataclass(frozen=True)
class _Layout:
    """Column names, and per job a cell for each; numbers are the last `numbers` columns."""

    names: Sequence[str]
    cells: Sequence[Sequence[str | Text]]
    numbers: int

    @property
    def width(self) -> int:
        """Columns it takes when nothing is broken."""
        columns = zip(self.names, *self.cells, strict=True)
        lines = [[line for cell in column for line in str(cell).split("\n")] for column in columns]
        return sum(max(map(cell_len, column)) for column in lines) + 2 * (len(lines) - 1)


def sweep_table(rows: Sequence[SweepRow], width: int = 120) -> RenderableType:
    """Return the table at the end of a sweep, jobs in the order given, the fastest of those done
    marked.

    Overrides all jobs share are left out. `width` is the console's: where a line a job does not
    fit, numbers are put below each other.
    """
    settings = [_settings(row.overrides) for row in rows]
    keys = list(dict.fromkeys(key for setting in settings for key in setting))
    keys = [key for key in keys if len({setting.get(key) for setting in settings}) > 1]
    fastest = max((_rate(row) for row in rows), default=0.0)
    parents = {row.run_dir.parent for row in rows}
    jobs = [
        _job(
            row,
            {key: setting[key] for key in keys if key in setting},
            row.run_dir.name if len(parents) == 1 else str(row.run_dir),
            is_fastest=len(rows) > 1 and fastest > 0 and _rate(row) == fastest,
        )
        for row, setting in zip(rows, settings, strict=True)
    ]
    layouts = (_one_line(jobs, keys), _two_lines(jobs, keys), _blocks(jobs))
    layout = next((each for each in layouts if each.width <= width), layouts[-1])
    table = _table(layout)
    if len(parents) != 1:
        return Portable(table)
    return Portable(Group(table, Text(f"runs are in {parents.pop()}", style="dim")))


def _one_line(jobs: Sequence[_Job], keys: Sequence[str]) -> _Layout:
    return _Layout(
        names=("run", *keys, "status", "loss", "samples/s", "step", "predicted", "memory"),
        cells=[
            (
                job.run,
                *(job.settings.get(key, "") for key in keys),
                *(job.status, job.loss, job.rate, job.step, job.predicted, job.memory),
            )
            for job in jobs
        ],
        numbers=5,
    )


def _two_lines(jobs: Sequence[_Job], keys: Sequence[str]) -> _Layout:
    return _Layout(
        names=("run", *keys, "status", "samples/s\nloss", "step\npredicted", "memory\n"),
        cells=[
            (
                job.run,
                *(job.settings.get(key, "") for key in keys),
                job.status,
                *(f"{job.rate}\n{job.loss}", f"{job.step}\n{job.predicted}", job.memory),
            )
            for job in jobs
        ],
        numbers=3,
    )


def _blocks(jobs: Sequence[_Job]) -> _Layout:
    return _Layout(
        names=("run", "what", "came of it"),
        cells=[
            (
                job.run,
                Text("\n").join(
                    [job.status, *(Text(f"{key}={value}") for key, value in job.settings.items())]
                ),
                "\n".join(
                    f"{before}{number}{after}"
                    for before, number, after in (
                        ("", job.rate, " samples/s"),
                        ("loss ", job.loss, ""),
                        ("", job.step, " a step"),
                        ("predicted ", job.predicted, ""),
                        ("", job.memory, ""),
                    )
                    if number
                ),
            )
            for job in jobs
        ],
        numbers=1,
    )


def _table(layout: _Layout) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    words = len(layout.names) - layout.numbers
    for name in layout.names[:words]:
        table.add_column(name, overflow="fold")
    for name in layout.names[words:]:
        table.add_column(name, justify="right", no_wrap=True)
    for cells in layout.cells:
        # As Text: square brackets in an override are no markup.
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))
    return table


def _job(row: SweepRow, settings: Mapping[str, str], run: str, is_fastest: bool) -> _Job:
    step, predicted, memory = row.step_time_s, row.predicted_step_time_s, row.peak_memory_bytes
    return _Job(
        run=run,
        settings=settings,
        status=Text(
            f"{row.status}, fastest" if is_fastest else row.status,
            style="bold green" if is_fastest else "" if row.status == "done" else "red",
        ),
        loss="" if row.final_loss is None else f"{row.final_loss:.4f}",
        rate="" if row.samples_per_s is None else in_rate(row.samples_per_s),
        step="" if step is None else in_seconds(step),
        predicted="" if predicted is None else in_seconds(predicted),
        memory="" if memory is None else in_bytes(memory),
    )


def _rate(row: SweepRow) -> float:
    """Return what the fastest is chosen by: a run that ended early does not compete."""
    return (row.samples_per_s or 0.0) if row.status == "done" else 0.0


def _settings(overrides: Sequence[str]) -> dict[str, str]:
    """Key to value; Hydra's `+key=value` and `++key=value` set the key, `~key` removes it."""
    found = {}
    for override in overrides:
        key, _, value = override.partition("=")
        found[key.lstrip("+~")] = "removed" if key.startswith("~") else value
    return found
