"""What holds for every plan, whatever was asked for: shares, shards, groups, memory, the file."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.pairs import examples
from tests.unit.operation_graphs import (
    auxiliary_loss,
    bert,
    classifier,
    conv1d_head,
    gpt,
    two_heads,
)
from tests.unit.plan_requests import at_peak, shipped, strategy_of, training

from whale_train.errors import Fault, PlanError
from whale_train.strategies.grammar.nodes import Strategy
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.hardware.cluster import Cluster, Device, Link, Node
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.resolve import resolve

PROFILES = [
    classifier(),
    classifier(batch_norm=False),
    gpt(),
    gpt(tied=True),
    bert(),
    conv1d_head(),
    two_heads(),
    auxiliary_loss(),
]
OFFLOAD = {"optimizer": "cpu", "parameters": "cpu"}
BODIES: list[dict[str, Any]] = [{"replicate": {"zero": zero}} for zero in range(4)]
BODIES.append({"replicate": {"zero": 3, "offload": OFFLOAD}})
STRATEGIES: list[dict[str, Any]] = [
    *({"graph": body} for body in BODIES),
    {"graph": {"replicate": {"degree": 1}}},
    *({"graph": [body, {"split": {"modules": "head"}}]} for body in BODIES),
]


@st.composite
def requests(draw: st.DrawFn) -> tuple[Strategy, Cluster, ModelProfile, Training]:
    devices = st.builds(
        lambda flops, memory: Device("drawn", {"fp32": flops, "bf16": 4 * flops}, memory, 1e11),
        st.floats(1e9, 1e15),
        st.floats(3000, 50_000) | st.just(1e9),
    )
    links = st.builds(Link, st.just("link"), st.floats(1e6, 1e12), st.floats(0, 1e-3))
    nodes = st.builds(Node, st.lists(devices, min_size=1, max_size=3).map(tuple), links)
    cluster = Cluster("drawn", tuple(draw(st.lists(nodes, min_size=1, max_size=3))), draw(links))
    count = len(cluster.devices)
    mapping = {
        **draw(st.sampled_from(STRATEGIES)),
        "balance": draw(st.sampled_from(["hardware", "even"])),
    }
    if draw(st.integers(0, 3)) == 0:
        count = mapping["devices"] = draw(st.integers(1, count))
    optimizer, options = draw(st.sampled_from([("sgd", {}), ("adam", {"betas": [0.9, 0.99]})]))
    precision = draw(st.sampled_from(["fp32", "bf16"]))
    batch = draw(st.integers(max(count - 1, 1), 60) | st.integers(1, 10**6))
    train = Training(batch, precision, 0.0, optimizer, {"lr": 0.1, **options})
    return strategy_of(mapping), cluster, draw(st.sampled_from(PROFILES)), train


def check(
    plan: Plan, strategy: Strategy, cluster: Cluster, profile: ModelProfile, batch: int
) -> None:
    count = strategy.devices or len(cluster.devices)
    everyone = set(range(count))
    assert plan.world_size == len(plan.ranks) == count
    body = plan.task_graphs[0]
    assert sum(body.shares) == batch
    assert min(body.shares) >= 1
    if strategy.balance == "even":
        assert max(body.shares) - min(body.shares) <= 1
    for task_graph in plan.task_graphs:
        assert sum(task_graph.shares) == batch
        assert len(task_graph.shares) == len(task_graph.replicas)
        ranks = [rank for replica in task_graph.replicas for rank in replica]
        assert sorted(ranks) == sorted(everyone)
        for path, shards in task_graph.shards.items():
            extent = profile.parameter_by_path[path].shape[task_graph.shard_dims[path]]
            held = [row for start, stop in shards for row in range(start, stop)]
            assert held == list(range(extent))  # tiled in the order of the ranks
            assert all(start < stop for start, stop in shards)
    for groups in plan.groups.values():
        assert sorted(rank for group in groups for rank in group) == sorted(everyone)
    parameters = [path for task_graph in plan.task_graphs for path in task_graph.parameters]
    assert sorted(parameters) == sorted(p.path for p in profile.parameters)
    for rank, planned in enumerate(plan.ranks):
        assert planned.rank == rank
        assert planned.node == cluster.node_of[rank]
        assert planned.micro_batch_size * planned.micro_batches == body.shares[rank]
        assert planned.memory_bytes.total <= cluster.devices[rank].memory_bytes * (1 + 1e-12)
        config = planned.deepspeed["0"]
        assert (config is None) == (body.zero == 0 or bool(body.state_parts))
        assert config is None or config["train_micro_batch_size_per_gpu"] == body.shares[rank]
    if body.state_parts:
        assert len(body.state_parts) == count
        assert min(body.state_parts) >= 0
    predicted = plan.predicted
    computed = (predicted.compute_s, predicted.optimizer_s)
    parts = (*computed, predicted.communication_s, predicted.idle_s)
    assert predicted.step_time_s == pytest.approx(sum(parts))
    assert min(parts) >= 0
    assert predicted.samples_per_s == pytest.approx(batch / predicted.step_time_s)


@settings(max_examples=examples(100))
@given(requests())
def test_a_request_gets_a_sound_plan_or_faults(
    request: tuple[Strategy, Cluster, ModelProfile, Training],
) -> None:
    strategy, cluster, profile, train = request
    try:
        plan = resolve(*request)
    except PlanError as refused:
        faults = refused.faults
    else:
        faults = ()
    if faults:
        assert all(fault.key and fault.rule and fault.remedy for fault in faults)
        event(faults[0].key)
        remedied(request, faults)
        return
    event(f"a plan of {len(plan.task_graphs)}")
    check(plan, strategy, cluster, profile, train.global_batch)
    text = plan.to_json()
    assert resolve(*request).to_json() == text
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text


def remedied(
    request: tuple[Strategy, Cluster, ModelProfile, Training], faults: tuple[Fault, ...]
) -> None:
    """The nearest legal batch is legal, and one more is not."""
    (fault, *others) = faults
    named = re.match(r"use at (most|least) (\d+)", fault.remedy)
    if others or fault.key != "train.global_batch" or not named:
        return
    strategy, cluster, profile, train = request
    batch = int(named[2])
    event(f"remedy: use at {named[1]}")
    if named[1] == "most":
        assert batch < train.global_batch
        resolve(strategy, cluster, profile, replace(train, global_batch=batch))
        if len(strategy.graph) == 1:  # with a smaller batch, a split head leaves more room
            with pytest.raises(PlanError):
                resolve(strategy, cluster, profile, replace(train, global_batch=batch + 1))


def test_a_thousand_unlike_devices() -> None:
    device = Device("unlike", {}, 16e9, 1e12)
    nodes = tuple(
        Node((replace(device, flops={"fp32": (1 + i % 5) * 1e12}),) * 8, Link("inside", 1e11, 1e-6))
        for i in range(125)
    )
    cluster = Cluster("large", nodes, Link("between", 1e9, 1e-5))
    profile = classifier(classes=3000)
    strategy = shipped("hybrid_split_dp")
    cluster = at_peak(cluster)
    plan = resolve(strategy, cluster, profile, training(3000))
    check(plan, strategy, cluster, profile, 3000)
    # 200 devices of each speed 1 to 5: 3,000 of either are shared as 1 to 5.
    assert plan.task_graphs[0].shares == tuple(1 + rank // 8 % 5 for rank in range(1000))
    classes = [stop - start for start, stop in plan.task_graphs[1].shards["head.weight"]]
    assert classes == [1 + rank // 8 % 5 for rank in range(1000)]
