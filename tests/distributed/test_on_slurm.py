"""Under a real Slurm of two nodes: ranks of srun, and jobs that `launcher=slurm` submits."""

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.distributed.apart import HostApart, can_be_apart, hosts_apart
from tests.distributed.jobs import MIXED, Job, losses_alone, losses_in
from tests.distributed.slurm import has_slurm, slurm_on
from tests.distributed.test_hosts_apart import SMALL

pytestmark = [
    pytest.mark.skipif(not can_be_apart(), reason="needs root, to make namespaces"),
    pytest.mark.skipif(not has_slurm(), reason="needs slurm-wlm and munge"),
]
MIX = (
    "hardware=v100_p100_mix",
    "hardware.nodes=[{devices: 1, device: v100_sxm2_32gb, link: nvlink2},"
    "{devices: 1, device: p100_pcie_16gb, link: pcie3_x16}]",
    "strategy=zero1",
)


V100, P100 = "device: v100_sxm2_32gb, link: nvlink2", "device: p100_pcie_16gb, link: pcie3_x16"
# The first node of the inventory is the second host.
KINDS = ("p100", "v100")


def in_partitions(devices: int) -> str:
    """Return the override of the mix, each of whose nodes Slurm gives from a partition."""
    new = f"{{devices: {devices}, {V100}, slurm: {{partition: v100, mem: 1500}}}}"
    old = f"{{devices: {devices}, {P100}, slurm: {{constraint: p100, mem: 1000}}}}"
    return f"hardware.nodes=[{new},{old}]"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[HostApart]]:
    """Each with a folder of its own, beside the one of jobs, which they share."""
    (tmp_path / "own").mkdir()
    with hosts_apart(tmp_path / "own", ("apple", "pear")) as hosts:
        yield hosts


@pytest.fixture
def slurm(hosts: list[HostApart], tmp_path: Path) -> Iterator[Mapping[str, str]]:
    (tmp_path / "slurm").mkdir()
    with slurm_on(hosts, tmp_path / "slurm") as variables:
        yield variables


@pytest.fixture
def slurm_of_kinds(hosts: list[HostApart], tmp_path: Path) -> Iterator[Mapping[str, str]]:
    (tmp_path / "slurm").mkdir()
    with slurm_on(hosts, tmp_path / "slurm", KINDS) as variables:
        yield variables


def start(job: Job, hosts: list[HostApart], slurm: Mapping[str, str], *overrides: str) -> None:
    job.start(*SMALL, *MIX, *overrides, environment=dict(slurm), inside=in_job(job, hosts))


def in_job(job: Job, hosts: list[HostApart]) -> list[str]:
    """Return what runs a command on the first host, in the folder of the job."""
    return hosts[0].command("env", f"--chdir={job.folder}")


def test_ranks_of_srun_on_hosts_that_share_no_files(
    job: Job, hosts: list[HostApart], slurm: Mapping[str, str]
) -> None:
    inside = hosts[0].command("srun", "--nodes=2", "--ntasks=2", "--kill-on-bad-exit=1")
    run = (*SMALL, *MIX, "train.steps=4", f"hydra.run.dir={hosts[0].folder}/run")
    job.start(*run, environment=dict(slurm), inside=inside)
    assert job.wait() == [0], job.said("err")
    said = job.said("out")
    assert "pear: not this file system; logs stay there" in said
    assert said.count("done: 4 steps") == 1
    expected = losses_alone(job, *SMALL, *MIX, "train.steps=4")
    found = losses_in(hosts[0].folder / "run")
    assert found == pytest.approx(expected, rel=2e-5)


