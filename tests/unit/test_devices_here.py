"""Which card each rank opens, and what is said where an inventory's devices are not here."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.unit import nvml_machines as machines
from tests.unit.nvml_machines import Card, Nvml
from tests.unit.operation_graphs import gpt
from tests.unit.plan_requests import shipped, training

from whale_train.config import Request, read_request
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.compose.command_line import composed
from whale_train.launcher.planning.architectures import faults_of
from whale_train.launcher.planning.devices.devices_here import (
    HostPlacement,
    assign_devices,
    explain_device_figures,
    joined_cluster,
    processes_joined,
    refuse_other_order,
    where,
)
from whale_train.launcher.planning.devices.machine import facts_of
from whale_train.machine.hosts import Host, Seen, joined, this_host
from whale_train.machine.nvml import visible_gpus
from whale_train.runtime.process.rank_main import _device
from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.hardware.inventory import read_inventory
from whale_train.strategies.hardware.write_inventory import inventory_of
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.resolver.resolve import resolve


@pytest.fixture(autouse=True)
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def machine(*cards: Card) -> Host:
    return this_host(visible_gpus(Nvml(cards)))


def inventory(*nodes: tuple[int, Any]) -> Cluster:
    listed = [{"devices": n, "device": device, "link": "pcie3_x16"} for n, device in nodes]
    return read({"nodes": listed, "network": "ethernet_10g"}, machine())


def read(mapping: Mapping[str, object], there: Host) -> Cluster:
    faults: list[Fault] = []
    cluster = read_inventory(mapping, "mine", faults, facts_of(there))
    assert cluster is not None, faults
    return cluster


def started(**cards_of_ranks: Sequence[Sequence[Card]]) -> tuple[Host, ...]:
    """Hosts by name, and for each of their ranks the cards that it sees of its host's."""
    seen = []
    for name, ranks in cards_of_ranks.items():
        every = list(dict.fromkeys(id(card) for rank in ranks for card in rank))
        for rank in ranks:
            cards = []
            for card in rank:
                (gpu,) = visible_gpus(Nvml([card]))
                uuid = f"GPU-{name}-{every.index(id(card))}"
                cards.append(replace(gpu, uuid=uuid, bus=uuid))
            seen.append(Seen(name, name, 8, 10**11, tuple(cards)))
    return joined(Seen.from_json(each.to_json()) for each in seen)


def request(*overrides: str) -> Request:
    return read_request(composed([*overrides]), {"hardware": "mine"})


def own(name: str, memory_bytes: float) -> dict[str, object]:
    figures = {"flops": {"fp32": 1.9e13}, "memory_bandwidth_bytes_s": 6e11}
    return {"name": name, "memory_bytes": memory_bytes, **figures}


FOUR_T4 = [machines.T4] * 4
V100S = (8, "v100_sxm2_32gb"), (8, "p100_pcie_16gb")


@pytest.mark.parametrize(
    ("cards", "nodes"),
    [
        (FOUR_T4, [(4, "t4_16gb")]),
        (FOUR_T4, [(2, "t4_16gb")]),
        ([machines.P100, machines.T4, machines.T4], [(2, "t4_16gb")]),
        ([machines.RTX_8000] * 2, [(2, own("our_card", 48e9))]),
        ([machines.RTX_8000] * 2, [(1, own("quadro_rtx_8000_48gb", 48e9))]),
    ],
)
def test_an_inventory_that_is_here_is_used(cards: Sequence[Card], nodes: Any) -> None:
    there, cluster = [machine(*cards)], inventory(*nodes)
    for kind in ("auto", "local"):
        place = where(request(f"launcher={kind}"), cluster, there)
        assert (place.device, place.emulated) == ("cuda", False)
        assert place.cluster.devices == cluster.devices
    assert where(request("launcher=emulate"), cluster, there) == HostPlacement(cluster, "cpu", True)


