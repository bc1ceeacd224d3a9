"""Put a plan, and the run of it, on a page: who holds what, how full and how fast, and why."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from statistics import median

from whale_train.launcher.report.charts import (
    MOST_KINDS,
    Chart,
    curve_chart,
    memory_chart,
    step_chart,
    timeline_chart,
)
from whale_train.launcher.report.rank_kinds import RankKind, rank_kinds
from whale_train.launcher.report.shown_run import Rows, ShownRun
from whale_train.launcher.report.timelines import ranks_to_show, step_spans
from whale_train.launcher.report.write_page import Page, Row, Section, Table
from whale_train.quantities import fold_modules, fold_numbers, in_bytes, in_rate, in_seconds
from whale_train.strategies.plan.plan import Plan

_CURVES = (
    ("loss", "Loss", "loss"),
    ("grad_norm", "Gradient norm", "L2 norm before clipping"),
    ("lr", "Learning rate", "learning rate"),
    ("step_time_s", "Time of a step", "seconds"),
    ("peak_memory_bytes", "Peak memory of the fullest rank", "GB"),
)
_FACT = ("fact", "value")
_GB = ("peak_memory_bytes",)  # keys of bytes, which are shown in GB


def plan_page(shown: ShownRun, against: ShownRun | None = None) -> Page:
    """Return the page of a plan or a run, and of what it is compared with."""
    if against is not None:
        shown, against = _named_apart(shown, against)
    sections = [_summary(shown, against)]
    if shown.is_run or (against is not None and against.is_run):
        sections.append(_curves(shown, against))
    if against is None:
        return Page(shown.title, str(shown.path), [*sections, *_plan_sections(shown, "", "")])
    for one, prefix in ((shown, ""), (against, "other-")):
        sections += _plan_sections(one, f": {one.title}", prefix)
    title = f"{shown.title} against {against.title}"
    return Page(title, f"{shown.path} and {against.path}", sections)


def _named_apart(shown: ShownRun, against: ShownRun) -> tuple[ShownRun, ShownRun]:
    """Return two plans with titles of what they do not share, or of their paths."""
    words = [x.title.split() for x in (shown, against)]
    own = [" ".join(x for x in words[i] if x not in words[1 - i]) for i in (0, 1)]
    if not all(own) or own[0] == own[1]:
        own = [str(shown.path), str(against.path)]
    return replace(shown, title=own[0]), replace(against, title=own[1])


def _plan_sections(shown: ShownRun, where: str, prefix: str) -> Iterator[Section]:
    """Yield the sections about one plan.

    where: the end of their headings.
    prefix: the beginning of their ids.
    """
    plan, kinds = shown.plan, rank_kinds(shown.plan)
    if plan.inventory is not None:
        yield Section(
            f"{prefix}cluster", f"The cluster{where}", tables=[_nodes(plan), _kinds(plan)]
        )
    memory = _named(memory_chart(kinds), prefix)
    more = f"The chart has the first {MOST_KINDS} kinds of {len(kinds):,}."
    lines = [more] if len(kinds) > MOST_KINDS else []
    yield Section(f"{prefix}devices", f"Who does what{where}", lines, [memory], [_devices(kinds)])
    yield Section(f"{prefix}parts", f"Parts of the model{where}", tables=[_parts(plan)])
    yield Section(f"{prefix}time", f"Time{where}", charts=list(_time_charts(shown, kinds, prefix)))
    if plan.decisions:
        yield Section(f"{prefix}decisions", f"Decisions{where}", tables=[_decisions(plan)])


def _named(chart: Chart, prefix: str) -> Chart:
    return replace(chart, name=f"{prefix}{chart.name}")


def _facts(shown: ShownRun) -> dict[str, str]:
    """Return the facts of a plan or a run by their names, in a line each."""
    plan = shown.plan
    predicted = plan.predicted
    nodes = len({rank.node for rank in plan.ranks})
    parts = ", ".join(f"{x.primitive} {x.name} (ZeRO {x.zero})" for x in plan.task_graphs[:6])
    if len(plan.task_graphs) > 6:
        parts += f" and {len(plan.task_graphs) - 6:,} more"
    fullest = max((rank.memory_bytes.total for rank in plan.ranks), default=0.0)
    facts = {
        "cluster": plan.cluster,
        "ranks": f"{plan.world_size:,} on {nodes:,} {'node' if nodes == 1 else 'nodes'}",
        "samples a step": f"{plan.global_batch:,}",
        "precision": plan.precision,
        "parts": parts,
        "schedule": plan.schedule or "none",
        "step, predicted": in_seconds(predicted.step_time_s),
        "samples a second, predicted": in_rate(predicted.samples_per_s),
        "memory of the fullest rank, predicted": in_bytes(fullest),
    }
    if shown.is_run:
        seconds = [row["step_time_s"] for row in shown.steps]
        facts["steps taken"] = f"{shown.steps[-1]['step']:,}"
        facts["step, measured (median)"] = in_seconds(median(seconds))
        facts["last loss"] = _number(shown.steps[-1].get("loss"))
        facts["memory of the fullest rank, measured"] = in_bytes(
            max(row.get("peak_memory_bytes") or 0 for row in shown.steps)
        )
    if shown.attempts:
        facts["attempts"] = f"{len(shown.attempts):,}"
    return facts


def _summary(shown: ShownRun, against: ShownRun | None) -> Section:
    """Return the section that says what is shown, in two columns where two are."""
    facts = _facts(shown)
    if against is None:
        rows = [Row(pair) for pair in facts.items()]
        table = Table("The plan and the run" if shown.is_run else "The plan", _FACT, rows)
        tables = [table]
    else:
        other = _facts(against)
        rows = [
            Row(
                (name, facts.get(name, ""), other.get(name, "")), facts.get(name) != other.get(name)
            )
            for name in dict.fromkeys([*facts, *other])
        ]
        columns = (_FACT[0], shown.title, against.title)
        tables = [Table("Both; rows that differ are marked", columns, rows)]
    if shown.attempts:
        tables.append(_attempts(shown.attempts))
    return Section("summary", "In short", tables=tables)


def _attempts(attempts: Rows) -> Table:
    rows = []
    for number, attempt in enumerate(attempts, 1):
        failure = attempt.get("failure") or {}
        why = failure.get("message") or failure.get("signal") or attempt["status"]
        steps = f"{attempt['began']:,} to {attempt['reached']:,}"
        time = in_seconds(attempt["seconds"])
        rows.append(Row((str(number), f"{attempt['ranks']:,}", steps, time, why.split("\n")[0])))
    return Table("Attempts", ("attempt", "ranks", "steps", "time", "end"), rows)


def _curves(shown: ShownRun, against: ShownRun | None) -> Section:
    """Return the section of a run's curves, with those of earlier attempts, or of another run."""
    runs: dict[str, Rows] = {shown.title: shown.steps} if shown.steps else {}
    if against is None and shown.earlier_steps:
        runs = {"this attempt": shown.steps}
        runs |= {f"attempt {i}": rows for i, rows in enumerate(shown.earlier_steps, 1)}
    elif against is not None and against.steps:
        runs[against.title] = against.steps
    charts = []
    for key, title, unit in (*_CURVES, *_evaluated(runs.values())):
        points = {name: _points(rows, key) for name, rows in runs.items()}
        points = {name: of_run for name, of_run in points.items() if of_run}
        if points:
            charts.append(curve_chart(f"curve-{key}", title, points, unit))
    return Section("curves", "Curves of the run", charts=charts)


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


