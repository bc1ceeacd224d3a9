"""Describe the charts of a page in Vega-Lite, with the text that stands for each of them.

Colours are those of Okabe and Ito, which people with any colour vision tell apart; axes and text
have the page's own colour, so that one chart does for dark and light.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from whale_train.launcher.report.rank_kinds import RankKind, fullness
from whale_train.launcher.report.timelines import Span
from whale_train.quantities import fold_numbers, in_bytes, in_seconds
from whale_train.strategies.plan.plan import Prediction

Spec = Mapping[str, Any]
MOST_KINDS = 40  # rows of the chart of memory; the table has all
MOST_POINTS = 1500  # of a curve
_MEMORY = {
    "parameters": "#0072B2",
    "gradients": "#D55E00",
    "optimizer": "#009E73",
    "activations": "#CC79A7",
    "communication": "#E69F00",
}
_WORK = {
    "forward": "#0072B2",
    "recompute": "#56B4E9",
    "backward": "#009E73",
    "update": "#CC79A7",
    "communication": "#E69F00",
    "data": "#999999",
    "metrics": "#D55E00",
    "other": "#7F7F7F",
}
_STEP = {
    "compute": "#0072B2",
    "communication": "#E69F00",
    "optimizer": "#CC79A7",
    "idle": "#999999",
}
_RUNS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
_LEGEND = {"orient": "top", "title": None}
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2])  # of curves, beside their colours


@dataclass(frozen=True)
class Chart:
    """A chart of a page.

    name: its id on the page.
    title: its heading.
    text: what it shows, in words, for those who do not see it.
    spec: its description in Vega-Lite.
    is_wide: whether it has a row of the page to itself.
    """

    name: str
    title: str
    text: str
    spec: Spec
    is_wide: bool = True


def memory_chart(kinds: Mapping[str, RankKind], title: str) -> Chart:
    """Return the chart of the bytes that ranks need, by category, beside the device's memory.

    kinds: kinds of ranks, by their labels.
    title: the heading of the chart.
    """
    rows, limits = [], []
    for label, kind in kinds.items():
        parts = asdict(kind.memory)
        rows += [
            {"ranks": label, "part": part, "order": number, "gb": parts[part] / 1e9}
            for number, part in enumerate(_MEMORY)
        ]
        if kind.limit_bytes is not None:
            limits.append({"ranks": label, "gb": kind.limit_bytes / 1e9})
    name, fullest = max(kinds.items(), key=lambda item: fullness(item[1]))
    text = f"The fullest is {name}: {in_bytes(fullest.memory.total)}"
    if fullest.limit_bytes is not None:
        text += f" of {in_bytes(fullest.limit_bytes)}"
    y = {"field": "ranks", "type": "nominal", "sort": None, "title": None}
    bars = {
        "data": {"values": rows},
        "mark": {"type": "bar", "tooltip": True},
        "encoding": {
            "y": y,
            "x": {"field": "gb", "type": "quantitative", "title": "GB at the peak of a step"},
            "color": _colors("part", _MEMORY),
            "order": {"field": "order"},
        },
    }
    marks = {
        "data": {"values": limits},
        "mark": {"type": "tick", "thickness": 2, "color": "currentColor", "tooltip": True},
        "encoding": {"y": y, "x": {"field": "gb", "type": "quantitative"}},
    }
    layers = [bars, marks] if limits else [bars]
    spec = _spec({"layer": layers, "height": 22 * len(kinds)})
    return Chart("memory", title, text + ".", spec)


def step_chart(predictions: Mapping[str, Prediction], measured_s: float | None) -> Chart:
    """Return the seconds of a step by what the busiest rank does in them.

    predictions: by the words for where they are of.
    measured_s: the median of a run's steps, in seconds; None without a run.
    """
    rows = []
    said = []
    for name, predicted in predictions.items():
        parts = {part: getattr(predicted, f"{part}_s") for part in _STEP}
        rows += [
            {"of": name, "part": part, "order": number, "ms": seconds * 1e3}
            for number, (part, seconds) in enumerate(parts.items())
        ]
        words = ", ".join(f"{part} {in_seconds(seconds)}" for part, seconds in parts.items())
        said.append(f"{name}: {in_seconds(predicted.step_time_s)} ({words})")
    colors = dict(_STEP)
    if measured_s is not None:
        colors["measured"] = "#56B4E9"
        rows.append({"of": "measured", "part": "measured", "order": 0, "ms": measured_s * 1e3})
        said.append(f"measured: {in_seconds(measured_s)}")
    spec = _spec(
        {
            "data": {"values": rows},
            "mark": {"type": "bar", "tooltip": True},
            "height": 30 * len({row["of"] for row in rows}),
            "encoding": {
                "y": {"field": "of", "type": "nominal", "sort": None, "title": None},
                "x": {"field": "ms", "type": "quantitative", "title": "ms of the busiest rank"},
                "color": _colors("part", colors),
                "order": {"field": "order"},
            },
        }
    )
    return Chart("step", "Where the time of a step goes", "; ".join(said) + ".", spec)


def timeline_chart(spans: Mapping[str, Sequence[Span]], labels: Mapping[int, str]) -> Chart:
    """Return a step of some ranks as it goes on.

    spans: spans of a step, by the words for where they are from (predicted, measured).
    labels: the label of each rank.
    """
    rows = [
        {
            **{"from": name, "rank": labels[x.rank] + (" (transfers)" if x.lane else "")},
            **{"work": x.work, "what": x.name},
            **{"start": round(x.start_ms, 4), "end": round(x.end_ms, 4)},
        }
        for name, of_name in spans.items()
        for x in of_name
    ]
    ends = {name: max(x.end_ms for x in of_name) for name, of_name in spans.items()}
    text = "; ".join(f"{name}, the step takes {end:.4g} ms" for name, end in ends.items())
    seen = {row["work"] for row in rows}
    spec = _spec(
        {
            "data": {"values": rows},
            "facet": {
                "row": {"field": "from", "type": "nominal", "title": None, "sort": list(spans)}
            },
            "resolve": {"scale": {"x": "independent", "y": "independent"}},
            "spec": {
                "width": 760,
                "height": {"step": 18},
                "mark": {"type": "bar", "tooltip": True},
                "encoding": {
                    "y": {"field": "rank", "type": "nominal", "sort": None, "title": None},
                    "x": {"field": "start", "type": "quantitative", "title": "ms"},
                    "x2": {"field": "end"},
                    "color": _colors("work", {k: v for k, v in _WORK.items() if k in seen}),
                    "tooltip": [{"field": x} for x in ("what", "rank", "start", "end")],
                },
            },
        }
    )
    return Chart("timeline", "One step, rank by rank", f"A rank of each kind; {text}.", spec)


def curve_chart(
    name: str, title: str, curves: Mapping[str, Sequence[tuple[float, float]]], unit: str
) -> Chart:
    """Return curves over the steps.

    curves: points of (step, value), by name.
    """
    rows = [
        {"step": step, "value": value, "of": of}
        for of, points in curves.items()
        for step, value in thinned(points)
    ]
    colors = {of: _RUNS[number % len(_RUNS)] for number, of in enumerate(curves)}
    said = [
        f"{of}: {ends}" if len(curves) > 1 else ends
        for of, points in curves.items()
        for ends in [f"{_point(points[0])}, {_point(points[-1])}"]
    ]
    encoding: dict[str, Any] = {
        "x": {
            **{"field": "step", "type": "quantitative", "title": "step"},
            "axis": {"format": ",d", "tickMinStep": 1},
        },
        "y": {
            **{"field": "value", "type": "quantitative", "title": unit},
            **{"scale": {"zero": False}, "axis": {"format": ".4~g"}},
        },
    }
    if len(curves) > 1:
        encoding["color"] = _colors("of", colors)
        dashes = [_DASHES[number % len(_DASHES)] for number in range(len(colors))]
        encoding["strokeDash"] = {
            **{"field": "of", "type": "nominal", "sort": None, "legend": _LEGEND},
            "scale": {"domain": list(colors), "range": dashes},
        }
    mark = {"type": "line", "tooltip": True, "color": _RUNS[0], "point": len(rows) <= 50}
    spec = _spec({"data": {"values": rows}, "mark": mark, "height": 220, "encoding": encoding})
    return Chart(name, title, "; ".join(said) + ".", spec, is_wide=False)


def load_chart(loads: Sequence[Sequence[int]], step: int) -> Chart:
    """Return the chart of how many rows every expert had in a step.

    loads: rows of each expert, by mixture.
    step: the number of the step.
    """
    rows = [
        {"mixture": str(mixture), "expert": expert, "rows": count}
        for mixture, of_mixture in enumerate(loads)
        for expert, count in enumerate(of_mixture)
    ]
    text = "; ".join(
        f"mixture {number}: {min(of_mixture):,} to {max(of_mixture):,} rows an expert"
        for number, of_mixture in enumerate(loads)
    )
    spec = _spec(
        {
            "data": {"values": rows},
            "mark": {"type": "rect", "tooltip": True},
            "height": 22 * len(loads),
            "encoding": {
                "y": {"field": "mixture", "type": "nominal", "sort": None, "title": "mixture"},
                "x": {"field": "expert", "type": "ordinal", "title": "expert"},
                "color": {
                    **{"field": "rows", "type": "quantitative"},
                    **{"scale": {"scheme": "cividis", "domainMin": 0}, "title": "rows"},
                },
            },
        }
    )
    return Chart("loads", f"Rows of each expert in step {step:,}", text + ".", spec)


def alternatives_chart(chosen_s: float, rejected: Mapping[str, float]) -> Chart:
    """Return the chart of the step time of the plan beside those of what was rejected.

    chosen_s: seconds of a step of the plan.
    rejected: seconds of a step of each alternative, by its name.
    """
    times = {"the plan": chosen_s, **rejected}
    rows = [
        {"of": name, "ms": seconds * 1e3, "is": "the plan" if name == "the plan" else "rejected"}
        for name, seconds in times.items()
    ]
    colors = {"the plan": _RUNS[0], "rejected": _RUNS[-1]}
    spec = _spec(
        {
            "data": {"values": rows},
            "mark": {"type": "bar", "tooltip": True},
            "height": 22 * len(rows),
            "encoding": {
                "y": {"field": "of", "type": "nominal", "sort": None, "title": None},
                "x": {"field": "ms", "type": "quantitative", "title": "ms a step"},
                "color": _colors("is", colors),
            },
        }
    )
    name, nearest_s = min(rejected.items(), key=lambda item: item[1])
    text = f"The plan takes {in_seconds(chosen_s)} a step; the nearest alternative, {name}, "
    text += f"{in_seconds(nearest_s)}."
    return Chart("alternatives", "What was rejected would take", text, spec)


def _point(point: tuple[float, float]) -> str:
    return f"{point[1]:.4g} at step {point[0]:,.0f}"


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most about `MOST_POINTS` points of a curve: the least and the largest of each of
    equal stretches, and the last."""
    if len(points) <= MOST_POINTS:
        return list(points)
    width = -(-2 * len(points) // MOST_POINTS)
    thin = []
    for start in range(0, len(points), width):
        part = points[start : start + width]
        ends = {min(part, key=lambda x: x[1]), max(part, key=lambda x: x[1])}
        thin += sorted(ends)
    return thin if thin[-1] == points[-1] else [*thin, points[-1]]


def kind_label(kind: RankKind) -> str:
    """Return the name of a kind of rank: its ranks, shortened, and its device."""
    ranks = fold_numbers(kind.ranks)
    if len(ranks) > 24:
        ranks = f"{kind.ranks[0]}... ({len(kind.ranks):,} ranks)"
    return f"{ranks} {kind.device}"


def _colors(field: str, colors: Mapping[str, str]) -> dict[str, Any]:
    scale = {"domain": list(colors), "range": list(colors.values())}
    return {"field": field, "type": "nominal", "scale": scale, "legend": _LEGEND, "sort": None}


def _spec(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole description, whose width is the page's and whose text has its colour."""
    text = {"labelColor": "currentColor", "titleColor": "currentColor", "labelFontSize": 12}
    lines = {"domainColor": "currentColor", "tickColor": "currentColor", "gridOpacity": 0.2}
    config = {
        **{"background": None, "view": {"stroke": None}},
        "axis": {**text, **lines, "gridColor": "currentColor", "labelLimit": 260},
        **{"legend": text, "header": text, "title": {"color": "currentColor"}},
    }
    fit = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
    width = {} if "facet" in body else fit
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        **{"config": config, **width, **body},
    }
