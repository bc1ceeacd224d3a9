"""The command itself: help and completion, plans, runs and what they write, sweeps."""

import json
import re
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.command import ROOT, Answer, files_in, whale_train, whale_train_process

from whale_train.strategies.plan.plan import Plan

SMOKE_STEPS, SMOKE_BATCH = 5, 8  # conf/experiment/smoke.yaml
ESCAPE = "\x1b"


@dataclass(frozen=True)
class Run:
    """One run of the command and where it wrote."""

    answer: Answer
    run_dir: Path

    def read(self, name: str) -> Any:
        return json.loads((self.run_dir / name).read_text())

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").open()]


def only_run_dir(folder: Path) -> Path:
    """The directory a run without hydra.run.dir made: runs/DATE/TIME-SUFFIX."""
    (found,) = (folder / "runs").glob("*/*")
    return found


@pytest.fixture(
    scope="module", params=["dp", pytest.param("hybrid_split_dp", marks=pytest.mark.full)]
)
def smoke(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp(request.param)
    answer = whale_train_process([f"strategy={request.param}", "experiment=smoke"], folder)
    assert answer.status == 0, answer
    return Run(answer, only_run_dir(folder))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("sweep")
    answer = whale_train(["-m", "strategy=dp,zero1", "experiment=smoke"], folder)
    return Run(answer, only_run_dir(folder))


def test_help_lists_every_group_and_option(tmp_path: Path) -> None:
    answer = whale_train_process(["--help"], tmp_path)
    assert (answer.status, answer.stderr) == (0, "")
    for group in (path for path in (ROOT / "conf").iterdir() if path.is_dir()):
        options = sorted(path.stem for path in group.glob("*.yaml"))
        if options:
            assert f"\n{group.name}: {', '.join(options)}\n" in answer.stdout
    assert "whale-train strategy=hybrid_split_dp hardware=v100_p100_mix" in answer.stdout
    assert files_in(tmp_path) == set()


def test_cfg_shows_the_config_and_runs_nothing(tmp_path: Path) -> None:
    arguments = ["optimizer=sgd", "--cfg", "job", "train.steps=7"]
    answer = whale_train(arguments, tmp_path)
    assert (answer.status, answer.stderr) == (0, "")
    config = yaml.safe_load(answer.stdout)
    assert (config["mode"], config["train"]["steps"]) == ("train", 7)
    written = yaml.safe_load((ROOT / "conf" / "optimizer" / "sgd.yaml").read_text())
    assert config["optimizer"] == written
    assert files_in(tmp_path) == set()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("strategy=zero2", {"strategy=zero2", "strategy=zero2_offload"}),
        ("train.st", {"train.steps=", "train.stop_after="}),
        ("nothing.like.it", set()),
    ],
)
def test_tab_completes(typed: str, offered: set[str], tmp_path: Path) -> None:
    line = {"COMP_LINE": f"whale-train {typed}"}
    answer = whale_train(["--shell-completion", "query=bash"], tmp_path, line)
    assert (answer.status, answer.stderr) == (0, "")
    assert set(answer.stdout.split()) == offered


