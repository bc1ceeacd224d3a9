"""Where a pipeline is cut: every operation once, the slowest stage as fast as any cut allows."""

from dataclasses import replace
from itertools import combinations, pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pairs import examples

from whale_train.errors import Fault
from whale_train.strategies.graph.block_paths import block_of
from whale_train.strategies.graph.operation_graph import (
    ModelProfile,
    Operation,
    OperationGraph,
    Parameter,
    Ref,
    Size,
)
from whale_train.strategies.partition.pipeline_partition import (
    Sequenced,
    balanced,
    is_inside,
    sequenced,
    sliced,
    stage_of_modules,
)

HIDDEN = (Size(0, 1), Size(8))


def model(flops: list[float], tied: bool = False, skip: bool = False) -> ModelProfile:
    """A stack of blocks, each a product with a weight of its own and a mask that depends on no
    parameter. `tied`: the last block's weight is the first's. `skip`: the last block reads the
    first one's result as well."""
    operations = [Operation("x", "input", shape=HIDDEN, dtype="float32")]
    operations.append(
        Operation("mask", "aten.gt.Scalar", (Ref("x"), 0), shape=HIDDEN, dtype="bool")
    )
    parameters, value = [], "x"
    for i, work in enumerate(flops):
        path = "blocks.0.weight" if tied and i == len(flops) - 1 else f"blocks.{i}.weight"
        shape = (Size(8), Size(8))
        operations.append(Operation(f"w{i}", "parameter", shape=shape, dtype="float32", path=path))
        args = (Ref(value), Ref(f"w{i}"))
        operations.append(
            Operation(
                f"p{i}", "aten.mm.default", args, (), HIDDEN, "float32", f"blocks.{i}", "", work
            )
        )
        args = (Ref(f"p{i}"), Ref("mask"))
        operations.append(
            Operation(f"m{i}", "aten.mul.Tensor", args, (), HIDDEN, "float32", f"blocks.{i}")
        )
        value = f"m{i}"
        if path == f"blocks.{i}.weight":
            parameters.append(Parameter(path, (8, 8)))
    if skip:
        args = (Ref(value), Ref("m0"))
        module = f"blocks.{len(flops) - 1}"
        operations.append(Operation("sum", "aten.add.Tensor", args, (), HIDDEN, "float32", module))
        value = "sum"
    operations.append(
        Operation("loss", "aten.sum.default", (Ref(value),), (), (), "float32", "loss")
    )
    operations.append(Operation("output", "output", (Ref("loss"),)))
    return ModelProfile(
        "Stack", tuple(parameters), (), sum(flops), 100.0, 0, OperationGraph(tuple(operations))
    )


def graph_of(profile: ModelProfile) -> OperationGraph:
    assert profile.graph is not None
    return profile.graph


@pytest.mark.parametrize(
    ("module", "block"),
    [
        ("", ""),
        ("lm_head", "lm_head"),
        ("model.layers.3.mlp.up", "model.layers.3"),
        ("encoder.stages.1.layers.0.conv", "encoder.stages.1.layers.0"),
    ],
)
def test_blocks(module: str, block: str) -> None:
    assert block_of(module) == block


@pytest.mark.parametrize(
    ("module", "pattern", "inside"),
    [
        ("model.layers.3.mlp", "model.layers.3", True),
        ("model.layers.30", "model.layers.3", False),
        ("model.layers.3.mlp", "model.layers.[0-3]", True),
        ("model.layers.3.mlp", "*.mlp", True),
        ("lm_head", "model", False),
    ],
)
def test_modules_by_pattern(module: str, pattern: str, inside: bool) -> None:
    assert is_inside(module, pattern) == inside


def test_only_what_depends_on_a_parameter_is_handed_out() -> None:
    order = sequenced(graph_of(model([1.0, 2.0])))
    assert order.operations == ("p0", "m0", "p1", "m1", "loss")
    assert [order.operations[i] for i in order.places[:-1]] == ["p0", "p1", "loss"]
    assert order.flops == (0.0, 1.0, 3.0, 3.0)
    # fp32 of 8 a sample; nothing crosses before the first operation or after the last.
    assert order.bytes_crossing == (0.0, 32.0, 32.0, 0.0)


def test_slices_take_what_others_give_and_make_masks_again() -> None:
    profile = model([1.0, 1.0, 1.0], skip=True)
    order = sequenced(graph_of(profile))
    ends = [order.operations.index(name) for name in ("p0", "p1", "p2")]
    first, second, third = sliced(profile, order, [*ends, len(order.operations)])
    assert first.operations == ("x", "mask", "w0", "p0", "m0")
    assert (first.takes, first.gives) == ((), ("m0",))
    assert second.operations == ("x", "mask", "w1", "p1", "m1")
    assert (second.takes, second.gives) == (("m0",), ("m1",))
    assert (third.takes, third.gives) == (("m0", "m1"), ("loss",))
    assert [s.parameters for s in (first, second, third)] == [
        (f"blocks.{i}.weight",) for i in range(3)
    ]
    assert sum(s.activation_bytes for s in (first, second, third)) == pytest.approx(100.0)


