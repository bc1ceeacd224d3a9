"""Who takes how many samples and classes: speed within memory, and by how much it does not fit."""

from dataclasses import dataclass, replace
from math import inf
from typing import Any

import pytest
from tests.unit.operation_graphs import classifier
from tests.unit.plan_requests import strategy_of

from whale_train.errors import PlanError
from whale_train.quantities import in_bytes
from whale_train.strategies.cost.op_work import KernelKind
from whale_train.strategies.graph.operation_graph import ModelProfile, Parameter
from whale_train.strategies.hardware.cluster import Cluster, Device, Kernel, Link, Node, Roofline
from whale_train.strategies.memory.engine_memory import ROUNDED_UP
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.resolve import resolve

LINK = Link("link", 1e10, 1e-6)
ROOMY = 1e12
HYBRID = ["replicate", {"split": {"modules": "head"}}]


def cluster(*devices: tuple[float, float]) -> Cluster:
    """One node of devices of (FLOP/s, bytes)."""
    listed = tuple(
        Device(f"device_{i}", {"fp32": flops, "bf16": 8 * flops}, memory, 1e11)
        for i, (flops, memory) in enumerate(devices)
    )
    return Cluster("cluster", (Node(listed, LINK),), LINK)


def training(global_batch: int, precision: str = "fp32", **options: Any) -> Training:
    return Training(global_batch, precision, 0.0, "sgd", {"lr": 0.1, **options})


@dataclass(frozen=True)
class Sharing:
    """Who takes how many samples, and classes of a split head."""

    samples: tuple[int, ...]
    classes: tuple[int, ...]


def planned(
    graph: Any, profile: ModelProfile, on: Cluster, train: Training, balance: str = "hardware"
) -> Plan:
    strategy = strategy_of({"graph": graph, "balance": balance})
    return resolve(strategy, bare(on), profile, train)


def bare(on: Cluster) -> Cluster:
    """The cluster with devices on which work takes its FLOPs alone, so that speed is in
    proportion to them."""
    nothing = Roofline(0.0, inf, inf)

    def device(each: Device) -> Device:
        kernels = {}
        for precision, rate in each.flops.items():
            kinds = dict.fromkeys(KernelKind, Kernel(nothing, nothing))
            kinds[KernelKind.PRODUCT] = Kernel(
                Roofline(0.0, rate, inf), Roofline(0.0, rate / 2, inf)
            )
            kernels[precision] = kinds
        return replace(each, kernels=kernels)

    (node,) = on.nodes
    return replace(on, nodes=(replace(node, devices=tuple(map(device, node.devices))),))


def shared(*args: Any, **kwargs: Any) -> Sharing:
    plan = planned(*args, **kwargs)
    backbone, *head = plan.task_graphs
    parts = next(iter(head[0].shards.values())) if head else ()
    return Sharing(backbone.shares, tuple(stop - start for start, stop in parts))