@pytest.mark.parametrize(
    ("cards", "nodes", "said"),
    [
        (
            *(FOUR_T4, [(8, "t4_16gb")]),
            "hardware=mine is 8 x t4_16gb, and this host has 4 x t4_16gb; use launcher=emulate, or "
            "hardware=local",
        ),
        (
            *([machines.P100, *FOUR_T4], [(4, "v100_sxm2_16gb")]),
            "hardware=mine is 4 x v100_sxm2_16gb, and this host has 1 x p100_pcie_16gb and 4 x "
            "t4_16gb; use launcher=emulate, or hardware=local",
        ),
        (
            *([machines.V100_16] * 8, [(8, "v100_sxm2_32gb")]),
            "hardware=mine is 8 x v100_sxm2_32gb, and this host has 8 x v100_sxm2_16gb; use "
            "launcher=emulate, or hardware=local",
        ),
        (
            *([machines.RTX_8000] * 2, [(2, own("our_card", 64e9))]),
            "hardware=mine has our_card of 64.0 GB, and this host's quadro_rtx_8000_48gb has 51.5 "
            "GB; use launcher=emulate, or hardware=local",
        ),
        (
            *([machines.V100_32] * 8, V100S),
            "hardware.nodes[1]=8 x p100_pcie_16gb is none of the hosts: no host is left; use "
            "launcher=emulate, or hardware=local",
        ),
    ],
)
def test_gpus_that_do_not_fit_are_refused(cards: Sequence[Card], nodes: Any, said: str) -> None:
    """Not left idle, while CPU processes stand for others."""
    there, cluster = [machine(*cards)], inventory(*nodes)
    for kind in ("auto", "local"):
        assert refused(cluster, there, f"launcher={kind}") == [said]
    for override in ("launcher=emulate", "mode=plan"):
        assert where(request(override), cluster, there) == HostPlacement(cluster, "cpu", True)


def refused(cluster: Cluster, there: Sequence[Host], *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        where(request(*overrides), cluster, there)
    return [str(fault) for fault in error.value.faults]


def test_where_there_is_no_gpu_processes_stand_for_them() -> None:
    there, cluster = [machine()], inventory((2, "t4_16gb"))
    assert where(request(), cluster, there) == HostPlacement(cluster, "cpu", True)
    assert refused(cluster, there, "launcher=local") == [
        "launcher=local needs the devices of hardware=mine, and this machine has no GPU; use "
        "launcher=emulate, or hardware=local"
    ]


def test_processes_are_wanted_as_they_are() -> None:
    cluster = inventory((2, "cpu_process"))
    there = [machine(*FOUR_T4)]
    assert where(request("launcher=local"), cluster, there) == HostPlacement(cluster, "cpu", False)


def planned(place: HostPlacement, there: Sequence[Host], used: Cluster | None = None) -> Plan:
    used = used or place.cluster
    return assign_devices(resolve(shipped("dp"), used, gpt(), training(48)), used, there)


def test_each_rank_has_a_card_of_its_kind() -> None:
    there = machine(machines.P100, machines.V100_PCIE_16, machines.P100, machines.V100_PCIE_16)
    place = where(request(), read({"kind": "local"}, there), [there])
    used = place.cluster.of_kinds({"v100_pcie_16gb": 2, "p100_pcie_16gb": 1})
    plan = planned(place, [there], used)
    assert [(rank.device, rank.uuid) for rank in plan.ranks] == [
        ("p100_pcie_16gb", "GPU-00000000-aaaa"),
        ("v100_pcie_16gb", "GPU-00000001-aaaa"),
        ("v100_pcie_16gb", "GPU-00000003-aaaa"),
    ]
    assert type(plan).from_json(plan.to_json()) == plan


def two_of(card: Card) -> list[list[Card]]:
    """Two ranks that see two cards."""
    cards = [replace(card), replace(card)]
    return [cards, cards]


P100S, V100_32S = two_of(machines.P100), two_of(machines.V100_32)


def test_nodes_are_the_hosts_that_have_their_devices() -> None:
    """Ranks are numbered by host, and srun sorts hosts by name: the inventory's order gives way."""
    there = started(apple=P100S, pear=V100_32S)
    cluster = inventory((2, "v100_sxm2_32gb"), (2, "p100_pcie_16gb"))
    place = where(request(), cluster, there)
    assert (place.device, place.emulated) == ("cuda", False)
    assert [node.at for node in place.cluster.nodes] == ["apple", "pear"]
    assert [(rank.node, rank.device, rank.uuid) for rank in planned(place, there).ranks] == [
        (0, "p100_pcie_16gb", "GPU-apple-0"),
        (0, "p100_pcie_16gb", "GPU-apple-1"),
        (1, "v100_sxm2_32gb", "GPU-pear-0"),
        (1, "v100_sxm2_32gb", "GPU-pear-1"),
    ]


def test_ranks_that_see_one_card_each_open_it() -> None:
    """As under srun --gpus-per-task=1."""
    there = started(pear=[[replace(machines.T4)], [replace(machines.T4)]])
    place = where(request(), inventory((2, "t4_16gb")), there)
    assert [rank.uuid for rank in planned(place, there).ranks] == ["GPU-pear-0", "GPU-pear-1"]


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (
            started(pear=V100_32S),
            "hardware.nodes[1]=2 x p100_pcie_16gb is none of the hosts: no host is left; use "
            "launcher=emulate, or hardware=local",
        ),
        (
            started(pear=V100_32S, apple=two_of(machines.T4)),
            "hardware.nodes[1]=2 x p100_pcie_16gb is none of the hosts: apple has 2 x t4_16gb and "
            "2 ranks; use launcher=emulate, or hardware=local",
        ),
        (
            started(pear=V100_32S, apple=P100S[:1]),
            "hardware.nodes[1]=2 x p100_pcie_16gb is none of the hosts: apple has 2 x "
            "p100_pcie_16gb; use launcher=emulate, or hardware=local",
        ),
        (
            started(pear=V100_32S, plum=P100S, apple=[[], []]),
            "hardware=mine has 2 hosts, and ranks are on 3: apple has no GPU and 2 ranks; start "
            "ranks on its hosts alone",
        ),
    ],
    ids=["a host is missing", "another card", "a rank too few", "a host too many"],
)
def test_hosts_that_do_not_fit_are_named(there: tuple[Host, ...], said: str) -> None:
    cluster = inventory((2, "v100_sxm2_32gb"), (2, "p100_pcie_16gb"))
    assert refused(cluster, there) == [said]


