"""Copies that run the model as it is, and the same ones that run its graph: one step, one need of
memory.

Both run the same engines over the same groups; where their programs really differ, the test of it
says how.
"""

from dataclasses import asdict, replace
from typing import Any

import pytest
from tests.unit.operation_graphs import Sketch
from tests.unit.plan_requests import strategy_of

from whale_train.strategies.grammar.nodes import Replicate
from whale_train.strategies.graph.operation_graph import INSIDE, ModelProfile, OperationGraph
from whale_train.strategies.hardware.catalogue import DEVICES, LINKS
from whale_train.strategies.hardware.cluster import CPU_PROCESS, Cluster, Device, Link, Node
from whale_train.strategies.memory.engine_memory import weight_width, zero3_live_bytes
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.deepspeed_config import deepspeed_config
from whale_train.strategies.resolver.resolve import resolve

BATCH, WIDTH = 64, 512


def model(wide: bool = False, weights: int = 1, classes: int = 6000) -> ModelProfile:
    """Three residual blocks of so many `weights`, and a head. What blocks add to is a product's,
    or, `wide`, rows of a table, which are fp32 under autocast. It is said what autograd keeps."""
    s = Sketch()
    for name in ("inn", *(f"blocks.{i}.w{j}" for i in range(3) for j in range(weights))):
        s.parameter(f"{name}.weight", f"{WIDTH} {WIDTH}")
    s.parameter("head.weight", f"{classes} {WIDTH}")
    s.input("x", "B" if wide else f"B {WIDTH}", "int64" if wide else "float32")
    s.input("labels", "B")
    shape, flops = f"B {WIDTH}", 2.0 * WIDTH * WIDTH
    if wide:
        h = s.call("h", "embedding.default", "inn_weight", "x", shape=shape, module="inn")
    else:
        h = s.call("h", "linear.default", "x", "inn_weight", shape=shape, module="inn", flops=flops)
    for i in range(3):
        inner = h
        for j in range(weights):
            inner = s.call(
                f"p{i}{j}", "linear.default", inner, f"blocks_{i}_w{j}_weight",
                shape=shape, module=f"blocks.{i}.w{j}", flops=flops,
            )  # fmt: skip
        h = s.call(f"r{i}", "add.Tensor", h, inner, shape=shape, module=f"blocks.{i}")
    s.call(
        "logits", "linear.default", h, "head_weight", shape=f"B {classes}", module="head",
        flops=2.0 * WIDTH * classes,
    )  # fmt: skip
    s.call("loss", "cross_entropy_loss.default", "logits", "labels", shape="")
    profile = s.profile("stack", "loss")
    assert profile.graph is not None
    kept = {
        "aten.linear.default": ((0, 4.0 * WIDTH),),
        "aten.cross_entropy_loss.default": ((INSIDE, 4.0 * classes),),
    }
    listed = (replace(each, saved=kept.get(each.target, ())) for each in profile.graph)
    return replace(profile, graph=OperationGraph(tuple(listed)))


A100 = DEVICES["a100_sxm_80gb"]
CPU = Device(CPU_PROCESS, {"fp32": 1e11, "bf16": 1e11, "fp16": 1e11}, 1e12, 1e10)
LINK, SLOW = LINKS["nvlink3"], LINKS["ethernet_10g"]
CLUSTERS = {
    "one node": Cluster("one", (Node((A100,) * 8, LINK),), SLOW),
    "two nodes": Cluster("two", (Node((A100,) * 4, LINK),) * 2, SLOW),
}
LOOPBACK = Link("loopback", 1e9, 1e-5)
PROCESSES = Cluster("cpu", (Node((CPU,) * 8, LOOPBACK),), LOOPBACK)

ONE_STAGE: dict[str, Any] = {"pipeline": {"stages": 1, "micro_batches": 1}}
HOST = {"optimizer": "cpu", "parameters": "none"}
ALL_ON_HOST = {"optimizer": "cpu", "parameters": "cpu"}
# Under ZeRO 2 and 3, which a pipeline has not, the same copies written as copies of copies.
WRITTEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp": ({}, ONE_STAGE),
    "zero1": ({"zero": 1}, ONE_STAGE),
    "zero1, offloaded": ({"zero": 1, "offload": HOST}, ONE_STAGE),
    "zero2": ({"zero": 2}, {"replicate": {"degree": 4}}),
    "zero2, offloaded": ({"zero": 2, "offload": HOST}, {"replicate": {"degree": 4}}),
    "zero3": ({"zero": 3}, {"replicate": {"degree": 4}}),
    "zero3, offloaded": ({"zero": 3, "offload": ALL_ON_HOST}, {"replicate": {"degree": 4}}),
}