def refused(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(PlanError) as error:
        planned(*args, **kwargs)
    (fault,) = error.value.faults
    return str(fault)


# 1e9 bytes of parameters, as many of gradients in their bucket and of the one gradient yet to be
# put there, none of SGD's state; 1e8 bytes a sample, rounded up.
MODEL = ModelProfile("model", (Parameter("weight", (250_000, 1000)),), (), 1e9, 1e8 / ROUNDED_UP)
FIXED = 3e9


def test_samples_follow_speed() -> None:
    on = cluster((3e12, ROOMY), (1e12, ROOMY))
    assert shared("replicate", MODEL, on, training(12)) == Sharing((9, 3), ())
    assert shared("replicate", MODEL, on, training(12, "bf16")).samples == (9, 3)


def test_even_does_not_read_speed() -> None:
    on = cluster((3e12, ROOMY), (1e12, ROOMY))
    assert shared("replicate", MODEL, on, training(13), balance="even").samples == (7, 6)


def test_each_precision_has_its_own_speeds() -> None:
    first = Device("first", {"fp32": 1e12, "bf16": 9e12}, ROOMY, 1e11)
    second = Device("second", {"fp32": 1e12, "bf16": 1e12}, ROOMY, 1e11)
    on = Cluster("cluster", (Node((first, second), LINK),), LINK)
    assert shared("replicate", MODEL, on, training(10)).samples == (5, 5)
    assert shared("replicate", MODEL, on, training(10, "bf16")).samples == (9, 1)


def test_memory_caps_speed() -> None:
    # The fast one has room for four samples and a half; the others take the rest by speed.
    on = cluster((8e12, FIXED + 4.5e8), (2e12, ROOMY), (1e12, ROOMY))
    assert shared("replicate", MODEL, on, training(16)).samples == (4, 8, 4)


def test_the_slowest_device_still_has_a_sample() -> None:
    on = cluster((1e15, ROOMY), (1e9, ROOMY), (1e9, ROOMY))
    assert shared("replicate", MODEL, on, training(5)).samples == (3, 1, 1)


def test_a_sample_of_no_bytes_fits_anywhere() -> None:
    weightless = replace(MODEL, activation_bytes=0.0)
    on = cluster((1e12, FIXED), (1e12, FIXED))
    assert shared("replicate", weightless, on, training(1000)).samples == (500, 500)


def test_optimizer_states_take_room() -> None:
    # 1 GB more for momentum, 2 GB for Adam's two.
    on = cluster((1e12, FIXED + 2.05e9), (1e12, ROOMY))
    assert shared("replicate", MODEL, on, training(30)).samples == (15, 15)
    assert shared("replicate", MODEL, on, training(30, momentum=0.9)).samples == (10, 20)
    adam = replace(training(30), optimizer="adam")
    assert refused("replicate", MODEL, on, adam).startswith("strategy=mine needs 5.10 GB on rank 0")


@pytest.mark.parametrize(
    ("optimizer", "options", "states"),
    [("sgd", {}, 0), ("sgd", {"momentum": 0.0}, 0), ("sgd", {"momentum": 0.9}, 1),
     ("adam", {}, 2), ("adamw", {"betas": (0.9, 0.99)}, 2)],
)  # fmt: skip
def test_states_an_optimizer_keeps(optimizer: str, options: dict[str, Any], states: int) -> None:
    assert Training(8, "fp32", 0.0, optimizer, options).optimizer_states == states


def test_a_batch_that_is_too_large_by_how_much() -> None:
    on = cluster((1e12, FIXED + 4.5e8), (1e12, FIXED + 7e8))
    assert shared("replicate", MODEL, on, training(11)).samples == (4, 7)
    assert refused("replicate", MODEL, on, training(15)) == (
        "train.global_batch=15 is 4 samples (400 MB) more than the memory of hardware=cluster "
        "holds under strategy=mine; use at most 11, or more ZeRO"
    )


def test_evenly_the_smallest_device_limits_all() -> None:
    on = cluster((1e12, FIXED + 4.5e8), (1e12, FIXED + 7e8), (1e12, FIXED + 9e8))
    # One share may be one larger where there is room: 4, 5 and 5.
    assert shared("replicate", MODEL, on, training(14), balance="even").samples == (4, 5, 5)
    assert refused("replicate", MODEL, on, training(15), balance="even") == (
        "train.global_batch=15 is 1 samples (100 MB) more than the memory of hardware=cluster "
        "holds under strategy=mine; use at most 14, or more ZeRO"
    )


NOTHING_FITS = "no ZeRO stage makes it fit: use more devices or a smaller model"
# Of 100 parameters instead of one, which ZeRO 3 fetches one at a time.
FINE = replace(MODEL, parameters=tuple(Parameter(f"w{i}.weight", (2500, 1000)) for i in range(100)))


@pytest.mark.parametrize(
    ("profile", "count", "memory", "options", "fault"),
    [
        # Adam on 4 devices: 1 + 1 + 2 GB, the gradient before its bucket, and sample. ZeRO 1 keeps
        # a quarter of 3 GB of state and master weights, and of the gradient.
        (MODEL, 4, 3.5e9, {"adam": True},
         (5.1e9, 1.6e9, 3.5e9, "use strategy=zero1, which needs 3.05 GB")),
        # Momentum on 2: 1 + 1 + 1 + 1. ZeRO 1: 1 + 1 + 0.5 + 1; ZeRO 2, whose part of the
        # gradient is put together for the update: 1 + 2 x 0.5 + 1.
        (MODEL, 2, 3.2e9, {"momentum": 0.9},
         (4.1e9, 0.9e9, 3.2e9, "use strategy=zero2, which needs 3.00 GB")),
        # ZeRO 3: half of parameters and gradients, four buckets and 20 MB on the way.
        (FINE, 2, 1.9e9, {}, (2.11e9, 0.21e9, 1.9e9, "use strategy=zero3, which needs 1.22 GB")),
        (FINE, 2, 0.8e9, {},
         (2.11e9, 1.31e9, 0.8e9,
          "use strategy=zero3, whose parts of the state then follow memory")),
        (MODEL, 2, 1e9, {}, (3.1e9, 2.1e9, 1e9, NOTHING_FITS)),
        # One device has its host's memory as well.
        (FINE, 1, 1.9e9, {},
         (2.1e9, 0.2e9, 1.9e9, "use strategy=zero3_offload, which needs 225 MB")),
        (replace(FINE, perhaps_unused=("w0.weight",)), 2, 1.9e9, {},
         (2.11e9, 0.21e9, 1.9e9, NOTHING_FITS)),
    ],
)  # fmt: skip
def test_a_device_too_small_for_one_sample(
    profile: ModelProfile,
    count: int,
    memory: float,
    options: dict[str, Any],
    fault: tuple[float, float, float, str],
) -> None:
    on = cluster(*((1e12, ROOMY),) * (count - 1), (1e12, memory))
    adam = options.pop("adam", False)
    train = replace(training(4, **options), optimizer="adam" if adam else "sgd")
    needs, more, has, remedy = fault
    assert refused("replicate", profile, on, train) == (
        f"strategy=mine needs {in_bytes(needs)} on rank {count - 1} (device_{count - 1}) for one "
        f"sample, {in_bytes(more)} more than its {in_bytes(has)}; {remedy}"
    )


def test_the_remedy_is_a_strategy_as_it_ships() -> None:
    """ZeRO 2 without the offload that was asked for: 1 + 2 x 0.5 + 0.5 GB. ZeRO 3 gathers 1 GB,
    which has a gradient of 1 GB, and beside its half of the gradients has an fp32 copy of its half
    of the parameters, which are on the host."""
    offload = {"parameters": "cpu"}
    graph = {"replicate": {"zero": 3, "offload": offload}}
    on = cluster((1e12, 2.5e9), (1e12, 2.5e9))
    assert refused(graph, MODEL, on, training(4)) == (
        "strategy=mine needs 3.20 GB on rank 0 (device_0) for one sample, 705 MB more than its "
        "2.50 GB; use strategy=zero2, which needs 2.50 GB"
    )


def headed(classes: int, sample_bytes: float = 1000.0) -> ModelProfile:
    """A sample keeps `sample_bytes`, whatever is split of it.

    A class has 4 weights and a bias, under SGD 20 bytes of them and as many of their gradients.
    """
    whole = classifier(classes, batch_norm=False)
    return replace(whole, activation_bytes=sample_bytes / ROUNDED_UP)


def held(classes: int, of: int, own: int, batch: int) -> float:
    """Bytes of a device with its trunk, `classes` of a head of so many, and `own` samples of a
    batch; and what rounding may add."""
    on = cluster((classes * 1e9, ROOMY), ((of - classes) * 1e9, ROOMY))
    plan = planned(HYBRID, headed(of), on, training(batch))
    assert plan.task_graphs[0].shares[0] == own
    assert plan.task_graphs[1].shards["head.weight"][0] == (0, classes)
    return plan.ranks[0].memory_bytes.total + 1e-6


def test_classes_follow_speed() -> None:
    on = cluster((3e12, ROOMY), (1e12, ROOMY))
    # 7.5 and 2.5 samples: 8 on the fast one end at 8/3, 3 on the slow one would at 3.
    assert shared(HYBRID, headed(1000), on, training(10)) == Sharing((8, 2), (750, 250))
    even = shared(HYBRID, headed(1001), on, training(11), balance="even")
    assert even == Sharing((6, 5), (501, 500))


def test_classes_leave_room_for_a_sample() -> None:
    on = cluster((3e12, held(100, 1000, 1, 10) + 39), (1e12, ROOMY))
    assert shared(HYBRID, headed(1000), on, training(10)) == Sharing((1, 9), (100, 900))


def test_room_to_the_byte() -> None:
    fits, short = held(1, 2, 1, 2), held(1, 2, 1, 2) - 1
    one_each = Sharing((1, 1), (1, 1))
    assert shared(HYBRID, headed(2), cluster((1, fits), (1, fits)), training(2)) == one_each
    fault = refused(HYBRID, headed(2), cluster((1, fits), (1, short)), training(2))
    assert fault.startswith("strategy=mine needs 1.37 kB on rank 1 (device_1) for one sample and ")


# Two samples, one each beside as many classes: 40 bytes a class.
TWO = cluster((3e12, held(2_000_000, 7_000_000, 1, 2)), (1e12, held(5_000_000, 7_000_000, 1, 2)))


def test_a_head_that_is_too_large_by_how_much() -> None:
    assert refused(HYBRID, headed(10_000_000), TWO, training(2)) == (
        "strategy.graph[1].split.modules=head has 10000000 classes, 3000000 more than the devices "
        "of hardware=cluster have memory for (120 MB short); use more devices, a smaller "
        "train.global_batch, strategy=split, or at most 7000000 classes"
    )
    found = shared(HYBRID, headed(7_000_000), TWO, training(2))
    assert found == Sharing((1, 1), (2_000_000, 5_000_000))


def test_evenly_the_smallest_device_limits_the_classes() -> None:
    assert refused(HYBRID, headed(10_000_000), TWO, training(2), balance="even") == (
        "strategy.graph[1].split.modules=head has 10000000 classes, 5999999 more than the devices "
        "of hardware=cluster have memory for (240 MB short); use more devices, a smaller "
        "train.global_batch, strategy=split, or at most 4000001 classes"
    )
    found = shared(HYBRID, headed(4_000_001), TWO, training(2), balance="even")
    assert found == Sharing((1, 1), (2_000_000, 2_000_001))


def test_a_device_too_small_for_one_class() -> None:
    """Not the fault of the number of classes, and said otherwise."""
    on = cluster((1e12, ROOMY), (1e12, 1.5e9))
    assert refused(HYBRID, headed(1000, sample_bytes=2e9), on, training(4)) == (
        "strategy=mine needs 2.00 GB on rank 1 (device_1) for one sample and one class, 500 MB "
        "more than its 1.50 GB; no ZeRO stage makes it fit: use more devices or a smaller model"
    )
