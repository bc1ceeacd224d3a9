"""`mode=schedule`: real jobs that shrink and grow, simulated ones, and what is refused."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.command import environment_for, processes_of, whale_train

CPUS = ("mode=schedule", "hardware=cpu", "hardware.devices=4")
SMALL = ["model=gpt", "model.depth=1", "model.width=32", "train.global_batch=16"]
# A rank reads its share of every batch at the same pace whatever else the machine does, so that two
# ranks are faster than one. Few samples: a run that saves checkpoints reads all of them at first.
TOKENS = """
import time

import torch


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 257, (64,), generator=drawn)
        return {"input_ids": tokens, "labels": tokens}


class SlowTokens(Tokens):
    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)
"""
FAST = ["model=gpt", "model.depth=2", "train.global_batch=16", "train.report=false"]
FAST += ["data._target_=slow_tokens.Tokens"]
SLOW = [*FAST[:-1], "data._target_=slow_tokens.SlowTokens"]


def written(folder: Path, jobs: list[dict[str, Any]]) -> str:
    (folder / "slow_tokens.py").write_text(TOKENS)
    (folder / "jobs.yaml").write_text(yaml.safe_dump(jobs))
    return "jobs=jobs.yaml"


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == list(range(1, len(lines) + 1))
    return [x["loss"] for x in lines]


@pytest.mark.timeout(280)
def test_a_late_guarantee_gets_its_share_and_others_grow_back(tmp_path: Path) -> None:
    own = {"a": ["train.steps=110"], "b": ["train.steps=110", "seed=1"], "late": ["train.steps=6"]}
    jobs: list[dict[str, Any]] = [
        {"name": name, "command": [*SLOW, *words], "devices": 1} for name, words in own.items()
    ]
    jobs[1] |= {"guaranteed": False}
    jobs[2] |= {"devices": 2, "arrival_s": 6}
    given = [*CPUS, written(tmp_path, jobs), "hydra.run.dir=all", "schedule.round_s=1000"]
    given += ["schedule.reconfiguration_s=0", "schedule.least_useful_share=0"]
    answer = whale_train(given, tmp_path, deadline_s=200.0)
    assert (answer.status, answer.stderr, answer.left_running) == (0, "", ())
    schedule = json.loads((tmp_path / "all/schedule.json").read_text())
    by_name = {job["name"]: job for job in schedule["jobs"]}
    assert [job["status"] for job in schedule["jobs"]] == ["done"] * 3
    late = by_name["late"]
    assert late["history"][0]["devices"] >= late["minimum_devices"] == 2
    assert late["arrival_s"] < late["started_s"] < late["first_step_s"] < late["ended_s"]
    assert late["first_step_s"] - late["arrival_s"] < 60  # what the schedule promises
    # Both began on two devices, shrank for the guarantee, and grew once it had ended.
    for name in ("a", "b"):
        held = [x["devices"] for x in by_name[name]["history"]]
        assert held[0] == 2
        assert min(held) == 1
        assert held[-1] > 1
    # Each has taken every step once, with the losses of a run that nothing touched.
    for name in ("a", "b"):
        alone = [*FAST, *own[name], "hardware=cpu", "hardware.devices=1", "launcher.threads=1"]
        untouched = whale_train([*alone, f"hydra.run.dir={name}"], tmp_path)
        assert untouched.status == 0, untouched.stderr
        ran = losses(tmp_path / "all/jobs" / name)
        assert len(ran) == 110
        assert ran == pytest.approx(losses(tmp_path / name), rel=2e-5)


def test_ctrl_c_stops_every_job_and_keeps_its_checkpoint(tmp_path: Path) -> None:
    jobs = [{"name": "a", "command": [*SLOW, "train.steps=5000"], "devices": 1}]
    program = [sys.executable, "-m", "whale_train.launcher.cli", *CPUS, written(tmp_path, jobs)]
    program += ["hydra.run.dir=all", "schedule.plans=[]"]
    with (tmp_path / "said").open("w") as said:
        running = subprocess.Popen(
            program, cwd=tmp_path, env=environment_for(tmp_path), stdout=said, stderr=said
        )
    metrics = tmp_path / "all/jobs/a/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and len(losses(metrics.parent)) > 2):
        assert running.poll() is None, (tmp_path / "said").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    assert running.wait(100) == 130
    assert processes_of(tmp_path) == ()
    steps = [x.name for x in (metrics.parent / "checkpoints").glob("step_*/manifest.json")]
    assert len(steps) == 1
    schedule = json.loads((tmp_path / "all/schedule.json").read_text())
    assert [job["status"] for job in schedule["jobs"]] == ["interrupted"]


def test_a_simulated_trace_beside_the_other_policies(tmp_path: Path) -> None:
    jobs = [
        {"name": "one", "command": [*SMALL, "train.steps=50"], "devices": 1},
        {"name": "two", "command": [*SMALL, "train.steps=90"], "devices": 2, "guaranteed": False},
    ]
    (tmp_path / "trace.csv").write_text(
        "name,like,arrival_s,devices,steps,guaranteed\nx,one,0,,100,\ny,two,3.5,4,,true\n"
    )
    given = [*CPUS, written(tmp_path, jobs), "schedule.simulate=true", "schedule.plans=[zero1]"]
    answer = whale_train([*given, "schedule.trace=trace.csv", "hydra.run.dir=csv"], tmp_path)
    assert (answer.status, answer.stderr) == (0, "")
    schedule = json.loads((tmp_path / "csv/schedule.json").read_text())
    assert [job["name"] for job in schedule["jobs"]] == ["x", "y"]
    assert [job["guaranteed"] for job in schedule["jobs"]] == [True, True]
    assert set(schedule["policies"]) == {"replan", "resources", "plans", "first_come"}
    assert not (tmp_path / "csv/jobs").exists()
    assert "one more device" in answer.stdout
    drawn = [*given, "schedule.trace_jobs=40", "hydra.run.dir=drawn", "seed=3"]
    assert whale_train(drawn, tmp_path).status == 0
    schedule = json.loads((tmp_path / "drawn/schedule.json").read_text())
    assert len(schedule["jobs"]) == 40
    assert {x["ended"] for x in schedule["policies"].values()} == {40}


def test_on_slurm_a_job_gets_part_of_a_node_or_whole_nodes(tmp_path: Path) -> None:
    nodes = "[{count: 2, devices: 2, device: cpu_process, link: shared_memory}]"
    given = ["mode=schedule", "launcher=slurm", "hardware=v100_512", f"hardware.nodes={nodes}"]
    given += ["schedule.simulate=true", "hydra.run.dir=all"]
    job = {"name": "a", "command": [*SMALL, "train.steps=9"], "devices": 3}
    answer = whale_train([*given, written(tmp_path, [job])], tmp_path)
    assert (answer.status, answer.stderr) == (
        2,
        "error: jobs[0].devices=3 is neither part of a node nor whole nodes; use 1, 2, 4\n",
    )
    answer = whale_train([*given, written(tmp_path, [job | {"devices": 2}])], tmp_path)
    assert (answer.status, answer.stderr) == (0, "")


def test_all_faults_of_the_jobs_are_refused_together(tmp_path: Path) -> None:
    jobs = [
        {"name": "a", "command": SMALL, "devices": 1, "garanteed": True},
        {"name": "b", "command": ["train.stepz=5"], "devices": 9},
        {"name": "b", "command": ["mode=plan", "hardware=cpu"], "devices": 1},
        {"name": "c", "command": [*SMALL, "launcher=slurm"], "devices": 1},
        {"name": "d/e", "command": SMALL, "devices": 1},
        {"name": "f", "command": ["--config-dir=my", *SMALL], "devices": 1},
        {"name": "g", "command": [*SMALL, "strategy.devices.a100=2"], "devices": 1},
    ]
    plans = "schedule.plans=['dp seed=4','dp strategy.devices=2']"
    answer = whale_train([*CPUS, written(tmp_path, jobs), plans, "hydra.run.dir=no"], tmp_path)
    assert (answer.status, answer.stdout) == (2, "")
    assert answer.stderr.splitlines() == [
        "12 things are wrong with this request:",
        "  jobs[0].garanteed=true is not a key here; did you mean guaranteed? One of: arrival_s, "
        "command, devices, guaranteed, name",
        "  jobs[4].name=d/e is not the name of a folder; use letters, digits, -, _ and .",
        "  jobs[1].devices=9 is more than the 4 devices there are; use at most 4",
        "  jobs[2].name=b is the name of two jobs; give each its own",
        "  schedule.plans=dp seed=4 sets seed, and a plan must not change what is computed; use "
        "keys of strategy, and train.accumulate",
        "  schedule.plans: strategy.devices is set by the schedule; leave it out: devices of the "
        "job says how many",
        "  jobs[1].command: train.stepz=5 is not a key of the config; did you mean train.steps?",
        "  jobs[2].command: mode is set by the schedule; leave it out: jobs are trained",
        "  jobs[2].command: hardware is set by the schedule; leave it out: the schedule shares its "
        "own hardware",
        "  jobs[3].command: launcher is set by the schedule; leave it out: the schedule's own "
        "launcher starts all jobs",
        "  jobs[5].command: --config-dir=my is no override of a job; leave it out: jobs have the "
        "--config-dir of the schedule's own command",
        "  jobs[6].command: strategy.devices.a100 is set by the schedule; leave it out: devices of "
        "the job says how many",
    ]
    assert not (tmp_path / "no").exists()


def test_jobs_without_a_plan_are_refused_by_one_fault_each(tmp_path: Path) -> None:
    """A job that fits nowhere is refused for what it requests; one that the policy would never
    start, before anybody waits for it. Both read the schedule's own inventory."""
    (tmp_path / "my/hardware").mkdir(parents=True)
    device = (
        "{name: small, memory_bytes: 20e6, flops: {fp32: 1e12}, memory_bandwidth_bytes_s: 1e11}"
    )
    nodes = f"nodes: [{{count: 1, devices: 4, link: pcie3_x16, device: {device}}}]\n"
    (tmp_path / "my/hardware/lab.yaml").write_text(nodes)
    lab = ["--config-dir=my", "mode=schedule", "hardware=lab", "hydra.run.dir=no"]
    large = {
        "name": "a",
        "command": ["model=gpt", "model.depth=1", "model.width=512"],
        "devices": 2,
    }
    given = [*lab, written(tmp_path, [large]), "schedule.simulate=true"]
    answer = whale_train(given, tmp_path)
    assert (answer.status, answer.stdout) == (2, "")
    assert answer.stderr.startswith("error: jobs[0].command: strategy=dp needs ")
    assert answer.stderr.count("\n") == 1
    piped = {"name": "a", "command": [*SMALL, "model.depth=2", "strategy=3d"], "devices": 2}
    given = [*lab, written(tmp_path, [piped]), "schedule.policy=first_come"]
    answer = whale_train(given, tmp_path)
    assert (answer.status, answer.stdout, answer.stderr) == (
        2,
        "",
        "error: jobs[0].devices=2 is a number for which schedule.policy=first_come has no plan; "
        "use schedule.policy=replan, or 4\n",
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("mode=schedule",), "jobs must be given to mode=schedule; name a YAML file"),
        (("jobs=x.yaml",), "jobs=x.yaml has no effect on mode=train; use mode=schedule"),
        ((*CPUS, "jobs=x.yaml"), "jobs=x.yaml cannot be read (["),
        (
            (*CPUS, "jobs=x.yaml", "launcher=emulate"),
            "launcher=emulate has no effect on mode=schedule; leave it out, for jobs on this host, "
            "or use launcher=slurm, with launcher.sbatch, or launcher=ray",
        ),
        (
            (*CPUS, "jobs=x.yaml", "launcher=slurm", "launcher.nodes=2"),
            "launcher.nodes=2 has no effect on mode=schedule; leave it out, for jobs on this host, "
            "or use launcher=slurm, with launcher.sbatch, or launcher=ray",
        ),
        ((*CPUS, "jobs=x.yaml", "train.steps=5"), "train.steps=5 has no effect on mode=schedule"),
        (
            (*CPUS, "jobs=x.yaml", "schedule.trace_jobs=5"),
            "schedule.trace_jobs=5 is simulated, and no job starts; add schedule.simulate=true",
        ),
        ((*CPUS, "jobs=x.yaml", "schedule.polici=replan"), "did you mean schedule.policy?"),
        (
            ("mode=schedule", "jobs=x.yaml", "hardware=dgx_a100", "hardware.devices=4"),
            "hardware.devices=4 is not a key of the config; hardware=cpu, local have it",
        ),
    ],
)
def test_what_is_refused(given: tuple[str, ...], said: str, tmp_path: Path) -> None:
    answer = whale_train([*given, "hydra.run.dir=no"], tmp_path)
    assert (answer.status, answer.stdout) == (2, "")
    assert said in answer.stderr