def planned(graph: Any, cluster: Cluster, profile: ModelProfile, precision: str) -> Plan:
    training = Training(BATCH, precision, 0.0, "adamw", {"lr": 0.1})
    return resolve(strategy_of({"graph": graph}), cluster, profile, training)


def both(name: str, cluster: Cluster, profile: ModelProfile, precision: str) -> tuple[Plan, Plan]:
    """The plans of a strategy of `WRITTEN`, as it is and nested."""
    node, inner = WRITTEN[name]
    flat = planned({"replicate": node}, cluster, profile, precision)
    return flat, planned({"replicate": {**node, "of": inner}}, cluster, profile, precision)


def check_equal(flat: Plan, nested: Plan) -> None:
    assert asdict(nested.predicted) == pytest.approx(asdict(flat.predicted), rel=1e-9)
    for one, other in zip(flat.ranks, nested.ranks, strict=True):
        assert asdict(other.memory_bytes) == pytest.approx(asdict(one.memory_bytes), rel=1e-9)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("name", WRITTEN)
def test_copies(name: str, cluster: str, precision: str) -> None:
    flat, nested = both(name, CLUSTERS[cluster], model(), precision)
    assert flat.pipeline is None
    assert (nested.pipeline is None) == (WRITTEN[name][1] is not ONE_STAGE)
    check_equal(flat, nested)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name in WRITTEN if "offloaded" in name])
def test_what_cpu_processes_offload_stays_with_them(name: str, precision: str) -> None:
    assert PROCESSES.on_cpu
    check_equal(*both(name, PROCESSES, model(), precision))


HEAD: list[Any] = [{"replicate": {}}, {"split": {"modules": "head", "degree": 8}}]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("wide", [False, True])
def test_copies_beside_a_split_head(wide: bool, cluster: str, precision: str) -> None:
    """Whether what crosses to the head is a product's, or wider than the precision."""
    nested = {"pipeline": {"micro_batches": 1, "stages": [{"stage": {"of": HEAD}}]}}
    profile = model(wide)
    one, other = (planned(g, CLUSTERS[cluster], profile, precision) for g in (HEAD, nested))
    check_equal(one, other)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_head_split_inside_a_stage_pays_for_the_sum_of_the_rest(precision: str) -> None:
    """A node sends its sum of the other parameters' fp32 gradients over the network, once at the
    least, whatever they are hidden behind."""
    nested = {"pipeline": {"micro_batches": 1, "stages": [{"stage": {"of": HEAD}}]}}
    plan = planned(nested, CLUSTERS["two nodes"], model(), precision)
    sent = 4 * 4 * WIDTH * WIDTH
    assert plan.predicted.step_time_s > sent / SLOW.bandwidth_bytes_s


@pytest.mark.parametrize(
    ("precision", "zero", "parameters"),
    [("fp32", 1, 4), ("fp32", 3, 4), ("bf16", 1, 2), ("bf16", 3, 2)],
)
def test_zero_gathers_parameters_as_forward_reads_them_and_sums_in_fp32(
    precision: str, zero: int, parameters: int
) -> None:
    config = deepspeed_config(Replicate("", zero=zero), 1, 0.0, {}, on_cpu=False)
    assert config is not None
    assert config["communication_data_type"] == "fp32"
    profile = model()
    assert profile.narrow == {parameter.path for parameter in profile.parameters}
    assert weight_width(profile, precision, zero) == parameters


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
def test_zero_3_gathers_a_rewritten_graph_by_blocks(precision: str, width: int) -> None:
    """The exported graph's blocks have their parameters while they run
    (runtime/graph/block_modules.py); of the model as it is every module does."""
    profile = model(weights=3, classes=600)
    elements = {p.path: float(p.elements) for p in profile.parameters}
    by_module, by_block = (
        zero3_live_bytes(elements, {}, profile, precision, by_block) for by_block in (False, True)
    )
    block, module = 3 * WIDTH * WIDTH, 600 * WIDTH
    # With their gradients, in fp32.
    assert (by_module, by_block) == ((width + 4) * module, (width + 4) * block)


def test_processes_sum_gradients_of_copies_in_shared_memory() -> None:
    """Those of a pipeline's stage may be ready at any time, and have no group for it
    (runtime/comms/process_groups.py): they go through the node's link."""
    cluster = replace(PROCESSES, shared_memory=Link("memory", 1e10, 1e-6))
    flat, nested = both("dp", cluster, model(), "fp32")
    slow_flat, slow_nested = both("dp", PROCESSES, model(), "fp32")
    assert nested.predicted == slow_nested.predicted == slow_flat.predicted
    assert flat.predicted.communication_s < nested.predicted.communication_s
    assert nested.ranks[0].memory_bytes == flat.ranks[0].memory_bytes