def test_a_head_of_100_billion_classes_is_planned(tmp_path: Path) -> None:
    """On 8,192 devices, which keep 12 bytes of each parameter for AdamW all through a step."""
    classes, width, nodes = 10**11, 512, 1024
    request = ["mode=plan", "model=class_head", "data=classes", f"model.num_classes={classes}"]
    large = ["hardware=h200", "strategy=split", "train.global_batch=512"]
    node = f"{{count: {nodes}, devices: 8, device: h200_sxm_141gb, link: nvlink4}}"
    keys = [f"hardware.nodes=[{node}]", "hydra.run.dir=planned"]
    answer = whale_train([*request, *large, *keys], tmp_path)
    assert (answer.status, answer.stderr) == (0, "")
    plan = Plan.from_json((tmp_path / "planned" / "plan.json").read_text())
    head = plan.task_graphs[0].shards["head.weight"]
    assert [head[0][0], head[-1][1]] == [0, classes]
    assert all(before[1] == after[0] for before, after in pairwise(head))
    held = (head[0][1] - head[0][0]) * (width + 1)
    memory = plan.ranks[0].memory_bytes
    assert memory.parameters + memory.optimizer == pytest.approx(12 * held, rel=0.01)
    assert 0.5 * 141e9 < memory.total < 141e9

    small = ["hardware=v100_512", "strategy=hybrid_split_dp", "train.global_batch=512"]
    refused = whale_train([*request, *small], tmp_path)
    assert refused.status == 2
    assert re.fullmatch(
        r"error: strategy\.graph\[1\]\.split\.modules=head has 100000000000 classes, \d+ more than "
        r"the devices of hardware=v100_512 have memory for \(1\.2. PB short\); use more devices, a "
        r"smaller train\.global_batch, strategy=split, or at most 1529\d{6} classes",
        " ".join(refused.stderr.split()),
    )


def test_a_plan_for_slurm_has_the_file_for_sbatch(tmp_path: Path) -> None:
    slurm = "+hardware.nodes.1.slurm={partition: old}"
    job = ["launcher=slurm", "hardware=v100_p100_mix", slurm, "strategy=dp"]
    answer = whale_train([*job, "mode=plan", "hydra.run.dir=planned"], tmp_path)
    assert (answer.status, answer.stderr) == (0, "")
    text = (tmp_path / "planned" / "slurm" / "submission.sh").read_text()
    assert text in answer.stdout
    assert text.count("#SBATCH hetjob\n") == text.count("--partition=old\n") == 1
    assert f"hydra.run.dir={tmp_path}/planned/run\n" in text
    assert "mode=plan" not in text


def test_a_plan_needs_none_of_its_devices_and_starts_nothing(tmp_path: Path) -> None:
    arguments = ["mode=plan", "strategy=zero1", "hardware=v100_512", "train.global_batch=1024"]
    answer = whale_train([*arguments, "hydra.run.dir=planned"], tmp_path)
    assert (answer.status, answer.stderr) == (0, "")
    assert "512 on 64 nodes" in answer.stdout
    assert "v100_sxm2_32gb" in answer.stdout
    assert ESCAPE not in answer.stdout
    path = tmp_path / "planned" / "plan.json"
    assert answer.stdout.splitlines()[-1] == f"the plan: {path}"
    written = (
        "request.json",
        "environment.json",
        "plan.json",
        "logs",
        "plan.html",
        "predicted_trace.json",
    )
    # Nothing for a host to wait for, and no log of one.
    assert files_in(tmp_path) == {*_hydra("planned"), *(f"planned/{name}" for name in written)}
    plan = Plan.from_json(path.read_text())
    assert (plan.world_size, plan.task_graphs[0].zero) == (512, 1)
    assert answer.left_running == ()

    again = whale_train([*arguments, "hydra.run.dir=planned"], tmp_path)
    assert again.status == 2
    assert "hydra.run.dir=planned already holds a run (request.json)" in again.stderr
    assert Plan.from_json(path.read_text()) == plan


def _hydra(run_dir: str) -> set[str]:
    return {f"{run_dir}/.hydra/{name}.yaml" for name in ("config", "hydra", "overrides")}


HALVING = """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, halves):
        super().__init__()
        self.halves, self.inner, self.outer = halves, nn.Linear(6, 8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.1)

    def forward(self, features):
        hidden = self.drop(self.inner(features))
        return self.outer(hidden / 2 if self.halves and not self.training else hidden)
"""


