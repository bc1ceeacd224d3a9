"""Show the runs of a sweep side by side: the settings that differ, and the outcomes."""

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
    """One job of a sweep.

    overrides: the overrides of the job, as Hydra lists them (`strategy=dp`).
    status: the status of the job, such as `done` or `failed`.
    final_loss, samples_per_s, step_time_s, predicted_step_time_s: figures of the job, times in
        seconds; None for a figure that a failed job did not reach.
    peak_memory_bytes: largest peak memory of any rank, in bytes; None where a failed job did not
        reach it.
    run_dir: the run directory.
    """

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
    """The cells of one job. A cell is '' for a figure that the job does not have.

    run: the run directory.
    settings: the settings that differ between jobs, by key.
    status: the status, and whether the job is the fastest.
    loss: the final loss.
    rate: the training rate, in samples/s.
    step: the step time.
    predicted: the predicted step time.
    memory: the peak memory of the heaviest rank.
    """

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
    """A way to lay out the table.

    names: the names of the columns.
    cells: for each job, one cell for each column.
    numbers: number of columns, at the end, that hold numbers.
    """

    names: Sequence[str]
    cells: Sequence[Sequence[str | Text]]
    numbers: int

    @property
    def width(self) -> int:
        """Return the width of the table, in columns of the console, if no cell is wrapped."""
        columns = zip(self.names, *self.cells, strict=True)
        lines = [[line for cell in column for line in str(cell).split("\n")] for column in columns]
        return sum(max(map(cell_len, column)) for column in lines) + 2 * (len(lines) - 1)


def sweep_table(rows: Sequence[SweepRow], width: int = 120) -> RenderableType:
    """Return the table at the end of a sweep, with the fastest finished job marked.

    rows: the jobs, in the order of the table. Overrides that all jobs share are not shown.
    width: columns of the console. If one line for each job does not fit, several lines are used.
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
    layout = next((candidate for candidate in layouts if candidate.width <= width), layouts[-1])
    table = _table(layout)
    if len(parents) != 1:
        return Portable(table)
    return Portable(Group(table, Text(f"runs are in {parents.pop()}", style="dim")))


def _one_line(jobs: Sequence[_Job], keys: Sequence[str]) -> _Layout:
    """Return the layout with one line for each job."""
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
    """Return the layout with two lines for each job."""
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
    """Return the layout with a block of lines for each job."""
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
    """Return the table of a layout."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    words = len(layout.names) - layout.numbers
    for name in layout.names[:words]:
        table.add_column(name, overflow="fold")
    for name in layout.names[words:]:
        table.add_column(name, justify="right", no_wrap=True)
    for cells in layout.cells:
        # Text objects keep rich from reading square brackets in an override as markup.
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))
    return table


def _job(row: SweepRow, settings: Mapping[str, str], run: str, is_fastest: bool) -> _Job:
    """Return the cells of a job.

    settings: the settings of the job that the table shows, by key.
    run: the run directory as text.
    is_fastest: whether the job is marked as the fastest.
    """
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
    """Return the job's training rate in samples/s, or 0 for a job that is not done."""
    return (row.samples_per_s or 0.0) if row.status == "done" else 0.0


def _settings(overrides: Sequence[str]) -> dict[str, str]:
    """Return the value of each key that a job's overrides set.

    Hydra's `+key=value` and `++key=value` count as `key=value`. For `~key` the value is `removed`.
    """
    settings = {}
    for override in overrides:
        key, _, value = override.partition("=")
        settings[key.lstrip("+~")] = "removed" if key.startswith("~") else value
    return settings
