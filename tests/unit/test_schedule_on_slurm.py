"""What a job of a schedule asks Slurm for, what is refused, and how its end in Slurm is read."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_started_elsewhere import request_of

from whale_train.errors import ConfigError, Fault
from whale_train.launcher.planning.devices.machine import facts_of
from whale_train.launcher.schedule import slurm_jobs
from whale_train.launcher.schedule.slurm_jobs import (
    SlurmProcess,
    SlurmQueue,
    slurm_starter,
    threads_on_slurm,
)
from whale_train.launcher.schedule.slurm_nodes import SlurmNodes
from whale_train.launcher.slurm.components import component_of
from whale_train.launcher.slurm.slurm_job import SlurmJob
from whale_train.machine.hosts import this_host
from whale_train.strategies.cluster_scheduling.schedulable_job import Allocation
from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.hardware.inventory import read_inventory

SIXES = (
    "hardware=v100_512",
    "hardware.nodes=[{count: 3, devices: 6, device: a100_sxm_80gb, link: nvlink3}]",
)


def nodes_of(*overrides: str) -> SlurmNodes:
    faults: list[Fault] = []
    given = [x for x in overrides if x.startswith("hardware")]
    nodes = SlurmNodes.of(request_of("launcher=slurm", *overrides), given, faults)
    assert nodes is not None, faults
    return nodes


def cluster_of(overrides: Sequence[str]) -> Cluster:
    faults: list[Fault] = []
    content = request_of(*overrides).hardware
    cluster = read_inventory(content, "given", faults, facts_of(this_host(())))
    assert cluster is not None, faults
    return cluster


def test_a_job_has_part_of_a_node_or_whole_nodes() -> None:
    nodes = nodes_of(*SIXES)
    assert nodes.counts() == (1, 2, 3, 4, 5, 6, 12, 18)
    assert [n for n in range(1, 19) if nodes.may_hold(n)] == list(nodes.counts())
    assert [nodes.size(n) for n in (1, 5, 6, 12, 18)] == [(1, 1), (1, 5), (1, 6), (2, 6), (3, 6)]
    assert nodes_of("hardware=cpu", "hardware.devices=4").counts() == (1, 2, 3, 4)
    assert nodes_of("hardware=v100_512").counts() == (
        *range(1, 9),
        *range(16, 65, 8),
        128,
        256,
        512,
    )


@pytest.mark.parametrize("devices", [1, 5, 6, 18])
def test_a_job_is_told_what_it_has_as_an_inventory(devices: int) -> None:
    nodes = nodes_of(*SIXES, "hardware.network=ethernet_10g")
    whole, own = cluster_of(SIXES), cluster_of(nodes.hardware(devices))
    assert own.network.name == "ethernet_10g"
    assert [len(node.devices) for node in own.nodes] == [nodes.size(devices)[1]] * (
        nodes.size(devices)[0]
    )
    assert set(own.kinds) == set(whole.kinds)
    assert {node.link for node in own.nodes} == {whole.nodes[0].link}
    assert nodes_of("hardware=cpu", "hardware.devices=4").hardware(3) == [
        "hardware=cpu",
        "hardware.devices=3",
    ]


def test_gpus_are_asked_for_by_node_unless_a_kind_is_named() -> None:
    def asked(*overrides: str) -> Mapping[str, Any]:
        request = request_of("launcher=slurm", *overrides)
        sbatch = nodes_of(*overrides).launcher(request.launcher, 12).sbatch
        return {key: value for key, value in sbatch.items() if key != "time"}

    assert asked(*SIXES) == {"gpus-per-node": 6}
    assert asked(*SIXES, "launcher.sbatch.qos=low") == {"qos": "low", "gpus-per-node": 6}
    by_task = asked(*SIXES, "launcher.sbatch.gpus_per_task=a100:1")
    assert by_task == {"gpus_per_task": "a100:1"}
    cpus = "hardware.nodes=[{count: 2, devices: 6, device: cpu_process, link: shared_memory}]"
    assert asked("hardware=v100_512", cpus) == {}


def test_nodes_say_how_slurm_gives_them_to_every_job() -> None:
    def sixes(*slurms: str) -> tuple[str, str]:
        device = "devices: 6, device: a100_sxm_80gb, link: nvlink3"
        nodes = ",".join(f"{{{device}, slurm: {{{slurm}}}}}" for slurm in slurms)
        return ("hardware=v100_512", f"hardware.nodes=[{nodes}]")

    request = request_of("launcher=slurm", *sixes("cpus_per_task: 4, partition: new"))
    nodes = nodes_of(*sixes("cpus_per_task: 4, partition: new"))
    options = component_of(request, 1, 3, nodes.slurm).options
    assert (options["partition"], options["cpus-per-task"]) == ("new", 4)
    (node,) = cluster_of(nodes.hardware(3)).nodes
    assert node.slurm == nodes.slurm
    assert threads_on_slurm(request.launcher, node) == ["launcher.threads=4"]
    for slurms, said in (
        (("partition: new", "partition: old"), "hardware=v100_512 has nodes or devices that "
         "differ, and a schedule does not choose Slurm's nodes; use an inventory of equal nodes, "
         "and a schedule for each kind"),
        (("gres: 'gpu:6'",), "hardware.nodes[].slurm.gres=gpu:6 is decided for each job; leave it "
         "out; for a kind of GPU, use launcher.sbatch.gpus-per-task=KIND:1"),
    ):  # fmt: skip
        faults: list[Fault] = []
        assert SlurmNodes.of(request_of("launcher=slurm", *sixes(*slurms)), [], faults) is None
        assert [str(fault) for fault in faults] == [said]


def test_all_that_is_wrong_is_refused_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "scancel" else name)
    request = request_of(
        *("launcher=slurm", "hardware=v100_p100_mix", "launcher.sbatch.time=soon"),
        "launcher.sbatch.gres=gpu:8",
    )
    with pytest.raises(ConfigError) as refused:
        slurm_starter(request, ["hardware=v100_p100_mix"], Path("slurm"))
    assert [str(fault) for fault in refused.value.faults] == [
        "launcher=slurm needs the command scancel, which is not here; run it where jobs are "
        "submitted",
        "launcher.sbatch.time=soon is no time of Slurm's; give minutes, or as 12:00:00 or "
        "2-00:00:00",
        "launcher.sbatch.gres=gpu:8 is decided for each job; leave it out; for a kind of GPU, use "
        "launcher.sbatch.gpus-per-task=KIND:1",
        "hardware=v100_p100_mix has nodes or devices that differ, and a schedule does not choose "
        "Slurm's nodes; use an inventory of equal nodes, and a schedule for each kind",
    ]
    faults: list[Fault] = []
    assert SlurmNodes.of(request_of("launcher=slurm"), ["hardware=local"], faults) is None
    assert [str(fault) for fault in faults] == [
        "hardware=local is what this host has, and the jobs of a schedule run on Slurm's nodes; "
        "use an inventory of those, or hardware=cpu hardware.devices=8"
    ]


class Slurm(SlurmQueue):
    """A Slurm with one job, whose state a test sets; it notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.told = "PENDING", list[str]()

    def state(self, job_id: str) -> str:
        return self.now


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    slurm = Slurm()
    monkeypatch.setattr(slurm_jobs, "notify", lambda job_id: slurm.told.append("notice"))
    monkeypatch.setattr(slurm_jobs, "cancel", lambda job_id: slurm.told.append("cancel"))
    return slurm


