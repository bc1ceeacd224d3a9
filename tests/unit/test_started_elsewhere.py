"""How many ranks start where, of those that the launcher starts on other hosts."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from whale_train.config import Request, read_request
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.compose.command_line import composed, rewritten
from whale_train.launcher.ranks.rank_env import starter_of
from whale_train.launcher.ranks.ranks_on import ranks_on
from whale_train.launcher.slurm.components import minutes
from whale_train.launcher.slurm.slurm_job import SlurmJob
from whale_train.launcher.slurm.submit import Submission
from whale_train.machine.hosts import Seen

MIX = "hardware=v100_p100_mix"
V100 = "{devices: 8, device: v100_sxm2_32gb, link: nvlink2}"
P100 = "devices: 8, device: p100_pcie_16gb, link: pcie3_x16"
OLD = "++hardware.nodes.1.slurm={partition: old}"


def request_of(*overrides: str) -> Request:
    names = [text.split("=") for text in overrides if text.startswith("hardware=")]
    return read_request(composed(rewritten(overrides)), dict([["hardware", "local"], *names]))


def on_slurm(*overrides: str) -> list[tuple[int, int]]:
    """Return the nodes of every component of a request's job, and the ranks on each node."""
    found = Submission.of(request_of("launcher=slurm", *overrides), ["a=b"], Path("runs"))
    assert found.arguments == ("a=b", "launcher.kind=auto")
    return [(component.nodes, component.ranks_per_node) for component in found.components]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)


def seen(*cores: int) -> Sequence[Seen]:
    return [Seen(str(n), f"host{n}", count, 10**9, ()) for n, count in enumerate(cores)]


def over_ssh(*overrides: str) -> Request:
    return request_of("launcher=ssh", "launcher.hosts=[a,b]", *overrides)


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        ([MIX], [(2, 8)]),
        ([MIX, "hardware.nodes.1.devices=4"], [(1, 8), (1, 4)]),
        ([MIX, OLD], [(1, 8), (1, 8)]),
        (
            [MIX, f"hardware.nodes=[{V100},{{count: 2, {P100}}},{{{P100}, slurm: {{mem: 9}}}}]"],
            [(3, 8), (1, 8)],
        ),
        ([MIX, "launcher.nodes=4", "launcher.ranks_per_node=4"], [(4, 4)]),
        (["hardware=cpu", "hardware.devices=4"], [(1, 4)]),
        (["hardware=cpu", "hardware.devices=4", "launcher.nodes=2"], [(2, 2)]),
        (["launcher.nodes=2", "launcher.ranks_per_node=8"], [(2, 8)]),
    ],
)
def test_a_job_of_slurm_has_the_inventorys_size(
    overrides: list[str], size: list[tuple[int, int]], slurm: None
) -> None:
    assert on_slurm(*overrides) == size


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["launcher.nodes=2"],
            "launcher.ranks_per_node=null is not known of hardware=local, on 2 nodes; say it, as "
            "launcher.ranks_per_node=8",
        ),
        (
            ["hardware=cpu", "hardware.devices=3", "launcher.nodes=2"],
            "launcher.ranks_per_node=null is not known of hardware=cpu, on 2 nodes; say it, as "
            "launcher.ranks_per_node=8",
        ),
        (
            [MIX, OLD, "launcher.nodes=4"],
            "launcher.nodes=4 makes all nodes alike, and those of hardware=v100_p100_mix differ in "
            "slurm; leave it out, or give all nodes the same slurm",
        ),
    ],
)
def test_a_job_without_a_size_is_refused(overrides: list[str], said: str, slurm: None) -> None:
    with pytest.raises(ConfigError) as error:
        on_slurm(*overrides)
    assert [str(fault) for fault in error.value.faults] == [said]


def test_where_there_is_no_slurm_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError) as error:
        on_slurm(MIX)
    assert [str(fault) for fault in error.value.faults] == [
        f"launcher=slurm needs the command {name}, which is not here; run it where jobs are "
        "submitted"
        for name in ("sbatch", "squeue")
    ]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        *(("90", 90), ("90:30", 91), ("12:00:00", 720), ("0:30", 1)),
        *(("2-00", 2880), ("1-02:30", 1590), ("1-00:00:30", 1441)),
    ],
)
def test_times_are_slurms(written: str, expected: int) -> None:
    faults: list[Fault] = []
    request = request_of("launcher=slurm", f"launcher.sbatch.time='{written}'")
    assert minutes(request, faults) == expected
    assert not faults


def test_how_a_job_ended_is_what_it_said_last(tmp_path: Path) -> None:
    job = SlurmJob("7", tmp_path)
    assert (job.summary(), job.last_lines(), job.status()) == ("", "", 1)  # it never began
    job.stdout.write_text("step 1/1  loss 1\n")
    assert job.summary() == ""
    job.stdout.write_text("step 1/1\ndone: 1 steps\nthe trained model: m\n")
    assert job.summary() == "done: 1 steps\nthe trained model: m"
    job.stderr.write_text("srun: error: x\nerror: y\nslurmstepd-apple: error: z\n")
    assert job.last_lines() == "error: y"
    job.status_path.write_text("-9\n")
    assert job.status() == 1
    job.status_path.write_text("130\n")
    assert job.status() == 130


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        ([MIX], [8, 8]),
        (["hardware=cpu", "hardware.devices=5"], [3, 2]),
        (["hardware=cpu", "hardware.devices=auto"], [4, 2]),
        (["hardware=local"], [4, 2]),
    ],
)
def test_every_host_has_its_ranks(overrides: list[str], ranks: list[int]) -> None:
    assert ranks_on(over_ssh(*overrides), ["a", "b"], seen(4, 2)) == ranks


def test_hosts_that_are_too_many_are_refused() -> None:
    for overrides, said in (
        ([MIX], "launcher.hosts=a, b, c are 3, and hardware=v100_p100_mix has 2 nodes; name a host "
         "for each node, in their order"),
        (["hardware=cpu", "hardware.devices=2"],
         "launcher.hosts=a, b, c are 3, and hardware=cpu has 2 processes; name fewer hosts"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            ranks_on(over_ssh(*overrides), ["a", "b", "c"], seen(1, 1, 1))
        assert [str(fault) for fault in error.value.faults] == [said]


@pytest.mark.parametrize(
    ("environment", "starter"),
    [
        ({"RANK": "1", "TORCHELASTIC_RUN_ID": "none"}, "torchrun"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "srun"),
        ({"RANK": "1", "WHALE_TRAIN_STARTER": "whale-train"}, "whale-train"),
        ({"RANK": "1"}, ""),
        ({}, ""),
    ],
)
def test_ranks_end_with_a_starter_that_lives_as_long(
    environment: dict[str, str], starter: str
) -> None:
    """A shell that has set variables and started ranks may end before them."""
    assert starter_of(environment) == starter
