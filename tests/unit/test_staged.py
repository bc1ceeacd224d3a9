"""Plans of nested strategies, resolved without torch on a stack of blocks."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.pairs import examples
from tests.unit.operation_graphs import gpt
from tests.unit.plan_requests import strategy_of, training
from tests.unit.test_stages import model

from whale_train.errors import PlanError
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.hardware.cluster import Cluster, Device, Link, Node
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.resolver.resolve import consider, resolve
from whale_train.strategies.stages.analysis import ModelAnalysis

LINK = Link("link", 1e10, 1e-6)


def cluster(*speeds: float, memory: float = 1e9) -> Cluster:
    """A node of devices of these speeds in TFLOP/s."""
    devices = tuple(Device(f"gpu_{s:g}", {"fp32": s * 1e12}, memory, 1e12) for s in speeds)
    return Cluster("mine", (Node(devices, LINK),), LINK)


def planned(
    graph: Any,
    devices: Cluster,
    profile: ModelProfile | None = None,
    batch: int = 16,
    **keys: Any,
) -> Plan:
    strategy = strategy_of({"graph": graph, **keys})
    return resolve(strategy, devices, profile or model([1.0] * 6), training(batch))


def refused(*args: Any, **keys: Any) -> list[str]:
    with pytest.raises(PlanError) as error:
        planned(*args, **keys)
    return [str(fault) for fault in error.value.faults]


def check(plan: Plan, profile: ModelProfile) -> None:
    """What holds of every plan."""
    assert plan.pipeline is not None
    ranks = [r for t in plan.task_graphs for group in t.replicas for r in group]
    assert sorted(ranks) == list(range(plan.world_size))
    held = {path for t in plan.task_graphs for path in t.parameters}
    assert held == {p.path for p in profile.parameters}
    for task_graph in plan.task_graphs:
        assert sum(task_graph.shares) == plan.global_batch
        for path, intervals in task_graph.shards.items():
            assert path in task_graph.parameters
            assert len(intervals) == len(task_graph.replicas[0])
            assert intervals[0][0] == 0
            assert all(a[1] == b[0] for a, b in pairwise(intervals))
            assert all(start < stop for start, stop in intervals)
    tiled = [interval for copy in plan.pipeline.copies for interval in copy.samples]
    assert tiled[0][0] == 0
    assert tiled[-1][1] == plan.global_batch
    assert all(a[1] == b[0] and a[0] < a[1] for a, b in pairwise(tiled))
    for rank in plan.ranks:
        assert rank.samples
        assert rank.micro_batches == len(rank.samples)
        assert rank.memory_bytes.total > 0
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()


PIPELINE = {"pipeline": {"stages": 2}}
SPLIT = {"split": {"degree": 2}}


@given(
    st.sampled_from(
        [
            (SPLIT, 2),
            ({"replicate": {"of": SPLIT}}, 4),
            (PIPELINE, 2),
            ({"pipeline": {"stages": 3, "schedule": "gpipe"}}, 3),
            ({"pipeline": {"stages": 2, "schedule": "interleaved_1f1b"}}, 2),
            ({"pipeline": {"stages": 3, "schedule": "zero_bubble"}}, 3),
            ({"replicate": {"of": PIPELINE}}, 4),
            ({"pipeline": {"stages": [SPLIT, SPLIT]}}, 4),
            ({"pipeline": {"stages": [{"replicate": {"degree": 3}}, SPLIT]}}, 5),
            ({"pipeline": {"stages": [{"stage": {"recompute": "auto"}}, SPLIT]}}, 3),
        ]
    ),
    st.lists(st.sampled_from([1.0, 2.0, 3.5, 90.0]), min_size=5, max_size=5),
    st.lists(st.integers(1, 5), min_size=6, max_size=8),
    st.integers(12, 40),
    st.sampled_from(["hardware", "even"]),
    st.booleans(),
)
@settings(max_examples=examples(12))
def test_every_plan_is_whole(
    shape: tuple[Any, int],
    speeds: list[float],
    work: list[int],
    batch: int,
    balance: str,
    tied: bool,
) -> None:
    graph, devices = shape
    assume(not tied or "split" not in str(graph.get("pipeline")))  # see the test of its refusal
    profile = model([float(w) for w in work], tied=tied, skip=True)
    there = cluster(*speeds[:devices])
    plan = planned(graph, there, profile, batch, balance=balance)
    check(plan, profile)
    assert planned(graph, there, profile, batch, balance=balance).to_json() == plan.to_json()


def test_faster_copies_and_faster_stages_take_more() -> None:
    plan = planned({"replicate": {"of": PIPELINE}}, cluster(3, 3, 1, 1), model([1e9] * 6))
    assert [t.shares for t in plan.task_graphs] == [(12, 4), (12, 4)]
    uneven = planned(PIPELINE, cluster(2, 1), model([1e9] * 6))
    assert [t.flops for t in uneven.task_graphs] == [4e9, 2e9]
    even = planned(PIPELINE, cluster(2, 1), model([1e9] * 6), balance="even")
    assert [t.flops for t in even.task_graphs] == [3e9, 3e9]


def test_a_faster_member_holds_more_of_a_split() -> None:
    plan = planned({"split": {}}, cluster(3, 1))
    intervals = {t for task_graph in plan.task_graphs for t in task_graph.shards.values()}
    assert intervals == {((0, 6), (6, 8))}


def test_tied_weights_stay_whole_and_are_summed_over_their_stages() -> None:
    plan = planned(
        {"pipeline": {"stages": [SPLIT, SPLIT]}}, cluster(1, 1, 1, 1), model([1.0] * 4, tied=True)
    )
    assert plan.pipeline is not None
    assert plan.pipeline.shared == {"blocks.0.weight": (0, 1)}
    assert plan.groups["shared.blocks.0.weight"] == ((0, 1, 2, 3),)
    assert all("blocks.0.weight" not in t.shards for t in plan.task_graphs)


def test_a_split_stage_of_nothing_but_a_tied_weight_is_refused() -> None:
    (fault,) = refused(
        {"pipeline": {"stages": [SPLIT, SPLIT]}},
        cluster(1, 1, 1, 1),
        model([9.0, 1.0, 1.0], tied=True),
    )
    assert fault == (
        "strategy.graph.pipeline.stages[0].split finds nothing to cut over 2 devices in blocks.0, "
        "beside what another stage holds as well; use fewer devices, patterns for its weights, or "
        "another primitive"
    )


def test_a_split_stage_is_cut_where_it_has_something_to_shard() -> None:
    """By work alone the first stage would hold the first block and nothing else, whose weight is
    tied to the last one's."""
    profile = model([9e9, 1e9, 1e9, 1e9], tied=True)
    plan = planned({"pipeline": {"stages": [SPLIT, SPLIT]}}, cluster(1, 1, 1, 1), profile)
    first, last = plan.task_graphs
    assert (first.modules, last.modules) == (
        ("blocks.0", "blocks.1"),
        ("blocks.2", "blocks.3", "loss"),
    )
    assert [list(t.shards) for t in (first, last)] == [["blocks.1.weight"], ["blocks.2.weight"]]
    whole = planned({"pipeline": {"stages": 2}}, cluster(1, 1), profile)
    assert whole.task_graphs[0].modules == ("blocks.0",)


