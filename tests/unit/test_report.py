"""Pages of plans and runs: their numbers are the plan's, and no text on them is taken for HTML."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.unit.plan_requests import mixed

from whale_train.errors import ConfigError
from whale_train.launcher.report.charts import MOST_POINTS, thinned
from whale_train.launcher.report.plan_page import comparison_page, plan_page
from whale_train.launcher.report.rank_kinds import rank_kinds
from whale_train.launcher.report.shown_run import ShownRun, read_run
from whale_train.launcher.report.timelines import step_spans
from whale_train.launcher.report.write_page import write_page
from whale_train.strategies.plan.plan import Decision, Plan
from whale_train.strategies.resolver.planned_inventory import planned_inventory

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("plan_hybrid", "plan_dp")


@pytest.fixture(params=NAMES)
def content(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The JSON of a golden plan."""
    content: dict[str, Any] = json.loads((GOLDEN / f"{request.param}.json").read_text())
    return content


def plan_of(content: Mapping[str, Any]) -> Plan:
    return Plan.from_json(json.dumps(content))


def test_every_rank_is_of_one_kind(content: dict[str, Any]) -> None:
    kinds = rank_kinds(plan_of(content))
    assert sorted(rank for kind in kinds for rank in kind.ranks) == list(
        range(len(content["ranks"]))
    )
    for kind in kinds:
        for rank in kind.ranks:
            of_json = content["ranks"][rank]
            assert kind.memory.total == of_json["memory_bytes"]["total"]
            assert (kind.device, kind.micro_batches) == (
                of_json["device"],
                of_json["micro_batches"],
            )
    assert sum(kind.samples * len(kind.ranks) for kind in kinds) == content["global_batch"]


def test_the_chart_of_memory_has_the_numbers_of_the_plan(content: dict[str, Any]) -> None:
    page = plan_page(ShownRun(Path("plan.json"), "title", plan_of(content)))
    (chart,) = (chart for chart in page.charts if chart.name == "memory")
    bars = chart.spec["layer"][0]["data"]["values"]
    shown = Counter((bar["part"], round(bar["gb"] * 1e9)) for bar in bars)
    parts = [x["memory_bytes"] for x in content["ranks"]]
    expected = {(name, round(x[name])) for x in parts for name in x if name != "total"}
    assert set(shown) == expected


def test_the_limit_is_what_tensors_may_take_as_on_the_terminal() -> None:
    cluster = mixed()
    plan = plan_of(json.loads((GOLDEN / "plan_dp.json").read_text()))
    ranks = tuple(replace(x, device=cluster.devices[x.rank].name) for x in plan.ranks)
    kinds = rank_kinds(replace(plan, ranks=ranks, inventory=planned_inventory(cluster)))
    for kind in kinds:
        device = cluster.devices[kind.ranks[0]]
        assert kind.limit_bytes == device.room_bytes < device.memory_bytes


def event(name: str, start_us: float, took_us: float, rank: int = 0) -> dict[str, Any]:
    common = {"ph": "X", "pid": rank, "tid": 0, "cat": name.split()[0]}
    return {"name": name, "ts": start_us, "dur": took_us, **common}


def test_the_last_whole_step_of_a_timeline() -> None:
    steps = [
        (
            event("forward 0", at, 10, rank),
            event("backward 0", at + 10, 20, rank),
            event("update", at + 30, 5, rank),
        )
        for at in (100.0, 200.0, 300.0)
        for rank in (0, 1)
    ]
    events = [x for step in steps for x in step] + [event("forward 0", 400.0, 10)]  # cut off
    spans = step_spans(events, [1])
    shown = [(x.name, x.work, round(x.start_ms, 9), round(x.end_ms, 9)) for x in spans]
    assert shown == [
        ("forward 0", "forward", 0.0, 0.01),
        ("backward 0", "backward", 0.01, 0.03),
        ("update", "update", 0.03, 0.035),
    ]
    assert {x.rank for x in step_spans(events, [0, 1])} == {0, 1}
    assert step_spans([], [0]) == []


