"""`launcher=ray` on a real Ray cluster of two nodes of this machine, with unlike devices."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.distributed.jobs import COMMAND, MARK, Job, losses_alone
from tests.distributed.ray_nodes import OPEN, ray_nodes

from whale_train.checkpoints.checkpoint_files import checkpoints_in

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray"),
    pytest.mark.xdist_group("ray"),
]
V100, P100 = "v100_sxm2_32gb", "p100_pcie_16gb"
SMALL = [word for word in COMMAND if not word.startswith(("strategy", "hardware"))]
MIX = (
    "hardware=v100_p100_mix",
    f"hardware.nodes=[{{devices: 2, device: {V100}, link: nvlink2}},"
    f"{{devices: 2, device: {P100}, link: pcie3_x16}}]",
    "strategy=hybrid_split_dp",
    "launcher.threads=1",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Give a cluster whose first node has the devices of the inventory's second."""
    offered = [{"CPU": 2, P100: 2}, {"CPU": 2, V100: 2}]
    with ray_nodes(tmp_path_factory.mktemp("ray"), offered) as address:
        yield address


def start(job: Job, cluster: str, *overrides: str) -> None:
    environment = {"RAY_ADDRESS": cluster, **OPEN}
    on_ray = ("launcher=ray", "hydra.run.dir=runs/a/b")
    job.start(*SMALL, *MIX, *on_ray, *overrides, environment=environment)


def on_nodes(job: Job) -> list[int]:
    """Return the living processes of a job that Ray or its ranks have started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_ours = os.readlink(entry / "cwd") == str(job.folder)
            if is_ours and MARK.encode() not in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def parent_of(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (parent,) = (int(line.split()[1]) for line in lines if line.startswith("PPid:"))
    return parent


def actors_of(job: Job) -> dict[int, int]:
    """Return the process of the actor that has started each rank."""
    found = {}
    for process in on_nodes(job):
        parent = parent_of(process)
        if Path(f"/proc/{parent}/cmdline").read_bytes().startswith(b"ray::NodeRanks"):
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            (rank,) = (int(x[5:]) for x in variables if x.startswith(b"RANK="))
            found[rank] = parent
    return found


def assert_nothing_left(job: Job) -> None:
    deadline = time.monotonic() + 20.0
    while on_nodes(job):
        assert time.monotonic() < deadline, on_nodes(job)
        time.sleep(0.1)


@pytest.mark.full
def test_a_job_whose_actor_is_killed_ends_as_if_it_were_not(job: Job, cluster: str) -> None:
    run = ("train.steps=20", "checkpoint.every=4")
    start(job, cluster, *run, "launcher.max_restarts=1")
    job.wait_for_step(6)
    actors = actors_of(job)
    assert sorted(actors) == [0, 1, 2, 3]
    assert actors[0] == actors[1] != actors[2] == actors[3]
    # Each is on the node with the devices that the plan's ranks stand for.
    for rank, kind in ((0, V100), (2, P100)):
        raylet = Path(f"/proc/{parent_of(actors[rank])}/cmdline").read_bytes()
        assert f"{kind},2".encode() in raylet
    os.kill(actors[2], signal.SIGKILL)
    assert job.wait() == [0], job.said("err")
    assert "the Ray actors on " in job.said("err")
    said = job.said("out")
    assert said.count("ranks: 2 on ") == 2
    assert said.count("warning: an attempt failed; 1 more may follow") == 1
    assert said.count("done: 20 steps") == 1
    (run_dir,) = job.run_dirs()
    assert [line["step"] for line in job.metrics()] == list(range(1, 21))
    assert len([*(run_dir / "attempts").iterdir()]) == 1
    expected = losses_alone(job, *SMALL, *MIX, *run)
    assert job.losses() == pytest.approx(expected, rel=2e-5)
    assert_nothing_left(job)


def test_losses_are_those_of_one_host_and_signals_save(job: Job, cluster: str) -> None:
    endless = ("train.steps=1000000", "checkpoint.every=1000000")
    start(job, cluster, *endless)
    job.wait_for_step(3)
    job.started[0].send_signal(signal.SIGTERM)
    assert job.wait() == [130], job.said("err")
    done = len(job.metrics())
    assert f"interrupted after step {done}, which is saved" in job.said("err")
    (saved,) = checkpoints_in(job.run_dirs()[0] / "checkpoints")
    assert saved.name == f"step_{done}"
    assert_nothing_left(job)
    expected = losses_alone(job, *SMALL, *MIX, "train.steps=3")
    assert job.losses()[:3] == pytest.approx(expected, rel=2e-5)


def test_sigterm_is_the_commands_own(cluster: str) -> None:
    """Ray sets a handler of its own, while it is connected and after."""
    program = f"""
import os, signal
from whale_train.launcher.ranks.on_ray.ray_cluster import connected

signal.signal(signal.SIGTERM, lambda number, frame: print("ours"))
with connected({cluster!r}):
    os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **OPEN},
    )
    assert (done.returncode, done.stdout) == (0, "ours\nours\n"), done.stderr


@pytest.mark.full
def test_nothing_is_left_when_the_command_is_killed(job: Job, cluster: str) -> None:
    start(job, cluster, "train.steps=1000000")
    job.wait_for_step(2)
    job.started[0].send_signal(signal.SIGKILL)
    job.wait()
    assert_nothing_left(job)


def test_what_the_cluster_has_not_is_refused(job: Job, cluster: str) -> None:
    address = cluster.partition(":")[0]
    start(job, cluster, "launcher.placement_s=1", "launcher.threads=2")
    assert job.wait() == [2]
    assert job.said("err").replace("\n  ", " ") == (
        "error: launcher=ray needs {CPU: 4, v100_sxm2_32gb: 2} and {CPU: 4, p100_pcie_16gb: 2}, "
        "and the Ray cluster has not had that free within 1 s: "
        f"{address} has {{CPU: 2, p100_pcie_16gb: 2}}, "
        f"{address} has {{CPU: 2, v100_sxm2_32gb: 2}}, "
        "and free are {CPU: 4, p100_pcie_16gb: 2, v100_sxm2_32gb: 2} of all; add such nodes, end "
        "what holds them, or use the hardware that is there\n"
    )
    job.started.clear()
    start(job, cluster, "launcher.address=127.0.0.1:1")
    assert job.wait() == [2]
    assert job.said("err").replace("\n  ", " ") == (
        "error: launcher.address=127.0.0.1:1 reaches no Ray cluster ([Errno 111] Connection "
        "refused); start one, as `ray start --head`, and give this command on one of its nodes, "
        "with RAY_AUTH_MODE=token if the cluster wants a token\n"
    )
    assert not job.run_dirs()
