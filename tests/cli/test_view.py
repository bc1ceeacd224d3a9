"""`mode=view`: one page of a plan or a run, as a browser opens it."""

import json
import re
import shutil
import subprocess
from pathlib import Path

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
    return folder


def viewed(folder: Path, name: str, *overrides: str) -> Path:
    answer = whale_train(["mode=view", *overrides, f"hydra.run.dir={name}"], folder)
    assert answer.status == 0, answer
    page = folder / name / "view.html"
    assert answer.stdout == f"the page: {page}\n"
    return page


def test_a_page_of_a_run_has_its_curves_and_both_timelines(folder: Path) -> None:
    text = viewed(folder, "of_run", "path=run").read_text(encoding="utf-8")
    (charts,) = re.findall('<script type="application/json" id="charts">(.*)</script>', text)
    specs = json.loads(charts)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    curve = [(x["step"], x["value"]) for x in specs["curve-loss"]["data"]["values"]]
    assert curve == [(row["step"], row["loss"]) for row in rows]
    evaluated = [row for row in rows if "evaluation_loss" in row]
    assert len(specs["curve-evaluation_loss"]["data"]["values"]) == len(evaluated) == 2
    spans = specs["timeline"]["data"]["values"]
    assert {x["from"] for x in spans} == {"predicted", "measured"}
    assert {"forward", "backward", "update"} <= {x["work"] for x in spans}


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("asked", [("path=run",), ("path=plan/plan.json", "against=run")])
def test_a_browser_draws_every_chart_without_an_error(folder: Path, asked: tuple[str, ...]) -> None:
    assert CHROMIUM is not None
    page = viewed(folder, f"drawn_{len(asked)}", *asked)
    profile = folder / f"profile_{len(asked)}"
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