def test_a_thinned_curve_keeps_its_peaks_and_ends() -> None:
    points = [(float(i), float(i % 7)) for i in range(10_000)]
    points[4321] = (4321.0, 99.0)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS + 2
    assert {points[4321], points[-1]} <= set(kept)
    assert kept == sorted(kept)
    assert thinned(points[:10]) == points[:10]


class Elements(HTMLParser):
    """Reads ids, links to them, regions, and the text of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.ids, self.links = list[str](), list[str]()
        self.attributes: dict[str, list[dict[str, str | None]]] = {}
        self.scripts: dict[str | None, str] = {}
        self._in: str | None = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.attributes.setdefault(tag, []).append(given)
        if given.get("id"):
            self.ids.append(given["id"] or "")
        if (given.get("href") or "").startswith("#"):
            self.links.append((given["href"] or "")[1:])
        self._in = given.get("type") if tag == "script" else ""

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in:
            self.scripts[self._in] = self.scripts.get(self._in, "") + data


def written(shown: ShownRun, folder: Path, against: ShownRun | None = None) -> Elements:
    """What a browser reads of a page."""
    page = plan_page(shown) if against is None else comparison_page([shown, against])
    write_page(page, folder / "page.html")
    elements = Elements()
    elements.feed((folder / "page.html").read_text(encoding="utf-8"))
    return elements


def test_a_page_is_whole_and_safe(tmp_path: Path) -> None:
    plan = plan_of(json.loads((GOLDEN / "plan_hybrid.json").read_text()))
    odd = Decision("key", "</script><script>alert(1)", "<b>", "a & b", rejected_step_s=1.0)
    ranks = (replace(plan.ranks[0], device="</script>"), *plan.ranks[1:])
    shown = ShownRun(Path("a"), "<i>", replace(plan, decisions=(odd,), ranks=ranks))
    elements = written(shown, tmp_path, replace(shown, path=Path("b"), title="other"))
    assert len(elements.ids) == len(set(elements.ids))
    assert set(elements.links) <= set(elements.ids)
    assert len(elements.attributes["script"]) == 2
    assert not {"b", "i"} & set(elements.attributes)
    charts = json.loads(elements.scripts["application/json"])
    assert {f"chart-{name}" for name in charts} <= set(elements.ids)
    assert all(x["aria-label"] for x in elements.attributes["div"] if x.get("role"))
    assert not any(x.get("src") for x in elements.attributes["script"])


def test_a_page_of_ten_thousand_devices_is_small(tmp_path: Path) -> None:
    plan = plan_of(json.loads((GOLDEN / "plan_dp.json").read_text()))
    times = -(-10_240 // plan.world_size)
    count = plan.world_size * times
    ranks = tuple(
        replace(plan.ranks[i % plan.world_size], rank=i, node=i // 8) for i in range(count)
    )
    (part,) = plan.task_graphs
    shares = part.shares * times
    part = replace(part, replicas=tuple((i,) for i in range(count)), shares=shares)
    large = replace(plan, ranks=ranks, task_graphs=(part,), world_size=count)
    few = len(rank_kinds(plan))
    assert len(rank_kinds(large)) == few
    written(ShownRun(Path("plan.json"), "large", large), tmp_path)
    assert (tmp_path / "page.html").stat().st_size < 5e6


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    for path, said in (
        (tmp_path / "nothing", "is not there; name a run directory, or the plan.json that"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_run(path, "path")


def test_rejected_alternatives_have_their_cost(tmp_path: Path) -> None:
    plan = plan_of(json.loads((GOLDEN / "plan_dp.json").read_text()))
    step_s = plan.predicted.step_time_s
    rejected = (
        Decision("strategy.graph", "copies", "split", "slower", rejected_step_s=2 * step_s),
        Decision("strategy.graph", "copies", "pipeline", "estimated", rejected_floor_s=step_s),
        Decision("strategy.graph", "copies", "experts", "the model has none"),
    )
    plan = replace(plan, decisions=rejected)
    assert Plan.from_json(plan.to_json()).decisions == rejected
    page = plan_page(ShownRun(Path("plan.json"), "title", plan))
    (table,) = (x.tables[0] for x in page.sections if x.name == "decisions")
    costs = [row.cells[3] for row in table.rows]
    assert costs[0].endswith("(+100%)")
    assert costs[1].endswith(" or more, by estimate")
    assert costs[2] == ""
    (chart,) = (chart for chart in page.charts if chart.name == "alternatives")
    shown = {row["of"]: row["ms"] for row in chart.spec["data"]["values"]}
    ms = 1e3 * step_s
    assert shown == {"the plan": ms, "split": 2 * ms, "pipeline": ms}


def test_a_mixtures_experts_have_curves_and_their_last_loads() -> None:
    plan = plan_of(json.loads((GOLDEN / "plan_dp.json").read_text()))
    loads = [[1, 3], [2, 2]]
    steps = [
        {"step": step, "step_time_s": 0.1, "experts": {"imbalance": [1.5, 1.0], "load": loads}}
        for step in (1, 2)
    ]
    run = ShownRun(Path("run"), "a run", plan, steps=steps)
    charts = {chart.name: chart for chart in plan_page(run).charts}
    curves = charts["curve-imbalance"].spec["data"]["values"]
    assert [(x["of"], x["step"], x["value"]) for x in curves] == [
        *(("mixture 0", 1, 1.5), ("mixture 0", 2, 1.5)),
        *(("mixture 1", 1, 1.0), ("mixture 1", 2, 1.0)),
    ]
    rows = [x["rows"] for x in charts["loads"].spec["data"]["values"]]
    assert rows == [1, 3, 2, 2]
    several = {
        chart.name: chart for chart in comparison_page([run, replace(run, title="b")]).charts
    }
    assert "loads" not in several
    values = {x["value"] for x in several["curve-imbalance"].spec["data"]["values"]}
    assert values == {1.5}


def test_a_page_of_a_failed_run_says_what_failed() -> None:
    plan = plan_of(json.loads((GOLDEN / "plan_dp.json").read_text()))
    failure = {"rank": 1, "step": 31, "type": "RuntimeError", "message": "boom\nmore"}
    shown = ShownRun(Path("run"), "a run", plan, failure=failure)
    (table,) = plan_page(shown).sections[0].tables
    facts = dict(row.cells for row in table.rows)
    assert facts["failed"] == "rank 1, step 31: RuntimeError: boom"


def test_measured_numbers_are_those_of_the_summary() -> None:
    """Lines of `metrics.jsonl` have rank 0's memory, and a first step that sets up libraries."""
    plan = plan_of(json.loads((GOLDEN / "plan_dp.json").read_text()))
    steps = [
        {"step": step, "step_time_s": seconds, "loss": 1.0, "peak_memory_bytes": 10**9}
        for step, seconds in ((1, 9.0), (2, 1.0), (3, 3.0))
    ]
    running = ShownRun(Path("run"), "a run", plan, steps=steps)
    summary = {"step_time_s_median": 2.5, "peak_memory_bytes": [10**9, 3 * 10**9]}
    for shown, median_s, memory in (
        (running, "2.00 s", ("memory of rank 0, measured", "1.00 GB")),
        (
            replace(running, summary=summary),
            "2.50 s",
            ("memory of the fullest rank, measured", "3.00 GB"),
        ),
    ):
        facts = dict(row.cells for row in plan_page(shown).sections[0].tables[0].rows)
        assert facts["step, measured (median)"] == median_s
        assert facts[memory[0]] == memory[1]
