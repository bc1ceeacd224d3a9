"""Which card each rank opens, and what is said where an inventory's devices are not here."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit import nvml_machines as machines
from tests.unit.nvml_machines import Card, Nvml
from tests.unit.operation_graphs import gpt
from tests.unit.plan_requests import shipped, training

from whale_train.config import Request, read_request
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.command_line import composed
from whale_train.launcher.planning.architectures import faults_of
from whale_train.launcher.planning.devices_here import said_of_figures, seated, where
from whale_train.launcher.planning.machine import facts_of
from whale_train.launcher.planning.nvml import visible_gpus
from whale_train.runtime.process.rank_main import _device
from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.hardware.inventory import MachineFacts, read_inventory
from whale_train.strategies.resolver.resolve import resolve


@pytest.fixture(autouse=True)
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def machine(*cards: Card) -> MachineFacts:
    return facts_of(visible_gpus(Nvml(cards)))


def inventory(*nodes: tuple[int, Any], there: MachineFacts) -> Cluster:
    listed = [{"devices": n, "device": device, "link": "pcie3_x16"} for n, device in nodes]
    faults: list[Fault] = []
    mapping = {"nodes": listed, "network": "ethernet_10g"}
    cluster = read_inventory(mapping, "mine", faults, there)
    assert cluster is not None, faults
    return cluster


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
    there = machine(*cards)
    cluster = inventory(*nodes, there=there)
    for kind in ("auto", "local"):
        assert where(request(f"launcher={kind}"), cluster, there) == ("cuda", False)
    assert where(request("launcher=emulate"), cluster, there) == ("cpu", True)


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
            "hardware=mine has 2 hosts, and this host has 8 x v100_sxm2_32gb; use "
            "launcher=emulate, or hardware=local",
        ),
    ],
)
def test_gpus_that_do_not_fit_are_refused(cards: Sequence[Card], nodes: Any, said: str) -> None:
    """Not left idle, while CPU processes stand for others."""
    there = machine(*cards)
    cluster = inventory(*nodes, there=there)
    for kind in ("auto", "local"):
        with pytest.raises(ConfigError) as refused:
            where(request(f"launcher={kind}"), cluster, there)
        assert [str(fault) for fault in refused.value.faults] == [said]
    assert where(request("launcher=emulate"), cluster, there) == ("cpu", True)
    assert where(request("mode=plan"), cluster, there) == ("cpu", True)


def test_where_there_is_no_gpu_processes_stand_for_them() -> None:
    there = facts_of(())
    cluster = inventory((2, "t4_16gb"), there=there)
    assert where(request(), cluster, there) == ("cpu", True)
    with pytest.raises(ConfigError) as refused:
        where(request("launcher=local"), cluster, there)
    assert [str(fault) for fault in refused.value.faults] == [
        "launcher=local needs the devices of hardware=mine, and this machine has no GPU; use "
        "launcher=emulate, or hardware=local"
    ]


def test_processes_are_wanted_as_they_are() -> None:
    there = machine(*FOUR_T4)
    cluster = inventory((2, "cpu_process"), there=there)
    assert where(request("launcher=local"), cluster, there) == ("cpu", False)


def test_each_rank_has_a_card_of_its_kind() -> None:
    there = machine(machines.P100, machines.V100_PCIE_16, machines.P100, machines.V100_PCIE_16)
    faults: list[Fault] = []
    cluster = read_inventory({"kind": "local"}, "local", faults, there)
    assert cluster is not None
    used = cluster.of_kinds({"v100_pcie_16gb": 2, "p100_pcie_16gb": 1})
    plan = seated(resolve(shipped("dp"), used, gpt(), training(48)), used, there)
    assert [(rank.device, rank.uuid) for rank in plan.ranks] == [
        ("p100_pcie_16gb", "GPU-00000000-aaaa"),
        ("v100_pcie_16gb", "GPU-00000001-aaaa"),
        ("v100_pcie_16gb", "GPU-00000003-aaaa"),
    ]
    assert type(plan).from_json(plan.to_json()) == plan


def test_a_plan_says_whose_figures_are_not_the_catalogue_s() -> None:
    there = machine(machines.RTX_8000, machines.T4)
    cluster = read_inventory({"kind": "local"}, "local", [], there)
    assert cluster is not None
    (said,) = said_of_figures(cluster)
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
                "install a torch that was (README, Hardware)"
            ],
        ),
        (
            machines.H100,
            ["sm_100a"],
            [
                "hardware=h100_sxm_80gb is of architecture sm_90, for which torch 2.13.0+cu130 was "
                "not built (it was for sm_100a); install a torch that was (README, Hardware)"
            ],
        ),
        (
            machines.H100,
            [],
            [
                "hardware=h100_sxm_80gb cannot be used by torch 2.13.0+cu130, which was built "
                "without CUDA; install a torch that was (README, Hardware)"
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
    cluster = inventory((2, "t4_16gb"), there=host)
    plan = seated(resolve(shipped("dp"), cluster, gpt(), training(48)), cluster, host)
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
