"""`mode=schedule launcher=slurm` under a real Slurm of two nodes."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_schedule import FAST, SLOW, losses, written
from tests.distributed.apart import HostApart, can_be_apart, hosts_apart
from tests.distributed.jobs import Job
from tests.distributed.slurm import has_slurm, slurm_on

pytestmark = [
    pytest.mark.skipif(not can_be_apart(), reason="needs root, to make namespaces"),
    pytest.mark.skipif(not has_slurm(), reason="needs slurm-wlm and munge"),
]
COMMAND = (
    *("-m", "whale_train.launcher.cli", "mode=schedule", "launcher=slurm", "jobs=jobs.yaml"),
    "hydra.run.dir=all",
)
FOUR = ("hardware=cpu", "hardware.devices=4")
TWO_NODES = ("hardware=pair", "--config-dir=conf")
PAIR = """nodes:
  - {count: 2, devices: 1, device: cpu_process, link: shared_memory}
network: ethernet_10g
"""
OWN = {"a": ["train.steps=220"], "b": ["train.steps=220", "seed=1"], "late": ["train.steps=4"]}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[HostApart]]:
    (tmp_path / "own").mkdir()
    with hosts_apart(tmp_path / "own", ("apple", "pear")) as hosts:
        yield hosts


@pytest.fixture
def slurm(hosts: list[HostApart], tmp_path: Path) -> Iterator[Mapping[str, str]]:
    (tmp_path / "slurm").mkdir()
    with slurm_on(hosts, tmp_path / "slurm") as variables:
        yield variables


@pytest.fixture
def host(hosts: list[HostApart]) -> HostApart:
    """Return the host that jobs are submitted on."""
    return hosts[0]


def start(
    job: Job, host: HostApart, slurm: Mapping[str, str], jobs: list[dict[str, Any]], *more: str
) -> None:
    written(job.folder, jobs)
    inside = host.command("env", f"--chdir={job.folder}")
    job.start(*COMMAND, *more, environment=dict(slurm), inside=inside)


def ask(host: HostApart, slurm: Mapping[str, str], *command: str) -> str:
    done = subprocess.run(
        host.command(*command), env=os.environ | slurm, capture_output=True, text=True, check=True
    )
    return done.stdout


def wait_until(job: Job, happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happens():
        assert all(p.poll() is None for p in job.started), job.said("out") + job.said("err")
        assert time.monotonic() < deadline, job.said("out")
        time.sleep(0.2)


def steps(job: Job, name: str) -> int:
    run_dir = job.folder / "all/jobs" / name
    return len(losses(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_late_guarantee_gets_its_share_and_others_grow_back(
    job: Job, host: HostApart, slurm: Mapping[str, str]
) -> None:
    jobs: list[dict[str, Any]] = [
        {"name": name, "command": [*SLOW, *words], "devices": 1} for name, words in OWN.items()
    ]
    jobs[1] |= {"guaranteed": False}
    jobs[2] |= {"devices": 2, "arrival_s": 25}
    given = ["schedule.round_s=1000", "schedule.reconfiguration_s=0"]
    start(job, host, slurm, jobs, *FOUR, *given, "schedule.least_useful_share=0")
    assert job.wait(250) == [0], job.said("out") + job.said("err")
    schedule = json.loads((job.folder / "all/schedule.json").read_text())
    assert [one["status"] for one in schedule["jobs"]] == ["done"] * 3
    for one in schedule["jobs"][:2]:
        held = [x["devices"] for x in one["history"]]
        assert (held[0], min(held)) == (2, 1)
        assert held[-1] > 1
    # Every attempt is a job of Slurm with as many tasks as it has devices.
    scripts = [x.read_text() for x in (job.folder / "all/slurm").glob("*submission.sh")]
    tasks = sorted(int(x.partition("--ntasks-per-node=")[2].split()[0]) for x in scripts)
    assert tasks == sorted(x["devices"] for one in schedule["jobs"] for x in one["history"])
    assert ask(host, slurm, "squeue", "--noheader") == ""
    alone = Job(job.folder)
    cpu = ("hardware=cpu", "hardware.devices=1", "launcher.threads=1")
    alone.start("-m", "whale_train.launcher.cli", *FAST, *OWN["a"], *cpu, "hydra.run.dir=a")
    assert alone.wait() == [0]
    ran = losses(job.folder / "all/jobs/a")
    assert len(ran) == 220
    assert ran == pytest.approx(losses(job.folder / "a"), rel=2e-5)


@pytest.mark.full
@pytest.mark.timeout(200)
def test_a_job_waits_in_the_queue_and_ctrl_c_leaves_nothing_there(
    job: Job, host: HostApart, slurm: Mapping[str, str]
) -> None:
    (job.folder / "conf/hardware").mkdir(parents=True)
    (job.folder / "conf/hardware/pair.yaml").write_text(PAIR)
    hold = ("sbatch", "--parsable", "--exclusive", "--nodes=2", "--output=/dev/null")
    other = ask(host, slurm, *hold, "--wrap=sleep 1000").strip()
    wait_until(job, lambda: "RUNNING" in ask(host, slurm, "squeue", "--format=%T"))
    jobs = [{"name": "a", "command": [*SLOW, "train.steps=5000"], "devices": 2}]
    start(job, host, slurm, jobs, *TWO_NODES, "schedule.plans=[]")
    wait_until(job, lambda: "a is queued for 2 devices" in job.said("out"))
    assert "a runs on" not in job.said("out")
    ask(host, slurm, "scancel", other)
    wait_until(job, lambda: steps(job, "a") > 2)
    assert "a runs on 2 devices" in job.said("out")
    # The command itself, and not nsenter, which runs it on the host.
    commands = {pid: x for pid, x in job.processes().items() if "jobs=jobs.yaml" in x}
    (pid,) = (pid for pid, x in commands.items() if x[0] != "nsenter")
    os.kill(pid, signal.SIGINT)
    assert job.wait(100) == [130]
    assert ask(host, slurm, "squeue", "--noheader") == ""
    checkpoints = job.folder / "all/jobs/a/checkpoints"
    assert len([*checkpoints.glob("step_*/manifest.json")]) == 1
    schedule = json.loads((job.folder / "all/schedule.json").read_text())
    assert [one["status"] for one in schedule["jobs"]] == ["interrupted"]


@pytest.mark.full
@pytest.mark.timeout(200)
def test_a_notice_of_slurm_is_obeyed_and_a_foreign_scancel_is_a_failure(
    job: Job, host: HostApart, slurm: Mapping[str, str]
) -> None:
    jobs = [{"name": "a", "command": [*SLOW, "train.steps=5000"], "devices": 1}]
    start(job, host, slurm, jobs, *FOUR, "schedule.plans=[]")
    wait_until(job, lambda: steps(job, "a") > 2)
    ask(host, slurm, "scancel", "--signal=USR2", "1")  # as before Slurm takes the node
    wait_until(job, lambda: job.said("out").count("a runs on") == 2)
    saved = steps(job, "a")
    wait_until(job, lambda: steps(job, "a") > saved)
    ask(host, slurm, "scancel", "2")
    assert job.wait(60) == [1]
    assert "a failed:\njob 2 of Slurm was cancelled, not by the schedule\n" in job.said("err")


def test_what_slurm_says_of_a_job_that_it_does_not_take(
    job: Job, host: HostApart, slurm: Mapping[str, str]
) -> None:
    jobs = [{"name": "a", "command": [*FAST, "train.steps=5"], "devices": 1}]
    start(job, host, slurm, jobs, *FOUR, "launcher.sbatch.partition=nowhere")
    assert job.wait() == [1]
    assert job.said("err").endswith(
        "error: a failed:\nlauncher.sbatch is not taken by Slurm (error: invalid partition "
        "specified: nowhere); change what it names\n"
    )
    assert ask(host, slurm, "squeue", "--noheader") == ""
