"""`whale-train` whose ranks torchrun started, or srun: one job, and its end is everybody's.

There need be no Slurm: two processes are given the variables that srun (22.05) gives its tasks.
Not every run of the tests starts all of them: test_on_slurm has a real srun and compares losses,
test_hosts_apart names what ended, and test_over_ssh saves what was interrupted.
"""

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.distributed.jobs import COMMAND, Job

from whale_train.launcher.ranks.rank_env import PORTS
from whale_train.machine.hosts import Seen, joined
from whale_train.runtime.failures.failure import RankError, failure_among

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
STEPS = ("train.steps=4",)
ENDLESS = ("train.steps=1000000",)


@pytest.fixture(scope="module")
def local_metrics(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """What the local launcher's two ranks compute."""
    job = Job(tmp_path_factory.mktemp("local"))
    job.start(*COMMAND, *STEPS)
    assert job.wait() == [0], job.said("err")
    return job.metrics()


def start_torchrun(job: Job, *overrides: str) -> None:
    job.start(*TORCHRUN, *COMMAND, *overrides)


def start_srun(job: Job, *overrides: str) -> None:
    job_id = free_job_id()
    for rank in range(2):
        variables = {
            "WHALE_TRAIN_SECRET": "5" * 64,  # torchrun's ranks have that of their user
            "SLURM_JOB_ID": str(job_id),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_JOB_NODELIST": "localhost,elsewhere",
            "SLURM_NTASKS": "4",
            "SLURM_TASKS_PER_NODE": "2(x2)",
            "SLURM_NODEID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
        }
        job.start(*COMMAND, *overrides, environment=variables)


def free_job_id() -> int:
    """A Slurm job whose first step gets a port that nobody has."""
    for number in range(os.getpid(), os.getpid() + 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", PORTS[number % len(PORTS)]))
            except OSError:
                continue
            return number
    raise AssertionError("no port is free")


STARTERS = {"torchrun": start_torchrun, "srun": start_srun}


@pytest.mark.full
@pytest.mark.parametrize("starter", STARTERS)
def test_trains_as_the_local_launcher_does(
    starter: str, job: Job, local_metrics: list[dict[str, float]]
) -> None:
    STARTERS[starter](job, *STEPS)
    assert set(job.wait()) == {0}, job.said("err")
    metrics = job.metrics()
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    for key in ("loss", "grad_norm"):
        assert [m[key] for m in metrics] == pytest.approx(
            [m[key] for m in local_metrics], rel=0, abs=1e-6
        )
    assert len([*job.folder.rglob(".hydra")]) == 1
    assert job.said("out").count("done: 4 steps") == 1
    assert "Traceback" not in job.said("err")
    job.assert_nothing_left()


@pytest.mark.parametrize(
    ("starter", "overrides", "message"),
    [
        (
            "srun",
            ["hardware.devices=3"],
            "error: WORLD_SIZE=2 ranks were started, and the plan for hardware=cpu has 3; "
            "start 3, or use hardware=cpu hardware.devices=2",
        ),
        pytest.param(
            "torchrun",
            ["-m", "seed=1,2"],
            "error: -m starts several jobs, and the ranks were started from outside for one; "
            "run the sweep outside, one launch a job",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_refused_request_ends_all_ranks(
    starter: str, overrides: list[str], message: str, job: Job
) -> None:
    STARTERS[starter](job, *overrides)
    statuses, said = job.wait(), job.said("err")
    assert said.count(message) == 1, said
    if starter == "srun":
        assert statuses == [2, 2]
        assert said == f"{message}\n"
    else:  # which reports the statuses of its ranks itself
        assert said.count("exitcode  : 2") == 2, said
    assert job.run_dirs() == []
    job.assert_nothing_left()


# The driver of a host with two cards that are too old for any torch.
NVML = """from tests.unit.nvml_machines import Card, Nvml

_here = Nvml([Card("Tesla K80", 11441, (3, 7), 2496, 875, 2505, 384, (3, 16))] * 2)


def __getattr__(name):
    return getattr(_here, name)
"""


@pytest.mark.full
@pytest.mark.parametrize("starter", STARTERS)
def test_what_hosts_have_is_known_before_a_plan(
    starter: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all ranks are told that there is none: they have met by then."""
    (job.folder / "pynvml.py").write_text(NVML)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (job.folder, ROOT, ROOT / "src"))))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    STARTERS[starter](job, "hardware.kind=local")
    statuses, said = job.wait(), job.said("err")
    assert re.search(r"error: hardware=k80_11gb (cannot be used by|is of architecture sm_37)", said)
    assert said.count("error: ") == 1 or starter == "torchrun", said
    if starter == "srun":
        assert statuses == [2, 2]
    else:  # which reports the statuses of its ranks itself
        assert said.count("exitcode  : 2") == 2, said
    assert job.run_dirs() == []
    job.assert_nothing_left()


@pytest.mark.full
def test_a_killed_rank_ends_the_others_and_is_named(job: Job) -> None:
    start_srun(job, *ENDLESS)
    job.wait_for_step(3)
    os.kill(job.member(1), signal.SIGKILL)
    assert job.wait() == [1, -signal.SIGKILL]
    (run_dir,) = job.run_dirs()
    failure = json.loads((run_dir / "failure.json").read_text())
    assert failure["rank"] == 1
    assert failure["step"] > 3
    said = job.said("err")
    assert said.startswith("error: rank 1 (cpu_process, node 0, TaskGraph model) failed at step ")
    assert "ended without a word" in said
    job.assert_nothing_left()


@pytest.mark.parametrize(
    "blow",
    [
        *(pytest.param(x, marks=pytest.mark.full) for x in ("a rank is killed", "Ctrl-C")),
        "torchrun is killed",
    ],
)
def test_torchrun_leaves_nothing(blow: str, job: Job) -> None:
    """Also where nobody is left to end them, and they wait in a collective for one that is stopped,
    which gets no signal it could handle."""
    start_torchrun(job, *ENDLESS)
    job.wait_for_step(2)
    assert len(job.processes()) == 4  # torchrun, the command of rank 0, and two members
    if blow == "Ctrl-C":
        os.killpg(job.started[0].pid, signal.SIGINT)
    elif blow == "torchrun is killed":
        os.kill(job.member(1), signal.SIGSTOP)
        os.kill(job.started[0].pid, signal.SIGKILL)
    else:
        os.kill(job.member(1), signal.SIGKILL)
    assert job.wait() != [0]
    job.assert_nothing_left()


@pytest.mark.full
@pytest.mark.parametrize("starter", STARTERS)
def test_ranks_told_to_end_save_first_and_go_on(starter: str, job: Job) -> None:
    """As a queue does it: SIGTERM to every process that was started, and the same command again."""
    same = ("checkpoint.every=1000000", "train.resume=auto", "hydra.run.dir=runs/a/b")
    STARTERS[starter](job, *ENDLESS, *same)
    job.wait_for_step(3)
    for process in job.started:
        process.send_signal(signal.SIGTERM)
    statuses = job.wait()
    assert statuses[0] != 0
    if starter == "srun":
        assert statuses == [130, 0]
    said = job.said("err")
    done = len(job.metrics())
    assert f"interrupted after step {done}, which is saved" in said
    job.assert_nothing_left()
    (checkpoint,) = (job.run_dirs()[0] / "checkpoints").iterdir()
    assert checkpoint.name == f"step_{done}"
    job.started.clear()
    STARTERS[starter](job, *same, f"train.steps={done + 2}")
    assert set(job.wait()) == {0}, job.said("err")
    assert [line["step"] for line in job.metrics()] == list(range(1, done + 3))
    job.assert_nothing_left()


def agent(number: int, job: Job, port: int, strategy: Sequence[str]) -> subprocess.Popen[str]:
    """One of the hosts that torchrun may have two of, with two ranks."""
    conf = f"is_host={number == 0},last_call_timeout=3,keep_alive_interval=1"
    where = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=hosts")
    elastic = ("--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=5", *where)
    overrides = ("hardware.devices=auto", *strategy, "train.steps=600", *GOES_ON)
    job.start(
        *("-m", "torch.distributed.run", *elastic, f"--rdzv-conf={conf}", *COMMAND, *overrides),
        # Without it a host that comes later waits for an address that nobody writes again
        # (DynamicRendezvousHandler keeps it from its first round).
        environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
    return job.started[-1]


GOES_ON = ("checkpoint.every=5", "checkpoint.keep=3", "train.resume=auto", "hydra.run.dir=runs/a/b")


WORKERS = ("strategy=elastic_dp", "strategy.logical_workers=4", "train.parameters_sha256=true")


@pytest.mark.full
@pytest.mark.parametrize("strategy", [("strategy=dp",), WORKERS])
def test_a_host_that_dies_and_comes_back(strategy: Sequence[str], job: Job) -> None:
    """4 ranks, 2 and 4 again: the losses of a run that was never stopped, and its very bits where
    it has logical workers."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    agent(0, job, port, strategy)
    lost = agent(1, job, port, strategy)
    job.wait_for_step(30)
    for pid in descendants(lost.pid):
        os.kill(pid, signal.SIGKILL)
    lost.wait()
    job.started.remove(lost)
    job.wait_for_step(60)
    agent(1, job, port, strategy)
    assert job.wait() == [0, 0], job.said("err")
    metrics = job.metrics()
    assert [line["step"] for line in metrics] == list(range(1, 601))
    worlds = [
        json.loads(path.read_text())["world_size"]
        for path in (
            *sorted(job.run_dirs()[0].glob("attempts/*/plan.json")),
            job.run_dirs()[0] / "plan.json",
        )
    ]
    assert worlds == [4, 2, 4]
    alone = Job(job.folder / "alone")
    alone.folder.mkdir()
    alone.start(*COMMAND, *strategy, "train.steps=600")
    assert alone.wait() == [0], alone.said("err")
    expected = alone.metrics()
    if strategy == WORKERS:
        for key in ("parameters_sha256", "loss"):
            assert [line[key] for line in metrics] == [line[key] for line in expected]
    losses = [line["loss"] for line in expected]
    assert [line["loss"] for line in metrics] == pytest.approx(losses, rel=2e-5)
    job.assert_nothing_left()


def descendants(pid: int) -> list[int]:
    """A process and all that it and its children have started."""
    found = [pid]
    for parent in found:
        for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, tasks.read_text().split())
    return found


def error(rank: int, time_s: float, communication: bool) -> RankError:
    return RankError(rank, time_s, "E", f"of {rank}", communication, 7, f"E: of {rank}")


def test_a_host_without_a_word_is_named() -> None:
    seen = [Seen(name, name, 2, 10**9, ()) for name in ("apple", "apple", "pear", "pear")]
    errors = {1: error(1, 1.0, True)}
    failure = failure_among(errors, 4, joined(seen), living=[0])
    assert (failure.rank, failure.kind, failure.host) == (2, "host", "pear")
    assert "and ranks 2 to 3 with it" in (failure.message or "")
    one = failure_among(errors, 4, joined(seen), living=[0, 2])
    assert (one.rank, one.kind, one.host) == (3, "exception", None)
    assert failure_among(errors, 4, joined(seen)).rank == 1  # of too many nothing is known


@pytest.mark.parametrize(
    ("errors", "cause"),
    [
        # Two lost their connections: to the third.
        ([error(0, 2.0, True), error(2, 1.0, True)], 1),
        # A rank that says what happened to it is believed before the silent one.
        ([error(0, 2.0, False), error(2, 1.0, True)], 0),
        # All speak, or too few: the first to notice is the best there is.
        ([error(0, 3.0, True), error(1, 1.0, True), error(2, 2.0, True)], 1),
        ([error(2, 1.0, True)], 2),
    ],
)
def test_the_rank_that_is_named_where_no_host_watches(errors: list[RankError], cause: int) -> None:
    failure = failure_among({e.rank: e for e in errors}, 3)
    assert (failure.rank, failure.step) == (cause, 7)
    assert failure.log == f"logs/rank_{cause}.log"