def _nodes(plan: Plan) -> Table:
    """Return the table of a cluster's nodes and links."""
    assert plan.inventory is not None
    rows = []
    first = 0
    for nodes in plan.inventory.nodes:
        counts = {name: nodes.devices.count(name) for name in dict.fromkeys(nodes.devices)}
        devices = " + ".join(f"{count:,} {name}" for name, count in counts.items())
        numbers = fold_numbers(range(first, first + nodes.count))
        link = f"{nodes.link.name}, {in_bytes(nodes.link.bandwidth_bytes_s)}/s"
        rows.append(Row((numbers, devices, link)))
        first += nodes.count
    network = plan.inventory.network
    caption = f"Nodes, joined by {network.name} ({in_bytes(network.bandwidth_bytes_s)}/s)"
    return Table(caption, ("node", "devices", "link between them"), rows)


def _kinds(plan: Plan) -> Table:
    """Return the table of a cluster's kinds of devices."""
    assert plan.inventory is not None
    rows = [
        Row(
            (
                name,
                in_bytes(device.memory_bytes),
                in_bytes(device.room_bytes),
                f"{device.flops.get(plan.precision, 0) / 1e12:,.4g}",
                f"{in_bytes(device.memory_bandwidth_bytes_s)}/s",
                "measured" if device.calibrated else "by the catalogue",
            )
        )
        for name, device in plan.inventory.devices.items()
    ]
    speeds = (f"TFLOP/s in {plan.precision}", "memory bandwidth")
    columns = ("device", "memory", "for tensors", *speeds, "speed")
    return Table("Kinds of devices", columns, rows, numbers=columns[1:5])


