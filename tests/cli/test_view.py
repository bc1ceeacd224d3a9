"""`mode=view`: one page of a plan or a run, as a browser opens it."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.cli.command import whale_train

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run`, a run of a pipeline with its timeline, and `plan`, another plan."""
    folder = tmp_path_factory.mktemp("view")
    stages = ("strategy=pipeline", "strategy.graph.pipeline.stages=2", "train.trace=true")
    run = ("experiment=smoke", "train.steps=4", "train.evaluate_every=2", *stages)
    held_back = "data.evaluation_fraction=0.002"
    answer = whale_train([*run, held_back, "hydra.run.dir=run"], folder)
    assert answer.status == 0, answer
    plan = ("mode=plan", "strategy=hybrid_split_dp", "hardware=v100_p100_mix")
    answer = whale_train([*plan, "hydra.run.dir=plan"], folder)
    assert answer.status == 0, answer
    compared = ("mode=plan", "compare=[dp,zero3,3d]", "hardware=v100_p100_mix")
    answer = whale_train([*compared, "optimizer=lamb", "hydra.run.dir=compared"], folder)
    assert answer.status == 0, answer
    return folder


def charts_of(page: Path) -> dict[str, Any]:
    """Return the descriptions of a page's charts by their names."""
    text = page.read_text(encoding="utf-8")
    (charts,) = re.findall('<script type="application/json" id="charts">(.*)</script>', text)
    charts_by_name: dict[str, Any] = json.loads(charts)
    return charts_by_name


def viewed(folder: Path, name: str, *overrides: str) -> Path:
    answer = whale_train(["mode=view", *overrides, f"hydra.run.dir={name}"], folder)
    assert answer.status == 0, answer
    page = folder / name / "view.html"
    assert answer.stdout == f"the page: {page}\n"
    return page


def test_a_page_of_a_run_has_its_curves_and_both_timelines(folder: Path) -> None:
    specs = charts_of(viewed(folder, "of_run", "path=run"))
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    curve = [(x["step"], x["value"]) for x in specs["curve-loss"]["data"]["values"]]
    assert curve == [(row["step"], row["loss"]) for row in rows]
    evaluated = [row for row in rows if "evaluation_loss" in row]
    assert len(specs["curve-evaluation_loss"]["data"]["values"]) == len(evaluated) == 2
    spans = specs["timeline"]["data"]["values"]
    assert {x["from"] for x in spans} == {"predicted", "measured"}
    assert {"forward", "backward", "update"} <= {x["work"] for x in spans}


def test_a_run_and_a_plan_leave_their_page(folder: Path) -> None:
    assert charts_of(folder / "run" / "report.html") == charts_of(
        viewed(folder, "again", "path=run")
    )
    charts = charts_of(folder / "plan" / "plan.html")
    plan = json.loads((folder / "plan" / "plan.json").read_text())
    parts = charts["step"]["data"]["values"]
    assert sum(row["ms"] for row in parts) == pytest.approx(
        1e3 * plan["predicted"]["step_time_s"], rel=0.02
    )
    spans = charts["timeline"]["data"]["values"]
    assert {row["from"] for row in spans} == {"predicted"}
    assert {"0 v100_sxm2_32gb", "8 p100_pcie_16gb"} <= {row["rank"] for row in spans}
    even = charts["alternatives"]["data"]["values"][1]
    assert even["of"].startswith("even ")
    assert even["ms"] > 1e3 * plan["predicted"]["step_time_s"]


def test_a_comparison_is_one_page(folder: Path) -> None:
    page = folder / "compared" / "compare.html"
    charts = charts_of(page)
    steps = charts["step"]["data"]["values"]
    assert {row["of"] for row in steps} == {"strategy=dp", "strategy=3d"}
    for name in ("dp", "3d"):
        plan = json.loads((folder / f"compared/plans/{name}.json").read_text())
        (bar,) = (x for x in steps if (x["of"], x["part"]) == (f"strategy={name}", "compute"))
        assert bar["ms"] == pytest.approx(1e3 * plan["predicted"]["compute_s"])
    assert "optimizer=lamb needs the norm of each" in page.read_text()


def test_a_run_leaves_no_page_where_none_is_wanted(folder: Path) -> None:
    run = ("experiment=smoke", "train.steps=1", "train.report=false", "hydra.run.dir=without")
    answer = whale_train(run, folder)
    assert (answer.status, answer.stderr) == (0, "")
    assert not (folder / "without" / "report.html").exists()
    assert "report" not in answer.stdout


def test_a_page_that_cannot_be_written_does_not_fail_the_run(folder: Path) -> None:
    (folder / "taken" / "report.html").mkdir(parents=True)
    answer = whale_train(["experiment=smoke", "train.steps=1", "hydra.run.dir=taken"], folder)
    assert (answer.status, answer.stderr) == (0, "")
    assert "warning: no report.html: " in answer.stdout


PAGES = {
    "a run": ("path=run",),
    "two": ("path=run/plan.json", "against=run"),
    "a comparison": (),
}


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("name", PAGES)
def test_a_browser_draws_every_chart_without_an_error(folder: Path, name: str) -> None:
    assert CHROMIUM is not None
    page = folder / "compared" / "compare.html"
    if PAGES[name]:
        page = viewed(folder, f"drawn_{len(PAGES[name])}", *PAGES[name])
    profile = folder / f"profile_{len(PAGES[name])}"
    quiet = ("no-first-run", "disable-background-networking", "disable-component-update")
    flags = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "disable-sync", *quiet)
    shown = ("dump-dom", "enable-logging=stderr", "virtual-time-budget=5000")
    command = [CHROMIUM, *(f"--{x}" for x in (*flags, *shown, f"user-data-dir={profile}"))]
    done = subprocess.run(
        [*command, page.as_uri()], capture_output=True, text=True, timeout=100, check=True
    )
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert said == []
    num_charts = done.stdout.count('id="chart-')
    assert num_charts >= 3
    assert done.stdout.count('class="marks"') == num_charts


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), "path must be given to mode=view; name a run directory or a plan.json, as path=runs"),
        (("path=nope",), "path=nope is not there; name a run directory, or the plan.json that"),
        (("path=plan", "against=logs"), "against=logs is not there; name a run directory, or"),
        (("path=plan", "seed=1"), "seed=1 has no effect on mode=view; leave it out: the plan has"),
    ],
)
def test_refused(folder: Path, overrides: tuple[str, ...], expected: str) -> None:
    answer = whale_train(["mode=view", *overrides], folder)
    assert answer.status == 2
    assert " ".join(answer.stderr.split()).startswith(f"error: {expected}")


def test_against_is_of_this_mode(folder: Path) -> None:
    answer = whale_train(["mode=plan", "against=run"], folder)
    assert (answer.status, answer.stderr) == (
        2,
        "error: against=run has no effect on mode=plan; use mode=view, or leave it out\n",
    )