def process_in(folder: Path, slurm: Slurm, status: int | None) -> SlurmProcess:
    """Return job 7, whose rank 0 has ended with a status, or not yet."""
    job = SlurmJob("7", folder)
    if status is not None:
        job.status_path.write_text(str(status))
    return SlurmProcess(job, "", slurm, Allocation(1, "dp"), (0,), folder / "run", 0)


@pytest.mark.parametrize(
    ("state", "status", "told", "expected", "said"),
    [
        ("PENDING", None, False, None, ""),
        ("RUNNING", None, True, None, ""),
        ("COMPLETING", 0, False, None, ""),
        ("UNKNOWN", None, False, None, ""),  # Slurm does not answer
        ("COMPLETED", 0, False, "done", ""),
        ("COMPLETED", 0, True, "done", ""),
        ("COMPLETED", 2, False, "refused", ""),
        ("FAILED", None, False, "failed", "job 7 of Slurm ended as FAILED"),
        ("NODE_FAIL", None, False, "failed", "job 7 of Slurm ended as NODE_FAIL"),
        ("COMPLETED", 130, True, "interrupted", ""),
        ("COMPLETED", 130, False, "interrupted", ""),  # Slurm gave the notice
        ("PREEMPTED", None, False, "interrupted", "job 7 of Slurm ended as PREEMPTED"),
        ("FAILED", None, True, "interrupted", "job 7 of Slurm ended as FAILED"),
        ("CANCELLED", None, True, "interrupted", ""),
        ("CANCELLED", 130, False, "failed", "job 7 of Slurm was cancelled, not by the schedule"),
        ("", 0, False, "done", ""),  # Slurm has forgotten it
    ],
)
def test_the_end_of_a_job_by_its_state_and_its_status(
    state: str,
    status: int | None,
    told: bool,
    expected: str | None,
    said: str,
    tmp_path: Path,
    slurm: Slurm,
) -> None:
    process = process_in(tmp_path, slurm, status)
    if told:
        process.stop()
    slurm.now = state
    assert process.ended() == expected
    assert process.is_queued == (state == "PENDING")
    assert process.said() == said
    # The schedule submits again what Slurm has stopped, as what it has stopped itself.
    assert process.is_stopping == (told or expected == "interrupted")


def test_a_notice_is_repeated_until_the_job_has_ended(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(slurm_jobs.time, "monotonic", lambda: clock[0])
    process = process_in(tmp_path, slurm, None)
    slurm.now = "RUNNING"
    process.stop()
    process.stop()
    for clock[0] in (102.0, 104.0, 106.0):
        assert process.ended() is None
    assert slurm.told == ["notice", "notice"]  # the second after five seconds
    (tmp_path / "7.status").write_text("130")  # rank 0 ends before any step: nothing is to be saved
    for clock[0] in (120.0, 140.0):
        assert process.ended() is None
    assert slurm.told == ["notice", "notice", "cancel"]
    slurm.now = "CANCELLED"
    assert process.ended() == "interrupted"
