"""Whole plans: by hand on Whale's mixed cluster, golden files, and what holds for every plan."""

import json
import os
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path

import pytest
from tests.unit.operation_graphs import (
    auxiliary_loss,
    classifier,
    gpt,
)
from tests.unit.plan_requests import at_peak, mixed, shipped, strategy_of, training

from whale_train.strategies.hardware.cluster import Cluster, Device, Link, Node
from whale_train.strategies.memory.engine_memory import ROUNDED_UP
from whale_train.strategies.plan.plan import Decision, Plan
from whale_train.strategies.plan.program import PlannedCast, PlannedShard
from whale_train.strategies.resolver.planned_inventory import planned_inventory
from whale_train.strategies.resolver.resolve import resolve

GOLDEN = Path(__file__).parents[1] / "golden"
REGENERATE = "REGENERATE_GOLDEN=1 python -m pytest tests/unit/test_resolve.py"


RANKS = tuple(range(16))
NETWORK_BYTES_S, NETWORK_LATENCY_S = 50e9 / 8, 14e-6


def ring_s(num_bytes: float) -> float:
    """A gather over 16 ranks on two hosts: 15 messages of a sixteenth over the network."""
    return 15 * (num_bytes / 16 / NETWORK_BYTES_S + NETWORK_LATENCY_S)


def test_data_parallel_on_the_mixed_cluster() -> None:
    plan = resolve(shipped("dp"), at_peak(mixed()), classifier(), training())
    evenly = replace(shipped("dp"), balance="even")
    even = resolve(evenly, at_peak(mixed()), classifier(), training())
    assert (plan.cluster, plan.world_size, plan.global_batch) == ("v100_p100_mix", 16, 2000)
    assert (plan.precision, plan.schedule, plan.exported, plan.rewrite) == (
        "fp32", "none", True, None,
    )  # fmt: skip
    (model,) = plan.task_graphs
    assert (model.id, model.name, model.primitive) == (0, "model", "replicate")
    assert (model.path, model.modules) == ("strategy.graph.replicate", ("*",))
    assert model.replicas == tuple((rank,) for rank in RANKS)
    assert model.shares == (157,) * 8 + (93,) * 8  # 15.7 and 9.3 of 200 TFLOP/s
    assert (model.zero, model.offload) == (0, {"optimizer": "none", "parameters": "none"})
    assert model.parameters == model.trained
    assert model.flops == 64.0 + 80.0
    assert (model.shards, model.shard_dims) == ({}, {})
    assert plan.groups == {"world": (RANKS,), "model.data_parallel": (RANKS,)}
    for rank, planned in enumerate(plan.ranks):
        first = rank < 8
        assert (planned.rank, planned.node) == (rank, 0 if first else 1)
        assert planned.device == ("v100_sxm2_32gb" if first else "p100_pcie_16gb")
        assert (planned.micro_batch_size, planned.micro_batches) == (157 if first else 93, 1)
        assert (planned.task_graphs, planned.deepspeed) == ((0,), {"0": None})
    assert plan.decisions == (
        Decision(
            "strategy.graph.replicate.degree", "16", "", "all devices of hardware=v100_p100_mix"
        ),
        Decision(
            "strategy.balance",
            "8 x 157, 8 x 93",
            "even 16 x 125",
            "each takes what it does in the time of the slowest, within its memory",
            rejected_step_s=even.predicted.step_time_s,
        ),
    )
    assert even.task_graphs[0].shares == (125,) * 16
    ratio = even.predicted.compute_s / plan.predicted.compute_s
    assert ratio == pytest.approx((125 / 9.3) / (93 / 9.3), rel=0.01)


# The norm of all gradients, and sums as small: up and down four levels of a tree.
SMALL_SUM_S = 2 * (4 * NETWORK_LATENCY_S)


def in_node_sum_s(elements: int) -> float:
    """Over 8 devices on PCI Express: up and down a tree of three levels."""
    return 2 * (3 * 5.7e-6 + 4 * elements / 15.75e9)


def batch_norm_s() -> tuple[float, float]:
    """Of four channels: nine fp64 numbers of every rank forward, and eight fp32 ones backward."""
    return ring_s(16 * 9 * 8), SMALL_SUM_S + 2 * 8 * 4 / NETWORK_BYTES_S


