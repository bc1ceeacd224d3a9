"""What each job of a schedule on Ray is told: its part of the inventory, and its Ray nodes."""

import pytest
from tests.unit.test_started_elsewhere import request_of

from whale_train.errors import ConfigError
from whale_train.launcher.ranks.stop_signals import StopSignals
from whale_train.launcher.schedule.ray_jobs import RayStarter, nodes_with, ray_starter

V100 = {"count": 2, "devices": 2, "device": "v100_sxm2_32gb", "link": "nvlink2"}
MIXED = {"devices": 3, "device": ["p100_pcie_16gb", "t4", "t4"], "link": "pcie3_x16"}


@pytest.mark.parametrize(
    ("slots", "parts", "numbers"),
    [
        ((0, 1), [(2, "v100_sxm2_32gb")], [0]),
        ((1, 2), [(1, "v100_sxm2_32gb"), (1, "v100_sxm2_32gb")], [0, 1]),
        ((3, 5, 6), [(1, "v100_sxm2_32gb"), (2, ["t4", "t4"])], [1, 2]),
        ((4,), [(1, ["p100_pcie_16gb"])], [2]),
    ],
)
def test_a_job_has_the_nodes_of_its_devices(
    slots: tuple[int, ...], parts: list[tuple[int, object]], numbers: list[int]
) -> None:
    nodes, found = nodes_with([V100, MIXED], slots)
    assert [(node["devices"], node["device"]) for node in nodes] == parts
    assert {node["count"] for node in nodes} == {1}
    assert found == numbers


def test_a_job_is_placed_where_its_devices_are() -> None:
    starter = RayStarter((), (V100, MIXED), {"placement_s": 9.0}, ("id0", "id1", "id2"))
    assert starter.devices((2, 3, 4)) == [
        "hardware.nodes=[{count: 1,devices: 2,device: v100_sxm2_32gb,link: nvlink2},"
        "{devices: 1,device: [p100_pcie_16gb],link: pcie3_x16,count: 1}]",
        "launcher.placement_s=9.0",
        "launcher.hosts=[id1,id2]",
    ]
    starter = RayStarter((), (), {"placement_s": 9.0, "hosts": ["a", "b"]}, ())
    assert starter.devices((1, 2)) == [
        "hardware.devices=2",
        "launcher.placement_s=9.0",
        "launcher.hosts=[a,b]",
    ]


def test_hardware_that_is_what_this_host_has_is_refused() -> None:
    request = request_of("launcher=ray")
    with pytest.raises(ConfigError) as error:
        ray_starter(request, [], StopSignals())
    assert [str(fault) for fault in error.value.faults] == [
        "hardware=local is what this host has, and the jobs of a schedule run on Ray's nodes; use "
        "an inventory of those, or hardware=cpu hardware.devices=8"
    ]
