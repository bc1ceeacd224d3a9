"""What plans count with of GPUs that nobody measured, and the precision they are asked for in."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from whale_train.config import read_request
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.compose.command_line import composed, rewritten
from whale_train.launcher.planning.plan_request import resolve_request
from whale_train.models.fp32_precision import compute_fp32
from whale_train.strategies.cost.op_work import KernelKind
from whale_train.strategies.cost.roofline import kernel_of
from whale_train.strategies.hardware.catalogue import DEVICES, RESERVED_BYTES
from whale_train.strategies.hardware.cluster import Cluster, Device, Node, Reached
from whale_train.strategies.hardware.inventory import MachineFacts, read_inventory
from whale_train.strategies.hardware.write_inventory import inventory_of
from whale_train.strategies.plan.plan import Plan

SMALL = ("model.width=32", "model.depth=2", "model.heads=2", "train.global_batch=16")
A100, V100 = DEVICES["a100_sxm_80gb"], DEVICES["v100_sxm2_32gb"]


def planned(*overrides: str) -> Plan:
    config = composed(rewritten([*SMALL, "mode=plan", *overrides]))
    return resolve_request(read_request(config, {"hardware": "gpus", "strategy": "dp"})).plan


def said(plan: Plan, key: str) -> list[str]:
    return [decision.chosen for decision in plan.decisions if decision.key == key]


# --- Precision -----------------------------------------------------------------------------------


def test_gpus_that_all_compute_bf16_train_in_it() -> None:
    plan = planned("hardware=dgx_a100")
    assert plan.precision == "bf16"
    assert said(plan, "train.precision") == ["bf16"]
    asked = planned("hardware=dgx_a100", "train.precision=fp32")
    assert (asked.precision, said(asked, "train.precision")) == ("fp32", [])


@pytest.mark.parametrize("hardware", ["v100_p100_mix", "cpu"])
def test_others_train_in_fp32(hardware: str) -> None:
    plan = planned(f"hardware={hardware}")
    assert (plan.precision, said(plan, "train.precision")) == ("fp32", [])


def test_tf32_is_said_and_counted_with() -> None:
    exact = planned("hardware=dgx_a100", "train.precision=fp32", "model.width=512")
    rounded = planned("hardware=dgx_a100", "train.tf32=true", "model.width=512")
    assert rounded.precision == "fp32"
    assert said(rounded, "train.tf32") == ["true"]
    assert rounded.predicted.compute_s < exact.predicted.compute_s
    assert rounded.peak_flops_s == 8 * 156e12  # NVIDIA's A100 datasheet: 156 TFLOP/s
    assert exact.peak_flops_s == 8 * 19.5e12


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("hardware=v100_p100_mix",), "is computed by no device of hardware=gpus"),
        (("hardware=cpu",), "is computed by no device of hardware=gpus"),
        (("hardware=dgx_a100", "train.precision=bf16"), "has no effect on train.precision=bf16"),
    ],
)
def test_tf32_is_refused_where_nothing_computes_it(overrides: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        planned("train.tf32=true", *overrides)


SENT = ("hardware=v100_512", "strategy.devices=16", "model.width=512", "train.precision=fp16")


@pytest.mark.parametrize(
    "graph",
    [
        *("{replicate: {}}", "{replicate: {zero: 1}}", "{replicate: {zero: 2}}"),
        "{replicate: {of: {pipeline: {stages: 2, micro_batches: 2}}}}",
    ],
)
def test_gradients_take_less_time_in_16_bits(graph: str) -> None:
    """Between nodes, where the sum of a large gradient is all that takes time."""
    wide, narrow = (
        planned(*SENT, f"strategy.graph={graph}", f"train.reduce_dtype={sent}")
        for sent in ("fp32", "fp16")
    )
    saved = wide.predicted.communication_s - narrow.predicted.communication_s
    # Of what is not hidden by computing it may be more than half.
    assert 0 < saved < 0.6 * wide.predicted.communication_s
    assert narrow.reduce_dtype == "fp16"
    configs = [each for rank in narrow.ranks for each in rank.deepspeed.values() if each]
    sent = {each["communication_data_type"] for each in configs}
    assert sent == ({"fp16"} if "zero" in graph else set())


@pytest.mark.parametrize("sent", ["bf16", "fp16"])
def test_gradients_are_sent_in_no_other_16_bits(sent: str) -> None:
    with pytest.raises(ConfigError, match=r"is neither the precision of the run \(fp32\) nor fp32"):
        planned("hardware=cpu", f"train.reduce_dtype={sent}")
    assert planned("hardware=dgx_a100", "train.reduce_dtype=bf16").reduce_dtype == "bf16"


@pytest.fixture
def fp32_settings() -> Iterator[None]:
    """Leave what torch computes fp32 in as it was."""
    backends: Any = torch.backends
    before = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
    of_cpus = backends.mkldnn.matmul.fp32_precision  # set_float32_matmul_precision sets it too
    yield
    backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = before
    backends.mkldnn.matmul.fp32_precision = of_cpus


def per_operation() -> list[str]:
    backends: Any = torch.backends
    parts = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    return [part.fp32_precision for part in parts]


@pytest.mark.usefixtures("fp32_settings")
@pytest.mark.parametrize("in_tf32", [True, False])
def test_ranks_compute_fp32_as_they_are_told(in_tf32: bool) -> None:
    compute_fp32(in_tf32)
    assert [precision == "tf32" for precision in per_operation()] == [in_tf32] * 3
    assert torch.backends.cuda.matmul.allow_tf32 == in_tf32
    assert torch.backends.cudnn.allow_tf32 == in_tf32
    assert torch.get_float32_matmul_precision() == ("high" if in_tf32 else "highest")


@pytest.mark.usefixtures("fp32_settings")
@pytest.mark.parametrize("in_tf32", [True, False])
def test_a_model_may_use_either_of_torchs_precision_settings(in_tf32: bool) -> None:
    compute_fp32(in_tf32)
    before = per_operation()
    with torch.backends.cudnn.flags(enabled=False, allow_tf32=not in_tf32):
        assert torch.backends.cudnn.allow_tf32 == (not in_tf32)  # the model's own
    with torch.backends.cudnn.flags(enabled=False), torch.backends.cudnn.flags():
        pass
    with torch.backends.mkldnn.flags(enabled=False):
        pass
    assert per_operation() == before
    torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())
    assert torch.backends.cuda.matmul.allow_tf32 == in_tf32
    backends: Any = torch.backends
    for part in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        part.fp32_precision = "tf32" if in_tf32 else "ieee"
    assert torch.backends.cudnn.allow_tf32 == in_tf32


class AsksForTf32(nn.Module):
    """It computes something else where convolutions may be rounded."""

    seen: ClassVar[list[bool]] = []

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(256, 10)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.seen.append(torch.backends.cudnn.allow_tf32)
        logits: torch.Tensor = self.head(features)
        return logits


@pytest.mark.usefixtures("fp32_settings")
@pytest.mark.parametrize("in_tf32", [True, False])
def test_a_model_is_measured_in_the_precision_it_trains_in(in_tf32: bool) -> None:
    compute_fp32(not in_tf32)
    AsksForTf32.seen.clear()
    overrides = (f"model._target_={__name__}.AsksForTf32", "model.loss=cross_entropy")
    config = composed(
        rewritten(
            [
                *(*overrides, "data=classes", "data.num_classes=10", "mode=plan"),
                *("hardware=dgx_a100", "strategy=dp", "train.precision=fp32"),
                *(f"train.tf32={str(in_tf32).lower()}", "train.global_batch=16"),
            ]
        )
    )
    resolve_request(read_request(config, {"hardware": "dgx_a100", "strategy": "dp"}))
    assert set(AsksForTf32.seen) == {in_tf32}


# --- What is reached of peaks --------------------------------------------------------------------


def test_a_gpu_reaches_what_was_measured_of_its_kind() -> None:
    kernel = kernel_of(A100, "bf16", KernelKind.PRODUCT).forward
    assert kernel.flops_s == pytest.approx(271.2e12, rel=0.01)  # the published rate
    assert kernel.overhead_s == 7e-6
    assert kernel_of(V100, "fp16", KernelKind.COPY).forward.bytes_s / 2 == pytest.approx(
        790e9, rel=0.01
    )  # traffic is counted in fp32, twice what fp16 moves


def test_attention_reaches_less_of_devices_without_flash_attention() -> None:
    parts = {
        device.name: kernel_of(device, precision, KernelKind.ATTENTION).forward.flops_s
        / device.flops[precision]
        for device, precision in ((A100, "bf16"), (V100, "fp16"), (DEVICES["l4_24gb"], "bf16"))
    }
    assert parts == pytest.approx({"a100_sxm_80gb": 0.6, "v100_sxm2_32gb": 0.3, "l4_24gb": 0.5})


def test_unknown_devices_reach_seven_tenths() -> None:
    unknown = Device("mine", {"fp32": 1e13}, 1e10, 1e12)
    assert unknown.reached == Reached()
    kernel = kernel_of(unknown, "fp32", KernelKind.PRODUCT).forward
    assert (kernel.flops_s, kernel.bytes_s) == pytest.approx((7e12, 7e11))


# --- Memory that is no tensor's ------------------------------------------------------------------


def test_a_gpus_room_is_without_what_cuda_and_nccl_take() -> None:
    assert A100.room_bytes == 80e9 - RESERVED_BYTES
    assert all((x.reserved_bytes > 0) == (x.name != "cpu_process") for x in DEVICES.values())


def test_an_inventory_keeps_what_is_reserved() -> None:
    mine = replace(A100, name="mine", reserved_bytes=2e9, reached=Reached())
    link = next(iter(read("dgx_a100").nodes)).link
    cluster = Cluster("gpus", (Node((mine,) * 2, link),), link)
    machine = MachineFacts(2, 10**9, (), None)
    again = read_inventory(inventory_of(cluster), "gpus", [], machine)
    assert again is not None
    assert again.devices == cluster.devices


def test_what_is_reserved_leaves_memory() -> None:
    faults: list[Fault] = []
    device = {
        "name": "mine",
        "flops": {"fp32": 1e13},
        "memory_bytes": 1e9,
        "memory_bandwidth_bytes_s": 1e12,
        "reserved_bytes": 1e9,
    }
    node = {"devices": 1, "device": device, "link": "pcie3_x16"}
    assert (
        read_inventory({"nodes": [node]}, "gpus", faults, MachineFacts(2, 10**9, (), None)) is None
    )
    assert [(x.key, x.rule) for x in faults] == [
        ("hardware.nodes[0].device.reserved_bytes", "leaves no memory")
    ]


def read(name: str) -> Cluster:
    config = composed([f"hardware={name}"])
    cluster = read_inventory(config["hardware"], name, [], MachineFacts(2, 10**9, (), None))
    assert cluster is not None
    return cluster