def test_a_tied_weight_is_held_by_both_its_stages() -> None:
    profile = model([1.0, 1.0, 1.0], tied=True)
    order = sequenced(graph_of(profile))
    parts = sliced(profile, order, [0, order.operations.index("p2"), len(order.operations)])
    assert parts[0].parameters == ("blocks.0.weight", "blocks.1.weight")
    assert parts[1].parameters == ("blocks.0.weight",)


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=8),
    st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=1, max_size=4),
)
@settings(max_examples=examples(150))
def test_the_cut_is_the_best_there_is(work: list[int], speeds: list[float]) -> None:
    """Against every cut there is, with an empty stage nowhere."""
    count = min(len(speeds), len(work))
    order = sequenced(graph_of(model([float(w) for w in work])))
    places = len(order.places) - 1

    def time(stage: int, first: int, last: int) -> float:
        return (order.flops[last] - order.flops[first]) / speeds[stage]

    def slowest(ends: tuple[int, ...]) -> float:
        return max(time(s, a, b) for s, (a, b) in enumerate(pairwise(ends)))

    found = balanced(order, time, count, {})
    assert found is not None
    assert (found[0], found[-1], len(found)) == (0, places, count + 1)
    assert all(a < b for a, b in pairwise(found))
    every = (slowest((0, *cut, places)) for cut in combinations(range(1, places), count - 1))
    assert slowest(found) == min(every)


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 10, 100])),
        min_size=2,
        max_size=8,
    ),
    st.integers(2, 4),
)
@settings(max_examples=examples(150))
def test_of_equally_slow_cuts_it_sends_the_fewest_bytes(
    drawn: list[tuple[int, int]], stages: int
) -> None:
    """Against every cut: a beginning that is faster than the slowest stage may send more bytes."""
    work = [float(flops) for flops, _ in drawn]
    order = sequenced(graph_of(model(work)))
    places, count = len(order.places) - 1, min(stages, len(work))
    crossing = (0.0, *(float(num_bytes) for _, num_bytes in drawn), 0.0)
    order = replace(order, bytes_crossing=crossing)

    def time(stage: int, first: int, last: int) -> float:
        return order.flops[last] - order.flops[first]

    def score(ends: tuple[int, ...]) -> tuple[float, float]:
        slowest = max(time(0, a, b) for a, b in pairwise(ends))
        return slowest, sum(crossing[place] for place in ends[1:-1])

    found = balanced(order, time, count, {})
    assert found is not None
    cuts = combinations(range(1, places), count - 1)
    assert score(found) == min(score((0, *cut, places)) for cut in cuts)


def test_more_stages_than_blocks() -> None:
    order = sequenced(graph_of(model([1.0])))
    assert balanced(order, lambda *_: 1.0, 3, {}) is None


def test_modules_the_strategy_names_go_where_it_says() -> None:
    order = sequenced(graph_of(model([1.0, 1.0, 1.0, 1.0])))

    def time(stage: int, first: int, last: int) -> float:
        return order.flops[last] - order.flops[first]

    faults: list[Fault] = []
    asked = [("a", ("blocks.0", "blocks.1", "blocks.2")), ("b", None)]
    fixed = stage_of_modules(order, graph_of(model([1.0] * 4)), asked, faults)
    assert not faults
    found = balanced(order, time, 2, fixed)
    assert found is not None
    assert order.operations[order.places[found[1]]] == "p3"


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        (
            [("a", ("blocks.9",)), ("b", None)],
            "a.modules=blocks.9 names no module that computes; did you mean blocks.1? Else use a "
            "path below blocks, loss",
        ),
        (
            [("a", ("blocks.0",)), ("b", ("blocks.*",))],
            "b.modules=blocks.* is part of a.modules as well; name it in one stage",
        ),
        (
            [("a", ("blocks.1",)), ("b", ("blocks.0",))],
            "b.modules=blocks.0 runs before what a holds; list stages in forward order",
        ),
    ],
)
def test_modules_that_cannot_be(
    asked: list[tuple[str, tuple[str, ...] | None]], fault: str
) -> None:
    profile = model([1.0, 1.0])
    faults: list[Fault] = []
    stage_of_modules(sequenced(graph_of(profile)), graph_of(profile), asked, faults)
    assert [str(f) for f in faults] == [fault]


def test_a_stage_that_may_hold_nothing_is_not_cut() -> None:
    order = Sequenced(
        ("a", "b"), (0, 1, 2), (0.0, 1.0, 2.0), (0, 1, 2), (0.0, 1.0, 0.0), ("a", "b", "")
    )
    assert balanced(order, lambda stage, *_: inf if stage else 1.0, 2, {}) is None