def test_recompute_is_chosen_where_activations_do_not_fit() -> None:
    profile = replace(model([1.0] * 8), activation_bytes=80e6)
    graph = {"pipeline": {"stages": [{"stage": {"recompute": "auto"}}, {"stage": {}}]}}
    tight = planned(graph, cluster(1, 1, memory=100e6), profile)
    roomy = planned(graph, cluster(1, 1), profile)
    assert tight.pipeline is not None
    assert roomy.pipeline is not None
    assert [chunk.recompute for chunk in tight.pipeline.chunks] == ["some", "none"]
    assert tight.pipeline.chunks[0].recomputed == ("blocks.0", "blocks.1", "blocks.2")
    assert tight.ranks[0].memory_bytes.total <= 100e6
    assert [chunk.recompute for chunk in roomy.pipeline.chunks] == ["none", "none"]
    assert tight.ranks[0].memory_bytes.activations < roomy.ranks[0].memory_bytes.activations


@pytest.mark.parametrize(
    ("graph", "devices", "profile", "faults"),
    [
        (
            {"pipeline": {"stages": 2, "micro_batches": 20}},
            cluster(1, 1),
            None,
            [
                "strategy.graph.pipeline.micro_batches=20 cuts the 16 samples of a copy into "
                "micro-batches of none; use at most 16"
            ],
        ),
        (
            {
                "pipeline": {
                    "stages": [{"replicate": {"degree": 3}}, {"stage": {}}],
                    "micro_batches": 2,
                }
            },
            cluster(1, 1, 1, 1),
            None,
            [
                "strategy.graph.pipeline.micro_batches=2 leaves some of a stage's 3 copies "
                "without a micro-batch; use at least 3"
            ],
        ),
        (
            {"pipeline": {"stages": 4}},
            cluster(1, 1, 1, 1),
            model([1.0, 1.0]),
            [
                "strategy.graph.pipeline.stages=4 has 2 blocks to cut between, too few for 4 "
                "stages in this order; use at most 2 stages"
            ],
        ),
        (
            PIPELINE,
            cluster(1, 1),
            replace(model([1.0]), graph=None, export_error="it looks at values"),
            [
                "strategy.graph.pipeline needs the model's graph, and Stack cannot be exported "
                "(it looks at values); use strategy=dp or a zero strategy, which run the model "
                "as it is"
            ],
        ),
        (
            PIPELINE,
            cluster(1, 1, memory=1e6),
            replace(model([1.0] * 6), activation_bytes=80e6),
            [
                "strategy=mine needs 110 MB on rank 1 (gpu_1), 109 MB more than its 1.00 MB; use "
                "more micro-batches, recompute: full, or a smaller train.global_batch"
            ],
        ),
    ],
)
def test_refusals(
    graph: Any, devices: Cluster, profile: ModelProfile | None, faults: list[str]
) -> None:
    assert refused(graph, devices, profile) == faults