def test_nodes_are_emulated_on_hosts_with_as_many_ranks() -> None:
    cluster = inventory((3, "v100_sxm2_32gb"), (2, "p100_pcie_16gb"))
    there = started(pear=[[], []], apple=[[], [], []])
    place = where(request(), cluster, there)
    assert (place.device, place.emulated) == ("cpu", True)
    assert [(node.at, len(node.devices)) for node in place.cluster.nodes] == [
        *(("pear", 2), ("apple", 3))
    ]
    assert where(request(), cluster, started(pear=[[]] * 5)) == HostPlacement(cluster, "cpu", True)


def test_processes_have_the_memory_of_their_hosts() -> None:
    cluster = read({"kind": "cpu", "devices": 3}, machine())
    seen = [Seen("0", "pear", 2, 6 * 10**9, ()), Seen("1", "fig", 2, 8 * 10**9, ())]
    there = joined([seen[0], seen[1], seen[1]])
    found = processes_joined(cluster, there)
    assert [(node.at, len(node.devices)) for node in found.nodes] == [("0", 1), ("1", 2)]
    assert [device.memory_bytes for device in found.devices] == [6e9, 4e9, 4e9]
    assert processes_joined(cluster, there[:1]) is cluster  # all on one, or not as many


def test_hosts_that_nodes_cannot_be_emulated_on_are_named() -> None:
    cluster = inventory((3, "v100_sxm2_32gb"), (2, "p100_pcie_16gb"))
    for there, said in (
        (started(pear=[[], []], apple=[[]] * 4), "2 and 4 ranks; start as many ranks on each host "
         "as a node has devices (pear: 2, apple: 4)"),
        (started(pear=[[]] * 3, apple=[[]], fig=[[]]), "3, 1 and 1 ranks; start as many ranks on "
         "each host as a node has devices (pear: 3, apple: 1, fig: 1)"),
    ):  # fmt: skip
        expected = f"hardware=mine has nodes of 3 and 2 devices, and the hosts {said}"
        assert refused(cluster, there, "launcher=emulate") == [expected]


def test_what_joined_is_the_cluster() -> None:
    there = started(apple=P100S, pear=V100_32S[:1])
    cluster = joined_cluster("local", there)
    assert [[device.name for device in node.devices] for node in cluster.nodes] == [
        *(["p100_pcie_16gb", "p100_pcie_16gb"], ["v100_sxm2_32gb"])
    ]
    with pytest.raises(ConfigError) as error:
        joined_cluster("local", started(apple=P100S, pear=[[], []]))
    assert [str(fault) for fault in error.value.faults] == [
        "hardware=local has no GPU and 2 ranks on pear: every rank wants a GPU of its own; start "
        "as many ranks on a host as it has GPUs"
    ]


