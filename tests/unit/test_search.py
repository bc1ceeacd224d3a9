"""What a search promises: the same answer however nodes are listed, none slower with more devices,
none slower than a strategy that ships, and a file that resolves to what was found."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.pairs import examples
from tests.unit.operation_graphs import Sketch, gpt
from tests.unit.plan_requests import CONF, shipped, strategy_of, training
from tests.unit.test_auto import AUTO, FAST, NAMES, SLOW, cluster, found_for
from tests.unit.test_stages import model

from whale_train.errors import PlanError
from whale_train.strategies.estimate.stage_dp import (
    StageCosts,
    StageLink,
    StagePartition,
    cut,
    short_of_room,
)
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.hardware.catalogue import DEVICES, LINKS
from whale_train.strategies.hardware.cluster import Cluster, Device, Link, Node
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.resolve import consider, resolve
from whale_train.strategies.search.search import search
from whale_train.strategies.search.shipped import strategy_files
from whale_train.strategies.stages.analysis import ModelAnalysis

PROFILES = (model([1e5, 3e5, 1e5, 2e5]), gpt())
NETWORKS = (1e7, 1e9)


@st.composite
def clusters(draw: st.DrawFn, least: int = 1) -> Sequence[Sequence[Device]]:
    """Up to three nodes of up to two devices of one of two kinds."""
    return draw(
        st.lists(
            st.builds(lambda kind, n: [kind] * n, st.sampled_from([FAST, SLOW]), st.integers(1, 2)),
            min_size=least,
            max_size=3,
        )
    )


@settings(max_examples=examples(15), deadline=None)
@given(clusters(least=2), st.sampled_from(PROFILES), st.sampled_from(NETWORKS), st.data())
def test_the_order_of_nodes_does_not_matter(
    nodes: Sequence[Sequence[Device]], profile: ModelProfile, network: float, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(nodes))
    link = Link("network", network, 1e-5)
    one, other = (
        found_for(profile, replace(cluster(*each), network=link), training(12))
        for each in (nodes, shuffled)
    )
    seconds = (each.considered.step.spans.seconds for each in (one, other))
    assert next(seconds) == pytest.approx(next(seconds), rel=1e-9)
    assert one.written["graph"] == other.written["graph"]


@settings(max_examples=examples(15), deadline=None)
@given(clusters(least=2), st.sampled_from(PROFILES), st.sampled_from(NETWORKS))
@example([[SLOW] * 2, [SLOW], [SLOW] * 2], gpt(), 1e9)  # three of them are the fastest
def test_more_devices_are_never_slower(
    nodes: Sequence[Sequence[Device]], profile: ModelProfile, network: float
) -> None:
    link = Link("network", network, 1e-5)
    steps = [
        found_for(profile, replace(cluster(*nodes[:count]), network=link), training(12))
        .considered.step.spans.seconds
        for count in range(1, len(nodes) + 1)
    ]  # fmt: skip
    # Estimates choose what is simulated, and may take one for the faster of two that are as fast.
    for fewer, more in pairwise(steps):
        assert more <= fewer * 1.01


@settings(max_examples=examples(15), deadline=None)
@given(clusters(), st.sampled_from(PROFILES), st.sampled_from(NETWORKS))
def test_what_is_written_resolves_to_what_was_found(
    nodes: Sequence[Sequence[Device]], profile: ModelProfile, network: float
) -> None:
    devices = replace(cluster(*nodes), network=Link("network", network, 1e-5))
    found = found_for(profile, devices, training(12))
    again = strategy_of(found.written, "auto")
    assert again == found.strategy
    assert resolve(again, devices, profile, training(12)) == found.considered.plan()


def blocks(depth: int, rows: int, width: int, classes: int = 64) -> ModelProfile:
    """Residual blocks of two products on so many `rows` a sample, four times as wide between, and a
    head."""
    s = Sketch()
    for i in range(depth):
        s.parameter(f"blocks.{i}.up.weight", f"{4 * width} {width}")
        s.parameter(f"blocks.{i}.down.weight", f"{width} {4 * width}")
    s.parameter("head.weight", f"{classes} {width}")
    h = s.input("x", f"B {rows} {width}", "float32")
    s.input("labels", f"B {rows}")
    narrow, wide, flops = f"B {rows} {width}", f"B {rows} {4 * width}", 8.0 * rows * width * width
    for i in range(depth):
        up, down = (f"blocks_{i}_{name}_weight" for name in ("up", "down"))
        call = partial(s.call, module=f"blocks.{i}")
        call(f"u{i}", "linear.default", h, up, shape=wide, flops=flops)
        call(f"g{i}", "gelu.default", f"u{i}", shape=wide)
        call(f"d{i}", "linear.default", f"g{i}", down, shape=narrow, flops=flops)
        h = call(f"r{i}", "add.Tensor", h, f"d{i}", shape=narrow)
    flops = 2.0 * rows * width * classes
    shape = f"B {rows} {classes}"
    s.call("logits", "linear.default", h, "head_weight", shape=shape, module="head", flops=flops)
    s.call("flat", "view.default", "logits", (-1, classes), shape=f"{rows}B {classes}")
    s.call("t", "view.default", "labels", (-1,), shape=f"{rows}B", dtype="int64")
    s.call("loss", "cross_entropy_loss.default", "flat", "t", shape="")
    return s.profile("blocks", "loss")


def node(device: str, link: str, count: int) -> Node:
    return Node((DEVICES[device],) * count, LINKS[link])


@pytest.mark.parametrize(
    ("nodes", "network", "profile", "batch"),
    [
        # An all-reduce of the whole batch is a ring, and of few samples a tree.
        ([node("h100_sxm_80gb", "pcie3_x16", 4)], "ethernet_50g", blocks(3, 16, 3072), 24),
        # Two kinds that are far from each other: stages on each.
        (
            [node("v100_sxm2_32gb", "nvlink2", 8), node("t4_16gb", "pcie3_x16", 8)],
            "ethernet_25g",
            blocks(8, 256, 2048),
            128,
        ),
    ],
    ids=["splits", "V100 and T4"],
)
def test_no_shipped_strategy_is_faster(
    nodes: Sequence[Node], network: str, profile: ModelProfile, batch: int
) -> None:
    devices = Cluster("mine", tuple(nodes), LINKS[network])
    train = Training(batch, "fp32", 0.0, "adamw", {"lr": 0.1})
    findings = ModelAnalysis(profile, "fp32")
    found = search(AUTO, devices, findings, train).considered.step.spans.seconds
    for name in NAMES:
        try:
            step = consider(shipped(name), devices, findings, train, moving=True).step
        except PlanError:
            continue
        assert found <= step.spans.seconds * (1 + 1e-9), name


def test_every_file_that_ships_is_looked_at() -> None:
    there = {path.stem for path in (CONF / "strategy").glob("*.yaml")}
    assert set(strategy_files()) == there - {"auto"}


# --- The dynamic programme ---


def stage(seconds: Sequence[float], room: float, copies: int = 1, flight: int = 1) -> StageCosts:
    """A stage on a device with room for so many bytes, of which every unit saves one."""
    sums = [0.0]
    for each in seconds:
        sums.append(sums[-1] + each)
    ones = [float(n) for n in range(len(sums))]
    none = [0.0] * len(sums)
    return StageCosts(
        sums, none, none, ones, ones, 0.0, 1.0, flight, room, copies, can_recompute=False
    )


def test_a_stage_ends_earlier_for_one_that_cannot_begin_where_it_could_end() -> None:
    """The fifth unit is long, but for two copies on the third stage."""
    stages = [
        stage([1.0] * 7, room=4.0),
        stage([1.0, 1.0, 1.0, 1.0, 7.0, 1.0, 1.0], room=1.0),
        stage([1.0, 1.0, 1.0, 1.0, 8.0, 1.0, 1.0], room=1.0, copies=2),
        stage([1.0] * 7, room=2.0),
    ]
    found = cut(stages, [StageLink(0.0, 0.0)] * 3, [0.0] * 8, 4)
    assert found == StagePartition((0, 3, 4, 5, 7), 26.0)


def test_units_that_one_stage_takes_long_for_are_given_to_another() -> None:
    """Of nine seconds for one unit no stage has to take any."""
    stages = [stage([1.0] * 4, room=4.0), stage([1.0, 9.0, 1.0, 1.0], room=2.0)]
    found = cut(stages, [StageLink(0.0, 0.1)], [0.0, 0.0, 1.0, 0.0, 0.0], 4)
    assert found == StagePartition((0, 2, 4), 10.2)


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_no_cut_takes_less_than_the_one_found(data: st.DataObject) -> None:
    units = data.draw(st.integers(1, 7))
    number = data.draw(st.integers(1, min(4, units)))
    pieces = data.draw(st.integers(1, 12))
    times = st.floats(0.1, 10.0)
    stages = [
        stage(
            data.draw(st.lists(times, min_size=units, max_size=units)),
            data.draw(st.sampled_from([1.0, 2.0, 4.0, 99.0])),
            data.draw(st.integers(1, 2)),
        )
        for _ in range(number)
    ]
    hops = [StageLink(0.0, data.draw(st.sampled_from([0.0, 0.1]))) for _ in range(number - 1)]
    crossing = data.draw(st.lists(st.floats(0, 2), min_size=units + 1, max_size=units + 1))

    def seconds(ends: Sequence[int]) -> float:
        parts = zip(stages, pairwise(ends), strict=True)
        taken = [s.seconds[b] - s.seconds[a] for s, (a, b) in parts]
        sent = sum(2 * h.byte_s * crossing[end] for h, end in zip(hops, ends[1:-1], strict=True))
        slowest = max(t / s.copies for t, s in zip(taken, stages, strict=True))
        return (pieces - 1) * slowest + sum(taken) + sent

    cuts = [(0, *inner, units) for inner in combinations(range(1, units), number - 1)]
    able = [
        seconds(ends)
        for ends in cuts
        if all(b - a <= s.room for s, (a, b) in zip(stages, pairwise(ends), strict=True))
    ]
    found = cut(stages, hops, crossing, pieces)
    assert (found is None) == (not able)
    if found is not None:
        # The slowest times that are tried are some way apart.
        assert min(able) <= seconds(found.ends) * (1 + 1e-9)
        assert seconds(found.ends) <= 1.25 * min(able)


def test_what_stages_are_short_of_is_what_makes_room() -> None:
    """Two stages of 10 bytes have 20 for three units of 6, and no cut fits until one has 12."""
    needs = [0.0, 6.0, 12.0, 18.0]
    nothing = [0.0] * 4
    stage = StageCosts(needs, nothing, needs, nothing, nothing, 1.0, 1.0, 1.0, room=10.0)
    assert short_of_room([stage, stage], 3) == pytest.approx(2.0, rel=1e-3)
    assert cut([replace(stage, room=12.01)] * 2, [StageLink(0.0, 0.0)], nothing, 1) is not None
