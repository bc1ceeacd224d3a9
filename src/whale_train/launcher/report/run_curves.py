"""Draw the curves of runs: loss, rate, memory, evaluations and the loads of experts."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from whale_train.launcher.report.charts import Chart, curve_chart, load_chart
from whale_train.launcher.report.page_parts import Section
from whale_train.launcher.report.shown_run import Rows, ShownRun

_CURVES = (
    ("loss", "Loss", "loss"),
    ("grad_norm", "Gradient norm", "L2 norm before clipping"),
    ("lr", "Learning rate", "learning rate"),
    ("samples_per_s", "Training rate", "samples/s"),
    ("step_time_s", "Time of a step", "seconds"),
    ("peak_memory_bytes", "Peak memory of rank 0", "GB"),
    ("model_flops_utilisation", "Model FLOP/s utilisation", "part of the peak"),
)
_GB = ("peak_memory_bytes",)  # keys of bytes, which are shown in GB


def curves_section(runs: Sequence[ShownRun]) -> Section:
    """Return the section of the curves of runs, in one colour each; of a single run with those of
    its earlier attempts."""
    rows_by_name: dict[str, Rows] = {run.title: run.steps for run in runs if run.steps}
    if len(runs) == 1 and runs[0].earlier_steps:
        rows_by_name = {"this attempt": runs[0].steps}
        rows_by_name |= {f"attempt {i}": rows for i, rows in enumerate(runs[0].earlier_steps, 1)}
    charts: list[Chart] = []
    for key, title, unit in (*_CURVES, *_evaluated(rows_by_name.values())):
        curves = {name: _points(rows, key) for name, rows in rows_by_name.items()}
        charts += _chart(f"curve-{key}", title, curves, unit)
    charts += _expert_charts(rows_by_name)
    return Section("curves", "Curves of the run", charts=charts)


def _chart(
    name: str, title: str, curves: Mapping[str, Sequence[tuple[float, float]]], unit: str
) -> Iterator[Chart]:
    """Yield the chart of the curves that have points, if there are any."""
    drawn = {of: points for of, points in curves.items() if points}
    if drawn:
        yield curve_chart(name, title, drawn, unit)


def _expert_charts(rows_by_name: Mapping[str, Rows]) -> Iterator[Chart]:
    """Yield the charts of how evenly a mixture's experts are loaded.

    Of one run every mixture has a curve, of several runs the least balanced mixture of each.
    """
    title, unit = "Imbalance of experts", "busiest expert's rows / mean"
    by_run = {
        name: [(row["step"], row["experts"]["imbalance"]) for row in rows if row.get("experts")]
        for name, rows in rows_by_name.items()
    }
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, points in by_run.items():
        if len(by_run) > 1:
            curves[name] = [(step, max(of_mixtures)) for step, of_mixtures in points]
            continue
        for step, of_mixtures in points:
            for number, imbalance in enumerate(of_mixtures):
                curves.setdefault(f"mixture {number}", []).append((step, imbalance))
    yield from _chart("curve-imbalance", title, curves, unit)
    for rows in rows_by_name.values():
        last = rows[-1] if rows else {}
        if len(rows_by_name) == 1 and (loads := last.get("experts", {}).get("load")):
            yield load_chart(loads, last["step"])


def _evaluated(runs: Collection[Rows]) -> list[tuple[str, str, str]]:
    """Return the results of evaluations that rows have: key, title and unit."""
    keys = dict.fromkeys(
        key
        for rows in runs
        for row in rows
        for key in row
        if key.rpartition("_")[0] and key.endswith(("_loss", "_accuracy"))
    )
    return [(key, key.replace("_", " ").capitalize(), key.rpartition("_")[2]) for key in keys]


def _points(rows: Rows, key: str) -> list[tuple[float, float]]:
    unit = 1e9 if key in _GB else 1
    return [(row["step"], row[key] / unit) for row in rows if isinstance(row.get(key), int | float)]