def test_ranks_that_a_strategy_numbers_otherwise_are_refused() -> None:
    there = started(apple=P100S, pear=V100_32S)
    place = where(request(), joined_cluster("local", there), there)
    faults: list[Fault] = []
    refuse_other_order(place.cluster, there, faults)
    assert faults == []
    used = place.cluster.of_kinds({"v100_sxm2_32gb": 2, "p100_pcie_16gb": 2})
    refuse_other_order(used, there, faults)
    assert [str(fault) for fault in faults] == [
        "strategy.devices=v100_sxm2_32gb: 2, p100_pcie_16gb: 2 numbers the ranks otherwise than "
        "they were started on the hosts; use a number of devices, or null"
    ]


def test_a_plan_says_whose_figures_are_not_the_catalogue_s() -> None:
    (said,) = explain_device_figures(
        read({"kind": "local"}, machine(machines.RTX_8000, machines.T4))
    )
    assert (said.key, said.chosen, said.reason) == (
        "hardware",
        "quadro_rtx_8000_48gb by its properties",
        "the catalogue does not have it; mode=calibrate measures it",
    )


CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("card", "flags", "said"),
    [
        (machines.T4, CUDA_13, []),
        (machines.L4, CUDA_13, []),  # what is built for 8.6 runs on 8.9
        (replace(machines.RTX_5090, capability=(13, 0)), CUDA_13, []),  # compiled by its driver
        (machines.B200, ["sm_100a"], []),
        (
            machines.V100_32,
            CUDA_13,
            [
                "hardware=v100_sxm2_32gb is of architecture sm_70, for which torch 2.13.0+cu130 "
                "was not built (it was for sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120); "
                "install a torch that was (docs/mixed_cluster.md)"
            ],
        ),
        (
            machines.H100,
            ["sm_100a"],
            [
                "hardware=h100_sxm_80gb is of architecture sm_90, for which torch 2.13.0+cu130 was "
                "not built (it was for sm_100a); install a torch that was (docs/mixed_cluster.md)"
            ],
        ),
        (
            machines.H100,
            [],
            [
                "hardware=h100_sxm_80gb cannot be used by torch 2.13.0+cu130, which was built "
                "without CUDA; install a torch that was (docs/mixed_cluster.md)"
            ],
        ),
    ],
)
def test_architectures_that_torch_was_not_built_for(
    card: Card, flags: list[str], said: list[str]
) -> None:
    cards = visible_gpus(Nvml([card, card]))
    assert [str(fault) for fault in faults_of(cards, "2.13.0+cu130", flags)] == said


@pytest.mark.parametrize("there", [1, 0])
def test_a_rank_opens_its_own_card(
    there: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = machine(*FOUR_T4)
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK"):  # which a rank changes
        monkeypatch.setenv(name, "1")
    plan = planned(where(request(), inventory((2, "t4_16gb")), [host]), [host])
    (tmp_path / "plan.json").write_text(plan.to_json())
    (tmp_path / "launch.json").write_text(json.dumps({"device": "cuda"}))
    set_to: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda, "set_device", set_to.append)
    if there:
        assert _device(tmp_path, 1) == torch.device("cuda", 0)
        assert set_to == [torch.device("cuda", 0)]
    else:
        said = r"puts rank 1 on GPU-00000001-aaaa \(t4_16gb\), which is not on this host"
        with pytest.raises(RuntimeError, match=said):
            _device(tmp_path, 1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-00000001-aaaa"
    assert os.environ["LOCAL_RANK"] == "0"


def test_what_joined_is_an_inventory_one_can_keep() -> None:
    there = started(apple=two_of(machines.RTX_8000), pear=two_of(machines.RTX_8000), plum=V100_32S)
    cluster = joined_cluster("mine", there)
    written = inventory_of(cluster)
    assert [node["count"] for node in written["nodes"]] == [2, 1]
    again = read(yaml.safe_load(yaml.safe_dump(written)), machine())
    assert again == replace(cluster, nodes=tuple(replace(node, at="") for node in cluster.nodes))
    mixed = read({"kind": "local"}, machine(machines.T4, machines.P100))
    written = inventory_of(mixed)
    assert written["nodes"][0]["device"] == ["t4_16gb", "p100_pcie_16gb"]
    assert read(written, machine()) == mixed
