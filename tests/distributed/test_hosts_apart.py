"""Two hosts that share no files, joined by a slow link, and a node of the inventory on each.

Not every run of the tests has all of them: test_on_slurm and test_over_ssh show between such hosts
that losses are those of one host, and that what all hold is saved.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml
from tests.distributed.apart import HostApart, can_be_apart
from tests.distributed.jobs import COMMAND, MIXED, Job, losses_alone

from whale_train.checkpoints.checkpoint_files import check, checkpoints_in

pytestmark = pytest.mark.skipif(not can_be_apart(), reason="needs root, to make namespaces")

PORT = 29411  # of a host that nobody else is on
MIX = (
    "hardware=v100_p100_mix",
    "hardware.nodes=[{devices: 2, device: v100_sxm2_32gb, link: nvlink2},"
    "{devices: 1, device: p100_pcie_16gb, link: pcie3_x16}]",
)
SMALL = [word for word in COMMAND if not word.startswith(("strategy", "hardware"))]


def start(
    job: Job,
    hosts: list[HostApart],
    ranks: tuple[int, int],
    *overrides: str,
    hardware: tuple[str, ...] = MIX,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """As torchrun starts ranks of another number on every host."""
    first = 0
    for number, (host, count) in enumerate(zip(hosts, ranks, strict=True)):
        for local in range(count):
            place = {
                **{"RANK": first + local, "WORLD_SIZE": sum(ranks), "GROUP_RANK": number},
                **{"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": PORT},
            }
            variables = {key: str(value) for key, value in place.items()}
            own = {"MASTER_ADDR": "apple", "WHALE_TRAIN_SECRET": "5" * 64}
            inside = host.command()
            job.start(
                *SMALL,
                *hardware,
                *overrides,
                environment={**variables, **own, **environment},
                inside=inside,
            )
        first += count


@pytest.mark.full
def test_nothing_but_the_network_is_shared(job: Job, hosts: list[HostApart]) -> None:
    """Checkpoints and weights come to rank 0, and go back to the other host."""
    run = ("hydra.run.dir=runs/a/b", "checkpoint.every=2", "train.trace=true")
    start(job, hosts, (2, 1), "strategy=zero1", "train.steps=4", *run)
    assert job.wait() == [0, 0, 0], job.said("err")
    said = job.said("out")
    assert "pear: not this file system; logs stay there" in said
    assert "3 devices of v100_p100_mix as CPU processes over gloo on 2 hosts" in said
    (run_dir,) = job.run_dirs()
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == [
        *("host.log", "rank_0.log", "rank_1.log")
    ]
    there = f"/proc/{hosts[1].pid}/root{run_dir}"
    assert sorted(path.name for path in Path(there, "logs").iterdir()) == ["rank_2.log"]
    assert [path.name for path in checkpoints_in(run_dir / "checkpoints")] == ["step_4", "step_2"]
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2}
    job.started.clear()
    more = ("strategy=dp", "train.steps=6", "train.resume=auto", *run)
    start(job, hosts, (2, 1), *more)
    assert job.wait() == [0, 0, 0], job.said("err")
    assert check(checkpoints_in(run_dir / "checkpoints")[0]).step == 6
    assert (run_dir / "model" / "model.safetensors").exists()
    assert not Path(there, ".fetched").exists()
    job.assert_nothing_left()
    expected = losses_alone(job, *SMALL, *MIX, "strategy=dp", "train.steps=6")
    assert job.losses() == pytest.approx(expected, rel=2e-5)


@pytest.mark.full
def test_a_plan_over_hosts_is_verified(job: Job, hosts: list[HostApart]) -> None:
    """What its ranks hold comes to rank 0, which compares with one process of its own host."""
    start(job, hosts, (2, 1), "strategy=zero3", "mode=verify", "train.steps=4")
    assert job.wait() == [0, 0, 0], job.said("err")
    (run_dir,) = job.run_dirs()
    assert (run_dir / "verify.json").exists()
    assert {path.name for path in (run_dir / "verify").glob("rank_2*")} == {
        *("rank_2.json", "rank_2.safetensors")
    }
    job.assert_nothing_left()


@pytest.mark.full
def test_what_joins_hosts_is_measured(job: Job, hosts: list[HostApart]) -> None:
    """And the devices of each, in files of the user's on rank 0's host."""
    kept = {"WHALE_TRAIN_CALIBRATIONS": str(job.folder / "kept")}
    hardware = ("hardware=cpu", "hardware.devices=2")
    start(job, hosts, (1, 1), "mode=calibrate", hardware=hardware, environment=kept)
    assert job.wait() == [0, 0], job.said("err")
    said = job.said("out")
    assert "measuring 2 x cpu_process" in said
    network = yaml.safe_load(said.splitlines()[-1])["network"]
    assert 1e7 < network["bandwidth_bytes_s"] < 1.5e8  # 1 Gbit/s, of which a ring has most
    (path,) = (job.folder / "kept").iterdir()
    found = yaml.safe_load(path.read_text())
    assert (found["ranks"], found["link"]) == (2, None)  # one on each host
    job.assert_nothing_left()


def test_a_host_that_ends_is_named(job: Job, hosts: list[HostApart]) -> None:
    start(job, hosts, (2, 1), "strategy=dp", "train.steps=1000000")
    job.wait_for_step(3)
    hosts[1].kill()
    assert job.wait()[:2] == [1, 1]
    said = job.said("err")
    assert re.match(r"error: host pear failed at step \d+:\nended without a word", said), said
    job.assert_nothing_left()


@pytest.mark.full
def test_what_a_host_lacks_is_said_of_it(job: Job, hosts: list[HostApart]) -> None:
    """By whoever waits for its ranks, long before that wait (launcher.timeout_s) would be over."""
    (job.folder / "text.txt").write_text("what only the first host has. " * 1000)
    start(job, hosts, (2, 1), "strategy=dp", f"data.path={job.folder}/text.txt")
    assert job.wait() == [1, 1, 1]
    said = job.said("err")
    assert "error: rank 2 (p100_pcie_16gb, node 1, TaskGraph model) failed:\n" in said
    assert f"{job.folder}/text.txt" in said
    assert "Its log: logs/rank_2.log, on host pear" in said
    job.assert_nothing_left()


@pytest.mark.full
def test_the_mix_of_eight_and_eight(job: Job, hosts: list[HostApart]) -> None:
    """As torchrun starts it: `whale-train strategy=hybrid_split_dp hardware=v100_p100_mix`."""
    where = ("--nnodes=2", "--nproc-per-node=8", "--rdzv-id=mix", "--rdzv-backend=c10d")
    for host in hosts:
        job.start(
            *("-m", "torch.distributed.run", *where, f"--rdzv-endpoint=apple:{PORT}", *MIXED),
            environment={"WHALE_TRAIN_SECRET": "5" * 64},
            inside=host.command(),
        )
    assert job.wait(600.0) == [0, 0], job.said("err")
    assert job.losses() == pytest.approx(losses_alone(job, *MIXED), rel=2e-5)
    job.assert_nothing_left()