def test_stages_take_the_devices_they_name() -> None:
    """In the order of the stages, whatever that of the inventory."""
    stages = [{"stage": {"device": "gpu_2"}}, {"stage": {"device": "gpu_1"}}]
    graph = {"replicate": {"of": {"pipeline": {"micro_batches": 2, "stages": stages}}}}
    plan = planned(graph, cluster(1, 2, 1, 2))
    assert plan.pipeline is not None
    assert [copy.positions for copy in plan.pipeline.copies] == [((1,), (0,)), ((3,), (2,))]
    first, second = plan.task_graphs
    assert first.replicas == ((1,), (3,))
    assert second.replicas == ((0,), (2,))
    assert first.flops == 2 * second.flops
    assert plan.groups["stage_0.data_parallel"] == ((1, 3),)
    assert [plan.ranks[rank].task_graphs for rank in range(4)] == [(1,), (0,), (1,), (0,)]


def test_more_is_in_flight_where_memory_allows() -> None:
    """While what is sent is on its way; where that does not fit, the order is the textbook's."""

    def on(memory_bytes: float) -> tuple[Any, float]:
        device = Device("small", {"fp32": 2e9}, memory_bytes, 4e9)
        inside, slow = Link("inside", 1e9, 1e-6), Link("slow", 1e6, 1e-5)
        devices = Cluster("mine", (Node((device,), inside),) * 2, slow)
        pipeline = {"stages": 2, "micro_batches": 8, "schedule": "1f1b"}
        strategy = strategy_of({"graph": {"pipeline": pipeline}})
        plan = consider(strategy, devices, ModelAnalysis(gpt(), "fp32"), training(64)).plan()
        assert plan.pipeline is not None
        first = plan.ranks[0].memory_bytes.activations
        return plan.pipeline.copies[0].transits, first

    transits, held = on(1e9)
    assert [ends[:2] for ends in transits] == [(0, 1), (1, 0)]
    without, textbook = on(held)  # with parameters and all else it is more
    assert not without
    assert textbook < held
