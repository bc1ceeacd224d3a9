"""Put plans, and the runs of them, on a page: who holds what, how full and how fast, and why."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from whale_train.launcher.report.charts import (
    MOST_KINDS,
    Chart,
    alternatives_chart,
    kind_label,
    memory_chart,
    step_chart,
    timeline_chart,
)
from whale_train.launcher.report.page_parts import Page, Row, Section, Table
from whale_train.launcher.report.plan_tables import (
    attempts_table,
    decisions_table,
    devices_table,
    kinds_table,
    nodes_table,
    parts_table,
    plan_facts,
    step_seconds,
)
from whale_train.launcher.report.rank_kinds import RankKind, fullness, rank_kinds
from whale_train.launcher.report.run_curves import curves_section
from whale_train.launcher.report.shown_run import ShownRun
from whale_train.launcher.report.timelines import ranks_to_show, step_spans


def plan_page(shown: ShownRun) -> Page:
    """Return the page of a plan, or of a run and its plan."""
    facts = [Row(pair) for pair in plan_facts(shown).items()]
    caption = "The plan and the run" if shown.is_run else "The plan"
    tables = [Table(caption, ("fact", "value"), facts)]
    if shown.attempts:
        tables.append(attempts_table(shown.attempts))
    sections = [Section("summary", "In short", tables=tables)]
    if shown.is_run:
        sections.append(curves_section([shown]))
    return Page(shown.title, str(shown.path), [*sections, *_plan_sections(shown, "", "")])


def comparison_page(
    runs: Sequence[ShownRun], refused: Mapping[str, Sequence[str]] | None = None
) -> Page:
    """Return the page of several plans or runs side by side.

    runs: the plans and runs, in the order of their columns.
    refused: by strategy, why it has no plan.
    """
    shared, runs = _named_apart(runs)
    columns = [plan_facts(run) for run in runs]
    rows = []
    for name in dict.fromkeys(name for facts in columns for name in facts):
        values = [facts.get(name, "") for facts in columns]
        rows.append(Row((name, *values), differs=len(set(values)) > 1))
    titles = [run.title for run in runs]
    tables = [Table("Side by side; rows that differ are marked", ("fact", *titles), rows)]
    if refused:
        lines = [Row((name, line)) for name, faults in refused.items() for line in faults]
        tables.append(Table("Strategies without a plan", ("strategy", "because"), lines))
    predictions = {run.title: run.plan.predicted for run in runs}
    fullest = {run.title: max(rank_kinds(run.plan), key=fullness) for run in runs}
    charts = [
        step_chart(predictions, None),
        memory_chart(fullest, "Memory of the fullest device"),
    ]
    sections = [Section("summary", "In short", charts=charts, tables=tables)]
    if any(run.is_run for run in runs):
        sections.append(curves_section(runs))
    for number, run in enumerate(runs):
        of_plan = list(_plan_sections(run, f": {run.title}", f"of-{number}-"))
        sections += [replace(x, link=run.title if x is of_plan[0] else "") for x in of_plan]
    title = " against ".join(titles) if len(runs) == 2 else f"{shared}: {', '.join(titles)}"
    paths = dict.fromkeys(str(run.path) for run in runs)
    return Page(title, " and ".join(paths), sections)


def _named_apart(runs: Sequence[ShownRun]) -> tuple[str, list[ShownRun]]:
    """Return the words that all titles share, and the plans and runs with titles of the other
    words, or of their paths where two would be equal."""
    words = [run.title.split() for run in runs]
    shared = [word for word in words[0] if all(word in other for other in words)] if words else []
    own = [" ".join(word for word in of_run if word not in shared) for of_run in words]
    if not all(own) or len(set(own)) < len(own):
        own = [str(run.path) for run in runs]
    named = [replace(run, title=title) for run, title in zip(runs, own, strict=True)]
    return " ".join(shared), named


def _plan_sections(shown: ShownRun, where: str, prefix: str) -> Iterator[Section]:
    """Yield the sections about one plan.

    where: the end of their headings.
    prefix: the beginning of their ids.
    """
    plan, kinds = shown.plan, rank_kinds(shown.plan)
    if plan.inventory is not None:
        tables = [nodes_table(plan), kinds_table(plan)]
        yield Section(f"{prefix}cluster", f"The cluster{where}", tables=tables)
    by_label = {kind_label(kind): kind for kind in kinds[:MOST_KINDS]}
    memory = _named(memory_chart(by_label, "Memory of each device"), prefix)
    more = f"The chart has the first {MOST_KINDS} kinds of {len(kinds):,}."
    lines = [more] if len(kinds) > MOST_KINDS else []
    table = devices_table(kinds)
    yield Section(f"{prefix}devices", f"Who does what{where}", lines, [memory], [table])
    yield Section(f"{prefix}parts", f"Parts of the model{where}", tables=[parts_table(plan)])
    yield Section(f"{prefix}time", f"Time{where}", charts=list(_time_charts(shown, kinds, prefix)))
    if plan.decisions:
        rejected = {
            x.rejected or x.key: seconds
            for x in plan.decisions
            if (seconds := x.rejected_step_s or x.rejected_floor_s)
        }
        charts = []
        if rejected:
            chart = alternatives_chart(plan.predicted.step_time_s, rejected)
            charts.append(_named(chart, prefix))
        tables = [decisions_table(plan)]
        yield Section(f"{prefix}decisions", f"Decisions{where}", charts=charts, tables=tables)


def _named(chart: Chart, prefix: str) -> Chart:
    return replace(chart, name=f"{prefix}{chart.name}")


def _time_charts(shown: ShownRun, kinds: Sequence[RankKind], prefix: str) -> Iterator[Chart]:
    """Yield the charts of a step's time: its parts, and its course on a rank of each kind."""
    plan = shown.plan
    predictions = {"predicted": plan.predicted}
    if plan.predicted_here is not None:
        predictions["predicted here"] = plan.predicted_here
    measured_s = step_seconds(shown) if shown.is_run else None
    yield _named(step_chart(predictions, measured_s), prefix)
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