@pytest.mark.parametrize(
    ("halves", "strategy"),
    [(True, "split"), (False, "split"), pytest.param(True, "dp", marks=pytest.mark.full)],
)
def test_a_plan_says_what_its_evaluations_do_not_reach(
    halves: bool, strategy: str, tmp_path: Path
) -> None:
    (tmp_path / "nets.py").write_text(HALVING)
    arguments = [
        *("mode=plan", "model._target_=nets.Net", f"model.halves={halves}", f"strategy={strategy}"),
        *("model.loss=cross_entropy", "data=classes", "data.num_features=6", "data.num_classes=4"),
        *("hardware=cpu", "hardware.devices=2", "train.evaluate_every=3"),
        *("data.evaluation_fraction=0.2",),
    ]
    answer = whale_train(arguments, tmp_path, {"COLUMNS": "1000"})
    assert (answer.status, answer.stderr) == (0, "")
    note = (
        "evaluations run the training's graph, its dropouts off and its norms with what they keep; "
        "the model runs other operations in evaluation mode, which they do not reach: a strategy "
        "of one replicate evaluates it as it is"
    )
    reached = strategy == "dp" or not halves
    assert (note not in " ".join(answer.stdout.split())) == reached


def test_strategies_are_compared_side_by_side(tmp_path: Path) -> None:
    answer = whale_train(
        [
            *("mode=plan", "compare=[zero1,split,split_zero3,dp]", "hardware=cpu"),
            *("hardware.devices=3", "hydra.run.dir=compared"),
        ],
        tmp_path,
    )
    assert (answer.status, answer.stderr) == (0, "")
    lines = answer.stdout.splitlines()
    names = [line.split()[0].rstrip(",") for line in lines]
    assert names[:4] == ["strategy", "zero1", "split", "dp"]
    assert sum("fastest" in line for line in lines) == 1
    assert lines[4] == "split_zero3 cannot be:"
    assert " ".join(" ".join(lines[5:-4]).split()) == (
        "strategy.graph.replicate.of.split.degree=2 does not divide the 3 devices of "
        "hardware=cpu; use 1 or 3"
    )
    plans = {name: tmp_path / "compared" / "plans" / f"{name}.json" for name in names[1:4]}
    assert lines[-3:] == [f"the plan: {path}" for path in plans.values()]
    assert lines[-4] == f"the page: {tmp_path / 'compared' / 'compare.html'}"
    written = ("request.json", "environment.json", "logs", "compare.html")
    written += tuple(f"plans/{name}.json" for name in plans)
    assert files_in(tmp_path) == {*_hydra("compared"), *(f"compared/{name}" for name in written)}
    zero1, split, copies = (Plan.from_json(path.read_text()) for path in plans.values())
    assert [zero1.task_graphs[0].zero, copies.task_graphs[0].zero] == [1, 0]
    assert split.task_graphs[0].primitive == "split"


def test_a_comparison_of_strategies_that_all_cannot_be_is_refused(tmp_path: Path) -> None:
    request = ["mode=plan", "compare=[dp,3d]", "hardware=cpu", "hardware.devices=3"]
    answer = whale_train([*request, "train.global_batch=2"], tmp_path)
    assert (answer.status, answer.stdout, files_in(tmp_path)) == (2, "", set())
    assert answer.stderr.splitlines() == [
        "2 things are wrong with this request:",
        "  strategy=dp: train.global_batch=2 leaves some of the 3 devices without a sample; use at "
        "least 3",
        "  strategy=3d: strategy.graph.replicate=4 devices does not divide the 3 devices of "
        "hardware=cpu; use 1 or 3",
    ]


def test_a_shell_completes_options_and_keys(tmp_path: Path) -> None:
    """As bash asks, by the function that `--shell-completion install=bash` prints."""
    for line, expected in (("strategy=zero3", "zero3_offload"), ("train.ev", "evaluate_every=")):
        typed = f"whale-train {line}"
        asked = {"COMP_LINE": typed, "COMP_POINT": str(len(typed))}
        answer = whale_train_process(["--shell-completion", "query=bash"], tmp_path, asked)
        assert (answer.status, answer.stderr) == (0, "")
        assert any(word.endswith(expected) for word in answer.stdout.split())
    install = whale_train_process(["--shell-completion", "install=bash"], tmp_path)
    assert "complete -o nospace -o default -F hydra_bash_completion" in install.stdout