def test_its_prediction() -> None:
    predicted = resolve(shipped("dp"), at_peak(mixed()), classifier(), training()).predicted
    # Forward, and the gradients of a product's two factors, but not of the samples. Both kinds of
    # device end together.
    compute_s = (2 * 64 + 3 * 80) * 157 / 15.7e12
    elements = 4 * 8 + 4 + 4 + 4 + 10 * 4 + 10
    sums_s = in_node_sum_s(elements) + SMALL_SUM_S + 2 * 4 / NETWORK_BYTES_S + sum(batch_norm_s())
    update_s = 4 * elements * 4 / 732e9  # of the P100s, whose memory is slower
    assert predicted.compute_s == pytest.approx(compute_s, rel=1e-9)
    assert predicted.communication_s == pytest.approx(sums_s, rel=1e-9)
    assert predicted.optimizer_s == pytest.approx(update_s, rel=1e-9)
    assert predicted.idle_s == pytest.approx(0.0, abs=1e-12)
    step_s = compute_s + sums_s + update_s
    assert predicted.step_time_s == pytest.approx(step_s, rel=1e-9)
    assert predicted.samples_per_s == pytest.approx(2000 / step_s, rel=1e-9)


def test_even_is_slower_by_the_slow_devices() -> None:
    even = replace(shipped("dp"), balance="even")
    plan = resolve(even, at_peak(mixed()), classifier(), training())
    assert plan.task_graphs[0].shares == (125,) * 16
    assert plan.predicted.compute_s == pytest.approx((2 * 64 + 3 * 80) * 125 / 9.3e12, rel=1e-9)
    assert [decision.key for decision in plan.decisions] == ["strategy.graph.replicate.degree"]


def test_a_split_head_on_the_mixed_cluster() -> None:
    profile = classifier(classes=100_000)
    plan = resolve(shipped("hybrid_split_dp"), at_peak(mixed()), profile, training(momentum=0.9))
    backbone, head = plan.task_graphs
    assert backbone.shares == (157,) * 8 + (93,) * 8
    assert (head.name, head.primitive, head.modules) == ("head", "split", ("head",))
    assert (head.replicas, head.shares) == ((RANKS,), (2000,))
    # Classes in the same proportion: 7,850 and 4,650 sum to 100,000.
    rows = [(7850 * rank, 7850 * (rank + 1)) for rank in range(8)]
    rows += [(62_800 + 4650 * rank, 62_800 + 4650 * (rank + 1)) for rank in range(8)]
    assert head.shards == {"head.weight": tuple(rows), "head.bias": tuple(rows)}
    assert head.shard_dims == {"head.weight": 0, "head.bias": 0}
    assert plan.groups == {
        "world": (RANKS,),
        "backbone.data_parallel": (RANKS,),
        "head.model_parallel": (RANKS,),
    }
    assert plan.rewrite is not None
    assert plan.rewrite.axes["head.weight"] == tuple(rows)
    assert plan.pipeline is not None
    (((members,),),) = (copy.members for copy in plan.pipeline.copies)
    assert members[7:9] == ((1099, 1256), (1256, 1349))
    assert [rank.deepspeed for rank in plan.ranks] == [{"0": None, "1": None}] * 16
    assert plan.decisions[-1] == Decision(
        "strategy.graph[1].split.modules",
        "head",
        "",
        "the output projection of classifier: head.weight with 100000 classes",
    )
    # Compute and momentum's traffic of rank 0; the features [2000, 4] gathered and scattered back
    # in rings, the labels gathered, the backbone's gradients summed inside of nodes, which takes
    # longer than between the two, their norm in a tree of all, and what BatchNorm exchanges.
    compute_s = (2 * 64 * 157 + 3 * 800_000 * 2000 * 0.0785) / 15.7e12
    update_s = 4 * (44 + 7850 * 5) * 6 / 900e9
    predicted = plan.predicted
    assert predicted.compute_s == pytest.approx(compute_s, rel=1e-9)
    assert predicted.optimizer_s == pytest.approx(update_s, rel=1e-9)
    sums_s = in_node_sum_s(44) + SMALL_SUM_S + 2 * 4 / NETWORK_BYTES_S + sum(batch_norm_s())
    crossing_s = 2 * ring_s(4 * 2000 * 4) + ring_s(4 * 2000)
    assert predicted.communication_s == pytest.approx(sums_s + crossing_s, rel=1e-9)


def test_memory_of_a_rank_is_both_its_task_graphs() -> None:
    plan = resolve(shipped("hybrid_split_dp"), at_peak(mixed()), classifier(160), training(160))
    memory = plan.ranks[0].memory_bytes
    samples, classes = plan.task_graphs[0].shares[0], plan.task_graphs[1].shards["head.bias"][0][1]
    assert (samples, classes) == (13, 13)  # 12.56 of 160
    assert memory.parameters == 4 * (44 + 5 * 13) + 40
    assert memory.gradients == 4 * (44 + 5 * 13)
    assert memory.optimizer == 0
    assert memory.activations == pytest.approx(13 * 1000 * ROUNDED_UP)  # of its own samples


