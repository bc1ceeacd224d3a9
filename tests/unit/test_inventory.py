"""Inventories: what the shipped files describe, and every fault with its key and remedy."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from whale_train.errors import Fault
from whale_train.strategies.hardware.calibration import Calibration, calibrated
from whale_train.strategies.hardware.catalogue import DEVICES, HOSTS
from whale_train.strategies.hardware.cluster import (
    Cluster,
    Device,
    HostFigures,
    HostShare,
    Link,
    SlurmRequest,
)
from whale_train.strategies.hardware.inventory import MachineFacts, read_inventory

CONF = Path(__file__).parents[2] / "conf" / "hardware"
GPU = Device("some_gpu", {"fp32": 1e13}, 24e9, 9e11)
BARE = MachineFacts(cores=6, memory_bytes=48_000_000_000, gpus=(), gpu_link=None)
TWO_GPUS = MachineFacts(16, 64_000_000_000, (GPU, GPU), Link("some_link", 3e10, 1e-6))


def read(mapping: Mapping[str, object], machine: MachineFacts = BARE) -> Cluster:
    faults: list[Fault] = []
    cluster = read_inventory(mapping, "mine", faults, machine)
    assert faults == []
    assert cluster is not None
    return cluster


def refused(mapping: Mapping[str, object], machine: MachineFacts = BARE) -> list[str]:
    earlier = Fault("train.steps", "-1", "is not positive", "use 1 or more")
    faults = [earlier]
    assert read_inventory(mapping, "mine", faults, machine) is None
    assert faults[0] is earlier
    return [str(fault) for fault in faults[1:]]


def node(**changes: object) -> dict[str, object]:
    return {"devices": 2, "device": "t4_16gb", "link": "pcie3_x16", **changes}


def shipped(name: str) -> dict[str, object]:
    content = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert isinstance(content, dict)
    return content


def test_a_node_of_unlike_devices_names_each() -> None:
    inline = {
        "name": "mine",
        "flops": {"fp32": 1e13},
        "memory_bytes": 24e9,
        "memory_bandwidth_bytes_s": 9e11,
    }
    cluster = read({"nodes": [node(devices=3, device=["t4_16gb", inline, "t4_16gb"])]})
    assert [device.name for device in cluster.devices] == ["t4_16gb", "mine", "t4_16gb"]
    assert cluster.devices[0] == DEVICES["t4_16gb"]
    wrong = [node(device=["t4_16gb"] * 3), node(device=[]), node(device=["t4_16gb", "t4_16"])]
    number, none, unknown = refused({"nodes": wrong, "network": "ethernet_50g"})
    assert number == (
        "hardware.nodes[0].device names 3 devices, and devices is 2; name one for all of them, or "
        "each"
    )
    assert none == "hardware.nodes[1].device=[] names no device; write a100_sxm_80gb"
    assert unknown.startswith("hardware.nodes[2].device[1]=t4_16 is no device of the catalogue; ")


def test_the_mixed_cluster_in_rank_order() -> None:
    cluster = read(shipped("v100_p100_mix"))
    names = [device.name for device in cluster.devices]
    assert names == ["v100_sxm2_32gb"] * 8 + ["p100_pcie_16gb"] * 8
    assert cluster.node_of == (0,) * 8 + (1,) * 8
    assert [one.link.bandwidth_bytes_s for one in cluster.nodes] == [150e9, 15.75e9]
    assert cluster.network.bandwidth_bytes_s == 50e9 / 8
    assert cluster.name == "mine"


@pytest.mark.parametrize(
    ("name", "nodes", "devices", "memory_bytes"),
    [
        ("v100_p100_mix", 2, 16, 8 * 32e9 + 8 * 16e9),
        ("dgx_a100", 1, 8, 640e9),
        ("h200", 1, 8, 1128e9),
        ("v100_512", 64, 512, 16384e9),
        ("cpu", 1, 6, 48e9),
        ("local", 1, 6, 48e9),
    ],
)
def test_shipped_inventories(name: str, nodes: int, devices: int, memory_bytes: float) -> None:
    cluster = read(shipped(name))
    assert (len(cluster.nodes), len(cluster.devices)) == (nodes, devices)
    assert sum(device.memory_bytes for device in cluster.devices) == memory_bytes


def test_every_shipped_inventory_is_read() -> None:
    for path in CONF.glob("*.yaml"):
        read(shipped(path.stem))


def test_cpu_processes_share_the_memory() -> None:
    cluster = read({"kind": "cpu", "devices": 4})
    assert [device.memory_bytes for device in cluster.devices] == [12e9] * 4
    assert cluster.nodes[0].link.name == "shared_memory"
    # Two emulated hosts of processes are still this machine's memory.
    two = {"count": 2, "devices": 2, "device": "cpu_process", "link": "shared_memory"}
    cluster = read({"nodes": [two], "network": "ethernet_1g"})
    assert [device.memory_bytes for device in cluster.devices] == [12e9] * 4


def test_local_prefers_gpus() -> None:
    assert read({"kind": "local"}, TWO_GPUS).devices == (GPU, GPU)
    assert read({"kind": "local", "devices": 1}, TWO_GPUS).devices == (GPU,)
    assert read({"kind": "local"}, TWO_GPUS).nodes[0].link.name == "some_link"
    unknown_link = MachineFacts(16, 64_000_000_000, (GPU, GPU), None)
    assert read({"kind": "local"}, unknown_link).nodes[0].link.name == "pcie3_x16"
    names = {device.name for device in read({"kind": "cpu"}, TWO_GPUS).devices}
    assert names == {"cpu_process"}


def test_local_has_only_what_there_is() -> None:
    assert refused({"kind": "local", "devices": 4}, TWO_GPUS) == [
        "hardware.devices=4 is more than the 2 GPUs of this machine; "
        "use 1 to 2, or hardware=cpu hardware.devices=4"
    ]
    assert refused({"kind": "local", "devices": 7}) == [
        "hardware.devices=7 is more than the 6 cores of this machine; "
        "use 1 to 6, or hardware=cpu hardware.devices=7"
    ]
    assert len(read({"kind": "cpu", "devices": 7}).devices) == 7


def test_inline_device_and_link() -> None:
    device = {
        "name": "chip",
        "flops": {"fp32": "15.7e12", "fp16": 125_000_000_000_000},
        "memory_bytes": "32e9",
        "memory_bandwidth_bytes_s": 9e11,
    }
    link = {"bandwidth_bytes_s": "6.25e9", "latency_s": 0}
    cluster = read({"nodes": [node(device=device, link=link, devices="3")]})
    flops = {"fp32": 15.7e12, "fp16": 125e12}
    assert cluster.devices == (Device("chip", flops, 32e9, 9e11),) * 3
    assert cluster.nodes[0].link == Link("6.25 GB/s", 6.25e9, 0.0)
    # One node needs no network; its link stands in.
    assert cluster.network == cluster.nodes[0].link


def test_what_is_known_of_hosts() -> None:
    link = {"bandwidth_bytes_s": "2e10", "latency_s": 0}
    host = {"memory_bytes": "1e12", "memory_bandwidth_bytes_s": 3e11, "link": link}
    nodes = [node(count=2, host=host), node(device="h200_sxm_141gb", host="dgx_h200"), node()]
    cluster = read({"nodes": nodes, "network": "ethernet_50g"})
    inline = HostFigures("host", 1e12, 3e11, Link("20 GB/s", 2e10, 0.0))
    assert [each.host for each in cluster.nodes] == [inline, inline, HOSTS["dgx_h200"], None]
    # Its memory serves two devices, each of which has a link of its own.
    assert cluster.nodes[1].devices[0].host == HostShare(1.5e11, 2e10)
    assert cluster.nodes[3].devices[0] == DEVICES["t4_16gb"]
    # What remains where devices are idle, or measured, has its host still.
    fewer = cluster.first(3)
    assert [(len(each.devices), each.host) for each in fewer.nodes] == [(2, inline), (1, inline)]
    known = Calibration("t4_16gb", 0, 2, {}, Link("measured", 1e9, 1e-5))
    measured = calibrated(cluster, [known], 1)
    assert [each.host for each in measured.nodes] == [each.host for each in cluster.nodes]
    assert measured.nodes[0].link.name == "measured"


def test_faults_of_hosts() -> None:
    key = "hardware.nodes[0].host"
    (unknown,) = refused({"nodes": [node(host="dgx_a10")]})
    assert unknown.startswith(f"{key}=dgx_a10 is no host of the catalogue; did you mean dgx_a100?")
    assert refused({"nodes": [node(host={"memory_bytes": 0, "memory_bandwidth_bytes_s": 1})]}) == [
        f"{key}.link is missing; add it, for instance link: nvlink3",
        f"{key}.memory_bytes=0 is not positive; use a number above 0",
    ]
    processes = node(device="cpu_process", link="shared_memory", host="dgx_a100")
    assert refused({"nodes": [processes]}) == [
        f"{key}=dgx_a100 is of CPU processes, whose memory is the machine's; leave it out"
    ]


def test_a_node_says_how_slurm_gives_it() -> None:
    given = {"partition": "old", "gres": "gpu:p100:8", "mem": 500, "cpus_per_task": "4"}
    cluster = read({"nodes": [node(slurm=given), node(slurm={})], "network": "ethernet_50g"})
    options = SlurmRequest(partition="old", gres="gpu:p100:8", mem="500", cpus_per_task=4)
    assert [one.slurm for one in cluster.nodes] == [options, SlurmRequest()]
    assert cluster.nodes[0] == cluster.nodes[1]  # to the planner, which takes them for alike
    key = "hardware.nodes[0].slurm"
    assert refused({"nodes": [node(slurm={"partitions": "old", "qos": True, "mem": ""})]}) == [
        f"{key}.partitions=old is no key of a node's request to Slurm; did you mean partition? One "
        "of: account, constraint, cpus_per_task, gres, mem, partition, qos, reservation",
        f"{key}.qos=True is no value of an option of sbatch; use text, or leave it out",
        f"{key}.mem is no value of an option of sbatch; use text, or leave it out",
    ]
    assert refused({"nodes": [node(slurm="old")]}) == [
        f"{key}=old is not a mapping; write a mapping with the keys partition, constraint, gres, "
        "account, qos, reservation, mem, cpus_per_task"
    ]


def test_unknown_names_are_answered_with_the_nearest() -> None:
    nodes = [node(), node(device="v100_sxm2_32g", link="nvlnk2")]
    device, link, network = refused({"nodes": nodes, "network": "ethernet_50gb"})
    assert device.startswith(
        "hardware.nodes[1].device=v100_sxm2_32g is no device of the catalogue; "
        "did you mean v100_sxm2_32gb? One of: "
    )
    assert link.startswith(
        "hardware.nodes[1].link=nvlnk2 is no link of the catalogue; did you mean nvlink2? "
    )
    assert network.startswith(
        "hardware.network=ethernet_50gb is no link of the catalogue; did you mean ethernet_50g? "
    )


def test_unknown_and_missing_keys() -> None:
    assert refused({"nodes": [{"devces": 2, "device": "t4_16gb", "link": "nvlink2"}]}) == [
        "hardware.nodes[0].devces=2 is no key of a node; "
        "did you mean devices? One of: count, device, devices, host, link, nvme, slurm",
        "hardware.nodes[0].devices is missing; add it, for instance devices: 8",
    ]
    assert refused({"node": []}) == [
        "hardware.node=[] is no key of the inventory; "
        "did you mean nodes? One of: kind, network, nodes",
        "hardware.nodes is missing; "
        "add it, for instance nodes: [{devices: 8, device: a100_sxm_80gb, link: nvlink3}]",
    ]
    assert refused({"nodes": [node(count=2)]}) == [
        "hardware.network is missing; add it, for instance network: ethernet_50g"
    ]
    assert refused({"kind": "cpu", "nodes": 1}) == [
        "hardware.nodes=1 is no key of kind=cpu; use one of: devices, kind"
    ]


def test_empty_inventory() -> None:
    assert refused({"nodes": [], "network": "ethernet_1g"}) == [
        "hardware.nodes=[] has no devices; name at least one node, "
        "for instance [{devices: 8, device: a100_sxm_80gb, link: nvlink3}]"
    ]
    assert refused({"nodes": [node(devices=0)]}) == [
        "hardware.nodes[0].devices=0 is not positive; use 1 or more"
    ]


@pytest.mark.parametrize("value", [2.5, True, "two", None, [2], "2e0"])
def test_counts_are_whole_numbers(value: object) -> None:
    (fault,) = refused({"nodes": [node(count=value)]})
    assert fault.startswith("hardware.nodes[0].count=")
    assert fault.endswith("is not a whole number; use 1 or more")


@pytest.mark.parametrize("value", ["32GB", "1e400", "nan", float("inf"), True, None, "", "1_0"])
def test_figures_are_numbers(value: object) -> None:
    link = {"bandwidth_bytes_s": value, "latency_s": 1e-6}
    (fault,) = refused({"nodes": [node(link=link)]})
    assert fault.startswith("hardware.nodes[0].link.bandwidth_bytes_s")
    assert fault.endswith("is not a number; write it as 32e9 or 15.7e12")


def test_figures_are_positive() -> None:
    device = {
        "name": "",
        "flops": {"fp32": 0, "tf32": 1e12},
        "memory_bytes": -1,
        "memory_bandwidth_bytes_s": "-1e9",
    }
    link = {"bandwidth_bytes_s": 0, "latency_s": -1, "name": 5}
    key = "hardware.nodes[0]"
    assert refused({"nodes": [node(device=device, link=link)]}) == [
        f"{key}.device.name is not a name; use text, as my_device",
        f"{key}.device.flops.tf32=1000000000000.0 is no key of flops; "
        "did you mean fp32? One of: bf16, fp16, fp32, fp8",
        f"{key}.device.flops.fp32=0 is not positive; use a number above 0",
        f"{key}.device.memory_bytes=-1 is not positive; use a number above 0",
        f"{key}.device.memory_bandwidth_bytes_s=-1e9 is not positive; use a number above 0",
        f"{key}.link.bandwidth_bytes_s=0 is not positive; use a number above 0",
        f"{key}.link.latency_s=-1 is below 0; use 0 or more",
        f"{key}.link.name=5 is not a name; use text, as my_device",
    ]


def test_wrong_shapes() -> None:
    assert refused({"nodes": "v100_p100_mix"})[0].startswith(
        "hardware.nodes=v100_p100_mix is not a list; write nodes: [{"
    )
    assert refused({"nodes": ["t4_16gb"]})[0] == (
        "hardware.nodes[0]=t4_16gb is not a mapping; "
        "write a mapping with the keys devices, device, link, count, host, nvme, slurm"
    )
    assert refused({"nodes": [node(device=None)]})[0].startswith(
        "hardware.nodes[0].device=null is no device of the catalogue; "
    )
    flops = {"name": "chip", "memory_bytes": 1, "memory_bandwidth_bytes_s": 1}
    assert refused({"nodes": [node(device={**flops, "flops": 1e12})]}) == [
        "hardware.nodes[0].device.flops=1000000000000.0 is not a mapping; "
        "write a mapping with the keys fp32, bf16, fp16, fp8"
    ]
    assert refused({"nodes": [node(device={**flops, "flops": {"fp32": 1, "fp8": 4}})]}) == [
        "hardware.nodes[0].device.flops.fp8=4 has no bf16 beside it, in which all but some "
        "products run; add bf16, or leave fp8 out"
    ]
    assert refused({"nodes": [node(device={**flops, "flops": {}})]}) == [
        "hardware.nodes[0].device.flops={} has no precision; write flops: {fp32: 15.7e12}"
    ]


def test_unknown_kind() -> None:
    assert refused({"kind": "cpus", "devices": 4}) == [
        "hardware.kind=cpus is no kind of inventory; did you mean cpu? One of: cpu, local"
    ]