@pytest.mark.full
def test_the_mix_of_eight_and_eight(
    job: Job, hosts: list[HostApart], slurm: Mapping[str, str]
) -> None:
    where = ("--nodes=2", "--ntasks=16", "--ntasks-per-node=8")
    inside = hosts[0].command("srun", *where, "--kill-on-bad-exit=1")
    run_dir = hosts[0].folder / "run"
    job.start(*MIXED, f"hydra.run.dir={run_dir}", environment=dict(slurm), inside=inside)
    assert job.wait(600.0) == [0], job.said("err")
    found = losses_in(run_dir)
    assert found == pytest.approx(losses_alone(job, *MIXED), rel=2e-5)


@pytest.mark.full
def test_a_sweep_is_a_job_array(job: Job, hosts: list[HostApart], slurm: Mapping[str, str]) -> None:
    sweep = ("launcher=slurm", "-m", "seed=0,1,nothing", "train.steps=4", "hydra.sweep.dir=runs")
    start(job, hosts, slurm, *sweep, "launcher.sbatch={mem: 500, time: 20}")
    assert job.wait() == [2], job.said("err")
    said = job.said("out")
    assert "job 1_1: done" in said
    rows = [re.split(r"\s{2,}", line) for line in said.splitlines()[-4:-1]]
    assert [row[:2] for row in rows] == [["0", "0"], ["1", "1"], ["2", "nothing"]]
    assert [row[2].partition(",")[0] for row in rows] == ["done", "done", "refused"]
    script = next((job.folder / "runs").glob("slurm/*submission.sh")).read_text()
    for wanted in ("--array=0-1%2", "--mem=500", "--time=20\n", "--nodes=2"):
        assert f"#SBATCH {wanted}" in script
    found = losses_in(job.folder / "runs" / "0")
    assert found == pytest.approx(losses_alone(job, *SMALL, *MIX, "train.steps=4"), rel=2e-5)


