"""`mode=plan explain=STRATEGY`: the answer on the terminal, in its file and on its page."""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from tests.cli.command import whale_train

MIX = ("mode=plan", "hardware=v100_p100_mix", "train.global_batch=64")


def test_why_not_this_strategy(tmp_path: Path) -> None:
    (tmp_path / "three.yaml").write_text("graph: {replicate: {degree: 3, zero: 1}}\n")
    answer = whale_train([*MIX, "explain=three.yaml", "hydra.run.dir=why"], tmp_path)
    assert (answer.status, answer.stderr) == (0, "")
    lines = answer.stdout.splitlines()
    assert lines[0] == "why not strategy=three.yaml?  model=gpt hardware=v100_p100_mix"
    assert lines[1].startswith(
        "  it has no plan: strategy.graph.replicate.degree=3 does not divide"
    )
    said = " ".join(answer.stdout.split())
    assert "the nearest plan: replicate: no degree: " in said
    written = json.loads((tmp_path / "why/explanation.json").read_text())
    assert written["asked"]["step_s"] is None
    assert written["nearest"]["written"] == {"graph": {"replicate": {"zero": 1}}}
    file = yaml.safe_load((tmp_path / "why/strategy.yaml").read_text())
    assert file == written["nearest"]["written"]
    page = (tmp_path / "why/explain.html").read_text()
    assert "Why not strategy=three.yaml?" in page
    assert "Changes that make no plan" in page
    # The command that is shown makes the plan that is said.
    (command,) = (x for x in lines if x.startswith("the nearest plan: whale-train "))
    command = shlex.split(command.partition("whale-train ")[2])
    again = whale_train([*command, "hydra.run.dir=again"], tmp_path)
    assert (again.status, again.stderr) == (0, "")
    plan = json.loads((tmp_path / "again/plan.json").read_text())
    assert plan["predicted"]["step_time_s"] == written["nearest"]["step_s"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("explain=dqp",), "explain=dqp is not a strategy; did you mean dp"),
        (("explain=no.yaml",), "explain=no.yaml cannot be read ("),
        (("explain=open.yaml",), "explain=open.yaml is not YAML (line 2, column 1: expected"),
        (("explain=none.yaml",), "strategy.graph is missing; give a node or a list"),
        (("explain=count.yaml",), "strategy.graph.pipeline.micro_batches=x is not a whole"),
        (("explain=auto",), "explain=auto searches for the fastest strategy, which explain"),
        (("explain=dp", "compare=[dp]"), "explain=dp explains one strategy, and compare shows"),
        (
            ("explain=dp", "strategy.devices=4"),
            "strategy.devices=4 has no effect beside explain, which names strategies of its own",
        ),
        (("compare=[dp]", "strategy=zero1"), "strategy=zero1 has no effect beside compare, which"),
        (("explain=dp", "mode=train"), "explain=dp has no effect on mode=train; use mode=plan, or"),
    ],
)
def test_refused(tmp_path: Path, overrides: tuple[str, ...], expected: str) -> None:
    (tmp_path / "open.yaml").write_text("graph: {replicate: {}\n")
    (tmp_path / "none.yaml").write_text("balance: even\n")
    (tmp_path / "count.yaml").write_text("graph: {pipeline: {micro_batches: x, stages: 2}}\n")
    answer = whale_train([*MIX, *overrides], tmp_path)
    assert answer.status == 2
    assert f"error: {expected}" in " ".join(answer.stderr.split())