def test_a_head_is_written_for_the_ranks_as_a_part_of_the_one_segment() -> None:
    plan = resolve(shipped("hybrid_split_dp"), mixed().first(2), gpt(tied=True), training(5))
    assert plan.rewrite is not None
    assert plan.rewrite.axes == {"token.weight": ((0, 6), (6, 12))}
    assert plan.pipeline is not None
    assert plan.pipeline.copies[0].members == ((((0, 3), (3, 5)),),)
    (segment,) = plan.rewrite.segments
    assert (segment.task_graph, segment.takes, segment.gives) == (0, (), ("loss",))
    batch, classes = (PlannedShard(0, axis) for axis in ("batch", "token.weight"))
    assert segment.layouts["lm_head_weight"] == replace(classes, pieces=(12,))
    assert segment.layouts["logits"] == PlannedShard(2, "token.weight", 1, (12,))
    assert "loss" not in segment.layouts
    assert segment.becomes == {"embedding": "split_embedding", "loss": "split_cross_entropy"}
    assert set(segment.casts) >= {
        PlannedCast("embedding", "input_ids", "gather", batch),
        PlannedCast("linear", "embedding", "reduce_scatter", batch),
        PlannedCast("logits", "norm", "gather_enter", batch),
    }


def test_zero_configs_carry_the_rank_s_samples() -> None:
    offloaded = shipped("zero2_offload")
    plan = resolve(offloaded, at_peak(mixed()), classifier(), training(momentum=0.5))
    assert plan.task_graphs[0].offload == {"optimizer": "cpu", "parameters": "none"}
    assert plan.task_graphs[0].zero == 2
    sizes = []
    for rank in plan.ranks:
        config = rank.deepspeed["0"]
        assert config is not None
        sizes.append(config["train_micro_batch_size_per_gpu"])
        assert config["optimizer"] == {
            "type": "SGD",
            "params": {"lr": 0.1, "momentum": 0.5, "fused": False},
        }
        assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert sizes == [157] * 8 + [93] * 8


def test_one_device_leaves_the_rest_idle_and_says_so() -> None:
    plan = resolve(shipped("single"), mixed(), classifier(), training())
    assert plan.world_size == 1
    assert plan.task_graphs[0].shares == (2000,)
    assert plan.predicted.communication_s == 0.0
    assert plan.decisions[0] == Decision(
        "strategy.devices",
        "1",
        "16",
        "strategy=single uses so many; 15 idle of hardware=v100_p100_mix",
    )


def test_fewer_copies_than_devices_are_nested_in_an_outer_replicate() -> None:
    strategy = strategy_of({"graph": {"replicate": {"degree": 4}}})
    plan = resolve(strategy, mixed(), classifier(), training())
    assert plan.groups["model.data_parallel"] == (RANKS,)
    assert plan.decisions[0] == Decision(
        "strategy.graph", "16", "4", "an outer replicate of 4 uses all 16 devices"
    )


def test_what_was_asked_for_is_no_decision() -> None:
    strategy = strategy_of({"graph": {"replicate": {"degree": 16}}, "balance": "even"})
    assert resolve(strategy, mixed(), classifier(), training()).decisions == ()


def test_a_model_that_cannot_be_exported_has_a_plan_that_says_so() -> None:
    profile = replace(classifier(), graph=None, export_error="ValueError: it branches")
    plan = resolve(shipped("zero3"), mixed(), profile, training())
    assert not plan.exported
    assert plan.task_graphs[0].flops == 144.0


def test_a_parameter_without_a_gradient_is_held_and_not_trained() -> None:
    profile = replace(classifier(), unused_parameters=("norm.bias",))
    plan = resolve(shipped("dp"), mixed(), profile, training())
    (model,) = plan.task_graphs
    assert set(model.parameters) - set(model.trained) == {"norm.bias"}
    assert plan.decisions[-1] == Decision(
        "norm.bias", "not trained", "", "the loss does not depend on it"
    )


def test_what_a_split_gathers_for_want_of_a_rule_is_said() -> None:
    plan = resolve(shipped("hybrid_split_dp"), mixed().first(2), auxiliary_loss(), training())
    assert not [d for d in plan.decisions if d.key.startswith("operation")]
    graph = auxiliary_loss().graph
    assert graph is not None
    renamed = tuple(
        replace(op, target="aten.nll.unheard_of") if op.name == "task" else op for op in graph
    )
    profile = replace(auxiliary_loss(), graph=replace(graph, operations=renamed))
    plan = resolve(shipped("hybrid_split_dp"), mixed().first(2), profile, training())
    reason = "no rule for it: it is given whole tensors, which is slower"
    assert Decision("operation task", "whole", "sharded", reason) in plan.decisions