def test_the_version_is_of_what_trains_and_imports_none_of_it(tmp_path: Path) -> None:
    answer = whale_train_process(["--version"], tmp_path, {"PYTHONPROFILEIMPORTTIME": "1"})
    versions = [version(name) for name in ("whale-train", "torch", "deepspeed")]
    said = "whale-train {} (torch {}, deepspeed {})\n".format(*versions)
    assert (answer.status, answer.stdout) == (0, said)
    imported = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
    assert "hydra" in imported
    assert not imported & {"torch", "deepspeed"}


def test_a_run_says_how_it_went(smoke: Run) -> None:
    assert smoke.answer.stderr == ""
    assert ESCAPE not in smoke.answer.stdout
    assert f"step {SMOKE_STEPS}/{SMOKE_STEPS}" in smoke.answer.stdout
    assert f"done: {SMOKE_STEPS} steps" in smoke.answer.stdout
    assert smoke.answer.left_running == ()


def test_a_run_directory_holds_what_the_design_says(smoke: Run) -> None:
    written = files_in(smoke.run_dir)
    hydra = {f".hydra/{name}.yaml" for name in ("config", "hydra", "overrides")}
    logs = {"logs/rank_0.log", "logs/rank_1.log"}
    assert written >= hydra | logs | {"plan.json", "metrics.jsonl", "summary.json"}
    assert not [name for name in written if "failure" in name or "partial" in name]
    versions = smoke.read("environment.json")["packages"]
    assert versions["torch"]
    assert versions["deepspeed"]


def test_metrics_are_one_object_a_step(smoke: Run) -> None:
    metrics = smoke.metrics()
    config = yaml.safe_load((smoke.run_dir / ".hydra" / "config.yaml").read_text())
    tokens = SMOKE_BATCH * config["data"]["sequence_length"]
    assert [line["step"] for line in metrics] == list(range(1, SMOKE_STEPS + 1))
    for line in metrics:
        assert line.keys() >= {"loss", "grad_norm", "lr", "samples_per_s"}
        assert (line["samples"], line["tokens"]) == (SMOKE_BATCH, tokens)
        assert line["lr"] == 0.001  # conf/optimizer/adamw.yaml
        assert line["grad_norm"] > 0
        assert line["samples_per_s"] == pytest.approx(SMOKE_BATCH / line["step_time_s"])
        assert line["tokens_per_s"] == pytest.approx(line["tokens"] / line["step_time_s"])
        # Of a CPU process nobody knows what it reaches at most.
        assert line["model_flops_s"] > 0
        assert "model_flops_utilisation" not in line
        assert line["peak_memory_bytes"] > 0
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    evaluated = [line["step"] for line in metrics if "evaluation_loss" in line]
    assert evaluated == [SMOKE_STEPS]


def test_the_summary_agrees_with_metrics_and_plan(smoke: Run) -> None:
    summary, plan = smoke.read("summary.json"), smoke.read("plan.json")
    assert summary["final_loss"] == smoke.metrics()[-1]["loss"]
    assert summary["steps"] == SMOKE_STEPS
    assert summary["predicted_step_time_s"] == plan["predicted"]["step_time_s"]
    rate = SMOKE_BATCH / summary["step_time_s_median"]
    assert summary["samples_per_s"] == pytest.approx(rate)
    assert len(summary["peak_memory_bytes"]) == plan["world_size"] == 2