@pytest.mark.full
def test_trials_of_a_study_wait_in_the_queue_together(
    job: Job, hosts: list[HostApart], slurm: Mapping[str, str]
) -> None:
    study = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=2")
    values = ("seed=range(0,9)", "hydra.sweeper.sampler=random", "train.steps=4")
    start(job, hosts, slurm, "launcher=slurm", "-m", *study, *values, "hydra.sweep.dir=runs")
    assert job.wait() == [0], job.said("err")
    said = job.said("out")
    ended = re.findall(r"^job (\S+): done$", said, re.MULTILINE)
    assert (len(ended), ended[:2]) == (3, ["1_0", "1_1"])
    rows = re.findall(r"^(\d)  +(\d)  +done(?:, best)? +(\S+)$", said, re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1", "2"]
    for number, _, loss in rows:
        losses = losses_in(job.folder / "runs" / number)
        assert float(loss) == pytest.approx(losses[-1], rel=1e-5)
    expected = losses_alone(job, *SMALL, *MIX, "train.steps=4", f"seed={rows[0][1]}")
    assert losses_in(job.folder / "runs" / "0") == pytest.approx(expected, rel=2e-5)


def test_what_slurm_does_not_take_is_refused(
    job: Job, hosts: list[HostApart], slurm: Mapping[str, str]
) -> None:
    start(job, hosts, slurm, "launcher=slurm", "launcher.sbatch.partition=nowhere")
    assert job.wait() == [2]
    assert job.said("err").endswith(
        "error: launcher.sbatch is not taken by Slurm (error: invalid partition specified: "
        "nowhere); change what it names\n"
    )
    job.started.clear()
    start(job, hosts, slurm, "launcher=slurm", "launcher.sbatch.time=soon")
    assert job.wait() == [2]
    assert job.said("err") == (
        "error: launcher.sbatch.time=soon is no time of Slurm's; give minutes, or as 12:00:00 or "
        "2-00:00:00\n"
    )


@pytest.mark.full
def test_a_job_that_is_taken_off_its_nodes_goes_on(
    job: Job, hosts: list[HostApart], slurm: Mapping[str, str]
) -> None:
    run = ("train.steps=600", "checkpoint.every=100000", "hydra.run.dir=runs/a/b")
    start(job, hosts, slurm, "launcher=slurm", *run)
    job.wait_for_step(20)
    preempts = [*in_job(job, hosts), "scancel", "--signal=USR2", "1"]
    subprocess.run(preempts, env=os.environ | slurm, check=True)
    assert job.wait() == [0], job.said("err")
    (run_dir,) = job.run_dirs()
    assert [line["step"] for line in job.metrics()] == list(range(1, 601))
    assert len([*(run_dir / "attempts").iterdir()]) == 1
    expected = losses_alone(job, *SMALL, *MIX, "train.steps=600")
    assert losses_in(run_dir)[-1] == pytest.approx(expected[-1], rel=2e-5)


def test_nodes_of_two_partitions_are_one_job(
    job: Job, hosts: list[HostApart], slurm_of_kinds: Mapping[str, str]
) -> None:
    run = (in_partitions(1), "launcher=slurm", "train.steps=4", "hydra.run.dir=runs/a/b")
    start(job, hosts, slurm_of_kinds, *run)
    assert job.wait() == [0], job.said("err")
    assert "job 1: running" in job.said("out")
    (run_dir,) = job.run_dirs()
    script = (run_dir / "slurm" / "submission.sh").read_text()
    first, second = script.split("#SBATCH hetjob")
    assert ("--partition=v100" in first, "--mem=1500" in first) == (True, True)
    assert ("--constraint=p100" in second, "--partition" in second) == (True, False)
    assert_trained(job, hosts, run_dir)


@pytest.mark.full
def test_the_file_of_a_plan_is_submitted_by_hand(
    job: Job, hosts: list[HostApart], slurm_of_kinds: Mapping[str, str]
) -> None:
    """Its components differ in cores, for which srun has options of each."""
    run = (in_partitions(1), "+hardware.nodes.0.slurm.cpus_per_task=2", "train.steps=4")
    start(job, hosts, slurm_of_kinds, *run, "mode=plan", "launcher=slurm", "hydra.run.dir=a")
    assert job.wait() == [0], job.said("err")
    script = job.folder / "a" / "slurm" / "submission.sh"
    assert "srun --het-group=0 --cpus-per-task=2" in script.read_text()
    by_hand = hosts[0].command("sbatch", "--wait", str(script))
    subprocess.run(by_hand, env=os.environ | slurm_of_kinds, check=True, timeout=120)
    assert (job.folder / "a" / "slurm" / "1.status").read_text() == "0\n"
    assert_trained(job, hosts, job.folder / "a" / "run")


def assert_trained(job: Job, hosts: list[HostApart], run_dir: Path) -> None:
    """Assert that four steps were trained with rank 0 on the second host, as on one host."""
    rank_0 = json.loads((run_dir / "environment.json").read_text())
    assert rank_0["hostname"] == hosts[1].name
    expected = losses_alone(job, *SMALL, *MIX, "train.steps=4")
    assert losses_in(run_dir) == pytest.approx(expected, rel=2e-5)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_mix_of_two_partitions_is_queued_again(
    job: Job, hosts: list[HostApart], slurm_of_kinds: Mapping[str, str]
) -> None:
    run = (*MIXED, "train.steps=40", "checkpoint.every=100000")
    slurms = (in_partitions(8), "launcher=slurm", "hydra.run.dir=runs/a/b")
    job.start(*run, *slurms, environment=dict(slurm_of_kinds), inside=in_job(job, hosts))
    job.wait_for_step(10)
    preempts = [*in_job(job, hosts), "scancel", "--signal=USR2", "1"]
    subprocess.run(preempts, env=os.environ | slurm_of_kinds, check=True)
    assert job.wait(500.0) == [0], job.said("err")
    (run_dir,) = job.run_dirs()
    assert [line["step"] for line in job.metrics()] == list(range(1, 41))
    assert len([*(run_dir / "attempts").iterdir()]) == 1
    assert losses_in(run_dir) == pytest.approx(losses_alone(job, *run), rel=2e-5)