def _devices(kinds: Sequence[RankKind]) -> Table:
    """Return the table of what each kind of rank does and needs."""
    rows = []
    for kind in kinds:
        parts = asdict(kind.memory)
        share = "" if not kind.limit_bytes else f"{kind.memory.total / kind.limit_bytes:.0%}"
        rows.append(
            Row(
                (
                    fold_numbers(kind.ranks),
                    fold_numbers(kind.nodes),
                    kind.device,
                    f"{kind.samples:,}",
                    f"{kind.micro_batches:,} x {kind.micro_batch_size:,}",
                    *(in_bytes(size) for size in parts.values()),
                    in_bytes(kind.memory.total),
                    share,
                )
            )
        )
    sizes = ("parameters", "gradients", "optimizer", "activations", "communication", "all")
    numbers = ("samples", "micro-batches", *sizes, "of its memory")
    columns = ("ranks", "nodes", "device", *numbers)
    caption = "What each kind of rank takes of a step, and needs of its memory"
    return Table(caption, columns, rows, numbers)


def _parts(plan: Plan) -> Table:
    """Return the table of a plan's TaskGraphs."""
    rows = []
    for part in plan.task_graphs:
        widths = sorted({len(replica) for replica in part.replicas})
        copies = f"{len(part.replicas):,}"
        if widths[-1] > 1:
            copies += f", each over {' or '.join(f'{x:,}' for x in widths)} ranks"
        kept = [f"{what} on {at}" for what, at in part.offload.items() if at != "none"]
        ranks = fold_numbers([rank for replica in part.replicas for rank in replica])
        held = f"{len(part.parameters):,}, {len(part.shards):,} of them split"
        cells = (part.name, part.primitive, fold_modules(part.modules), held, copies)
        rows.append(Row((*cells, ranks, ", ".join([f"ZeRO {part.zero}", *kept]))))
    columns = ("part", "primitive", "modules", "parameters", "copies", "ranks", "state")
    return Table("TaskGraphs, in the order of the forward", columns, rows)


def _time_charts(shown: ShownRun, kinds: Sequence[RankKind], prefix: str) -> Iterator[Chart]:
    """Yield the charts of a step's time: its parts, and its course on a rank of each kind."""
    plan = shown.plan
    predictions = {"predicted": plan.predicted}
    if plan.predicted_here is not None:
        predictions["predicted here"] = plan.predicted_here
    seconds = [row["step_time_s"] for row in shown.steps]
    yield _named(step_chart(predictions, median(seconds) if seconds else None), prefix)
    ranks = ranks_to_show(kinds)
    spans = {
        name: made
        for name, events in (
            ("predicted", shown.predicted_events),
            ("measured", shown.measured_events),
        )
        if (made := step_spans(events, ranks))
    }
    if spans:
        labels = {rank: f"{rank} {plan.ranks[rank].device}" for rank in ranks}
        yield _named(timeline_chart(spans, labels), prefix)


def _decisions(plan: Plan) -> Table:
    rows = [Row((x.key, x.chosen, x.rejected, x.reason)) for x in plan.decisions]
    columns = ("decision", "chosen", "instead of", "because")
    return Table("What was chosen automatically", columns, rows)


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else "not finite"
