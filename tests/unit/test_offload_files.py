"""State in files: which keys it needs, what disks hold, and how long a step takes longer."""

import pytest
from tests.unit.operation_graphs import classifier
from tests.unit.plan_requests import training

from whale_train.errors import Fault, PlanError
from whale_train.strategies.grammar.nodes import Strategy, read_strategy
from whale_train.strategies.grammar.offload import read_offload
from whale_train.strategies.hardware.cluster import Cluster, Device, Link, Node, NvmeFigures
from whale_train.strategies.memory.nvme import buffer_bytes, swap_time_s
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.resolver.resolve import resolve

LINK = Link("inside", 1e10, 1e-6)
ELEMENTS = 4 * 8 + 4 + 100_000 * 5  # of the classifier: its trunk, and classes of 4 and a bias
BOTH = {"optimizer": "nvme", "parameters": "nvme", "path": "/nvme"}
MOMENTUM = training(4, momentum=0.5)


@pytest.mark.parametrize(
    ("zero", "offload", "fault"),
    [
        (3, {"optimizer": "nvme"},
         "x.offload.path is missing, and state is on NVMe; give a folder of a local disk, as "
         "/nvme/scratch"),
        (3, {"optimizer": "nvme", "path": "scratch"},
         "x.offload.path=scratch is not the absolute path of a folder; use one as /nvme/scratch"),
        (3, {"optimizer": "cpu", "path": "/nvme"},
         "x.offload.path=/nvme is a folder for state on NVMe, and none is there; remove it, or use "
         "x.offload.optimizer=nvme"),
        (2, {"optimizer": "nvme", "path": "/nvme"},
         "x.offload.optimizer=nvme needs ZeRO 3: DeepSpeed writes no other stage's state to files; "
         "use x.zero=3"),
        (3, {"parameters": "nvme", "path": "/nvme"},
         "x.offload.parameters=nvme needs the optimizer off the device as well, whose values "
         "weights are written from; use x.offload.optimizer=nvme"),
        (0, {"activations": "nvme"},
         "x.offload.activations=nvme is unknown; use one of: auto, cpu, none"),
    ],
)  # fmt: skip
def test_each_fault_word_for_word(zero: int, offload: object, fault: str) -> None:
    faults: list[Fault] = []
    read_offload(offload, "x.offload", zero, faults)
    assert [str(x) for x in faults] == [fault]


def planned(offload: object, disks: NvmeFigures | None, *, split: bool = False) -> Plan:
    copies = {"replicate": {"zero": 3, "offload": offload}}
    graph = [copies, {"split": {"modules": "head"}}] if split else copies
    faults: list[Fault] = []
    strategy = read_strategy({"graph": graph}, "mine", faults)
    assert isinstance(strategy, Strategy), faults
    device = Device("chip", {"fp32": 1e12, "bf16": 1e12}, 1e9, 1e11)
    nodes = (Node((device,) * 2, LINK, nvme=disks),) * 2
    profile = classifier(100_000, batch_norm=False)
    return resolve(strategy, Cluster("mine", nodes, LINK), profile, MOMENTUM)


def test_what_is_in_files_and_how_long_it_takes() -> None:
    slow, fast = (NvmeFigures(1e9, rate, 2 * rate) for rate in (1e6, 1e15))
    plans = {
        name: planned(offload, disks)
        for name, offload, disks in (
            ("slow", BOTH, slow), ("fast", BOTH, fast), ("unknown", BOTH, None),
            ("cpu", {"optimizer": "cpu", "parameters": "cpu"}, slow),
        )
    }  # fmt: skip
    seconds = {name: plan.predicted.step_time_s for name, plan in plans.items()}
    # A forward and a backward read the weights. An update reads value, momentum and gradient, and
    # writes these and the weight. Both devices of a host share its disks.
    part = 2 * 4 * ELEMENTS / 4
    expected = part * (2 + 3) / 1e6 + part * (3 + 1) / 2e6
    assert seconds["slow"] - seconds["fast"] == pytest.approx(expected, rel=1e-3)
    assert seconds["fast"] == pytest.approx(seconds["cpu"], rel=1e-3)
    assert seconds["unknown"] > seconds["fast"]
    notes = [x.reason for x in plans["slow"].decisions if x.chosen == "nvme"]
    assert notes == [
        "optimizer and parameters in files: 8.00 MB in all, at most 4.00 MB on each of 2 hosts"
    ]
    (note,) = (x.reason for x in plans["unknown"].decisions if x.chosen == "nvme")
    assert note.endswith("hardware=mine says nothing of disks, and one at 3.94 GB/s is taken")
    memories = {plan.ranks[0].memory_bytes.total for plan in plans.values()}
    assert len(memories) == 1
    zero = plans["slow"].ranks[0].deepspeed["0"]
    assert zero is not None
    offloaded = zero["zero_optimization"]["offload_param"]
    assert (offloaded["device"], offloaded["nvme_path"]) == ("nvme", "/nvme")
    assert offloaded["max_in_cpu"] == 0


def test_disks_without_room_and_parts_beside_copies_are_refused() -> None:
    with pytest.raises(
        PlanError, match=r"keeps 4\.00 MB in files of host 0 of hardware=mine, 1\.00"
    ):
        planned(BOTH, NvmeFigures(3e6, 1e9, 1e9))
    with pytest.raises(PlanError, match="here modules are split beside the copies; use cpu"):
        planned({"optimizer": "nvme", "path": "/nvme"}, None, split=True)


def test_buffers_are_of_the_largest_part() -> None:
    parts = [("a.weight", 100.0), ("a.bias", 10.0), ("b.weight", 50.0)]
    assert buffer_bytes(("optimizer",), parts) == 4 * 4 * 160
    assert buffer_bytes(("parameters",), parts) == 2 * 2 * 4 * 100
    assert buffer_bytes((), parts) == 0


def test_weights_alone_are_written_alone() -> None:
    device = Device("chip", {"fp32": 1e12}, 1e9, 1e11)
    here = Cluster("mine", (Node((device,), LINK, nvme=NvmeFigures(1e9, 1e6, 1e6)),), LINK)
    assert swap_time_s(1e6, ("parameters",), MOMENTUM, 0, here) == pytest.approx(4.0)
    assert swap_time_s(1e6, ("optimizer",), MOMENTUM, 0, here) == pytest.approx(24.0)
