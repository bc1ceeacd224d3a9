"""What plans are asked for in these tests: strategies and clusters as they ship, and training."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import yaml

from whale_train.errors import Fault
from whale_train.strategies.cost.op_work import KernelKind
from whale_train.strategies.grammar.nodes import Strategy, read_strategy
from whale_train.strategies.hardware.cluster import Cluster, Device, Kernel, Roofline
from whale_train.strategies.hardware.inventory import MachineFacts, read_inventory
from whale_train.strategies.plan.training import Training

CONF = Path(__file__).parents[2] / "conf"


def strategy_of(mapping: Mapping[str, Any], name: str = "mine") -> Strategy:
    faults: list[Fault] = []
    strategy = read_strategy(mapping, name, faults)
    assert strategy is not None, faults
    return strategy


def shipped(name: str) -> Strategy:
    return strategy_of(yaml.safe_load((CONF / f"strategy/{name}.yaml").read_text()), name)


def mixed() -> Cluster:
    mapping = yaml.safe_load((CONF / "hardware/v100_p100_mix.yaml").read_text())
    cluster = read_inventory(mapping, "v100_p100_mix", [], MachineFacts(2, 10**9, (), None))
    assert cluster is not None
    return cluster


def at_peak(cluster: Cluster) -> Cluster:
    """`cluster` with devices whose products run at their peak, whose update does at the bandwidth
    of their memory, and on which all else takes no time."""

    def bare(device: Device) -> Device:
        nothing = Roofline(0.0, inf, inf)
        rate = device.flops["fp32"]
        kernels = dict.fromkeys(KernelKind, Kernel(nothing, nothing))
        kernels[KernelKind.PRODUCT] = Kernel(Roofline(0.0, rate, inf), Roofline(0.0, rate / 2, inf))
        stream = Roofline(0.0, inf, device.memory_bandwidth_bytes_s)
        kernels[KernelKind.UPDATE] = Kernel(stream, stream)
        return replace(device, kernels={"fp32": kernels})

    known = {id(device): bare(device) for device in cluster.devices}
    nodes = (
        replace(node, devices=tuple(known[id(device)] for device in node.devices))
        for node in cluster.nodes
    )
    return replace(cluster, nodes=tuple(nodes))


def training(global_batch: int = 2000, precision: str = "fp32", **options: Any) -> Training:
    return Training(global_batch, precision, 0.0, "sgd", {"lr": 0.1, **options})