FAST = Device("fast", {"fp32": 3e12}, 16e9, 1e12)
SLOW = Device("slow", {"fp32": 1e12}, 8e9, 5e11)
UNLIKE = Cluster(
    "unlike",
    (
        Node((FAST, FAST), Link("inside", 1e11, 1e-6)),
        Node((SLOW, SLOW), Link("inside", 1e10, 2e-6)),
    ),
    Link("between", 1e9, 1e-5),
)
GOLDEN_PLANS = {
    "plan_dp": (strategy_of({"graph": "replicate"}), classifier()),
    "plan_hybrid": (
        strategy_of({"graph": [{"replicate": {"zero": 1}}, {"split": {"modules": "head"}}]}),
        gpt(tied=True),
    ),
}


@pytest.mark.parametrize("name", GOLDEN_PLANS)
def test_golden_plans(name: str) -> None:
    strategy, profile = GOLDEN_PLANS[name]
    path = GOLDEN / f"{name}.json"
    found = resolve(strategy, UNLIKE, profile, training(16, momentum=0.9)).to_json()
    if os.environ.get("REGENERATE_GOLDEN"):
        path.write_text(found, encoding="utf-8")
    golden = path.read_text(encoding="utf-8") if path.exists() else ""
    if found != golden:
        lines = unified_diff(
            golden.splitlines(), found.splitlines(), path.name, "now", n=2, lineterm=""
        )
        pytest.fail("\n".join([*lines, f"if the new plan is right: {REGENERATE}"]), pytrace=False)


def test_the_file_says_the_total_of_a_ranks_memory() -> None:
    plan = resolve(shipped("dp"), mixed(), classifier(), training())
    written = json.loads(plan.to_json())
    memory = written["ranks"][0]["memory_bytes"]
    assert memory["total"] == sum(size for part, size in memory.items() if part != "total")
    assert plan.to_json().endswith("}\n")


def test_the_keys_of_the_file() -> None:
    """The contract of the design, section 6."""
    plan = resolve(shipped("hybrid_split_dp"), mixed(), classifier(160), training())
    written = json.loads(plan.to_json())
    assert set(written) >= {
        "cluster", "world_size", "global_batch", "task_graphs", "groups", "schedule", "ranks",
        "predicted", "decisions",
    }  # fmt: skip
    assert set(written["task_graphs"][1]) >= {
        "id", "name", "primitive", "path", "modules", "parameters", "flops", "replicas", "shares",
        "shards",
    }  # fmt: skip
    assert set(written["ranks"][0]) >= {
        "rank", "node", "device", "task_graphs", "micro_batch_size", "micro_batches",
        "memory_bytes", "deepspeed",
    }  # fmt: skip
    assert set(written["ranks"][0]["memory_bytes"]) == {
        "parameters", "gradients", "optimizer", "activations", "communication", "total",
    }  # fmt: skip
    assert {"step_time_s", "samples_per_s"} <= set(written["predicted"])


def test_what_a_rank_holds_of_a_primitive() -> None:
    plan = resolve(shipped("hybrid_split_dp"), mixed(), classifier(160), training())
    assert plan.task_graph_of(3, "split") == plan.task_graphs[1]
    assert plan.task_graph_of(3, "replicate") == plan.task_graphs[0]
    whole = resolve(shipped("dp"), mixed(), classifier(), training())
    assert whole.task_graph_of(3, "split") is None


def test_a_plan_says_the_cluster_that_it_is_for() -> None:
    plan = resolve(shipped("dp"), mixed(), classifier(), training())
    assert plan.inventory is not None
    assert [(x.count, x.devices) for x in plan.inventory.nodes] == [
        (1, ("v100_sxm2_32gb",) * 8),
        (1, ("p100_pcie_16gb",) * 8),
    ]
    assert plan.inventory.devices["p100_pcie_16gb"].flops["fp32"] == 9.3e12
    assert plan.inventory.network.bandwidth_bytes_s == NETWORK_BYTES_S
    assert Plan.from_json(plan.to_json()).inventory == plan.inventory
    # Equal neighbours are said once.
    again = replace(mixed(), nodes=mixed().nodes[:1] * 64)
    (nodes,) = planned_inventory(again).nodes
    assert nodes.count == 64