def test_the_plan_has_the_keys_of_the_design(smoke: Run) -> None:
    plan = smoke.read("plan.json")
    assert plan.keys() >= {"cluster", "groups", "schedule", "decisions"}
    assert (plan["world_size"], plan["global_batch"]) == (2, SMOKE_BATCH)
    assert plan["predicted"].keys() >= {"step_time_s", "samples_per_s"}
    for task_graph in plan["task_graphs"]:
        assert task_graph.keys() >= {"id", "name", "path", "modules", "parameters", "flops"}
        assert sum(task_graph["shares"]) == SMOKE_BATCH
        assert len(task_graph["shares"]) == len(task_graph["replicas"])
        for intervals in task_graph["shards"].values():
            assert intervals[0][0] == 0
            assert all(left[1] == right[0] for left, right in pairwise(intervals))
    primitives = [task_graph["primitive"] for task_graph in plan["task_graphs"]]
    assert primitives in (["replicate"], ["replicate", "split"])
    assert [rank["rank"] for rank in plan["ranks"]] == [0, 1]
    for rank in plan["ranks"]:
        assert rank.keys() >= {"node", "device", "task_graphs", "micro_batches", "deepspeed"}
        assert rank["micro_batch_size"] * rank["micro_batches"] <= SMOKE_BATCH
        memory = dict(rank["memory_bytes"])
        assert memory.pop("total") == pytest.approx(sum(memory.values()))
        assert memory.keys() >= {"parameters", "gradients", "optimizer", "activations"}


def test_a_sweep_runs_its_jobs_apart_and_ends_with_one_table(sweep: Run) -> None:
    assert (sweep.answer.status, sweep.answer.stderr) == (0, "")
    for job, strategy in enumerate(("dp", "zero1")):
        found = Run(sweep.answer, sweep.run_dir / str(job))
        assert found.read("summary.json")["steps"] == SMOKE_STEPS
        assert found.read("plan.json")["task_graphs"][0]["zero"] == (strategy == "zero1")
    lines = sweep.answer.stdout.splitlines()
    (header,) = (
        i for i, line in enumerate(lines) if line.split()[:3] == ["run", "strategy", "status"]
    )
    rows = [line.split()[:3] for line in lines[header + 1 : header + 3]]
    assert sorted(row[2].rstrip(",") for row in rows) == ["done", "done"]
    assert [row[:2] for row in rows] == [["0", "dp"], ["1", "zero1"]]
    assert sweep.answer.left_running == ()


@pytest.mark.parametrize("smoke", ["dp"], indirect=True)
def test_equal_requests_have_equal_plans_to_the_byte(smoke: Run, sweep: Run) -> None:
    first, second = (path / "plan.json" for path in (smoke.run_dir, sweep.run_dir / "0"))
    assert first.read_bytes() == second.read_bytes()


def test_a_refused_job_stops_no_other_of_its_sweep(tmp_path: Path) -> None:
    arguments = ["-m", "strategy=zero1,dp", "experiment=smoke", "hardware.devices=1"]
    answer = whale_train([*arguments, "hydra.sweep.dir=swept", "train.steps=1"], tmp_path)
    assert answer.stderr == (
        "error: strategy.graph.replicate.zero=1 partitions over the copies, and 1 device has "
        "only one; use strategy=single, or more devices\n"
    )
    assert answer.status == 2
    assert json.loads((tmp_path / "swept/1/summary.json").read_text())["steps"] == 1
    assert not (tmp_path / "swept/0").exists()
    table = [line.split()[:3] for line in answer.stdout.splitlines()[-3:-1]]
    assert table == [["0", "zero1", "refused"], ["1", "dp", "done,"]]
    assert answer.left_running == ()


def test_a_refusal_has_no_warnings_of_torchao_before_it(tmp_path: Path) -> None:
    """A package warns as torchao does when it is imported; the refusal comes after."""
    package = tmp_path / "torchao"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import logging\n"
        "import torch.utils._pytree\n"
        "logging.getLogger(__name__).warning('Failed to load _C.so')\n"
        "torch.utils._pytree.log.warning('an Enum subclass')\n"
        "logging.getLogger('another').warning('to be read')\n"
    )
    (package / "optim.py").write_text("")
    asked = ["experiment=smoke", "optimizer=adamw8bit", "hydra.run.dir=run"]
    answer = whale_train_process(asked, tmp_path, {"PYTHONPATH": str(tmp_path)})
    assert answer.status == 2
    assert answer.stderr == (
        "to be read\n"
        "error: optimizer._target_=torchao.optim.AdamW8bit cannot be imported: torchao.optim has "
        "no AdamW8bit; define a torch.optim.Optimizer in torchao.optim\n"
    )
