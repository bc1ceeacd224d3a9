"""State of copies in parts of unequal size: the parts tile it, fit every device, and follow its
memory."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.operation_graphs import Sketch
from tests.unit.plan_requests import mixed, strategy_of, training

from whale_train.errors import PlanError
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.plan.state_parts import intervals_of
from whale_train.strategies.resolver.resolve import resolve
from whale_train.strategies.stage_memory.rank_memory import largest_part
from whale_train.strategies.stage_memory.state_by_memory import parts_in_proportion

PARTS = st.lists(st.integers(0, 10**6), min_size=1, max_size=8).filter(any)
ROOM = st.lists(st.floats(0, 4), min_size=2, max_size=16)


@given(st.integers(0, 10**12), PARTS)
def test_intervals_tile_what_is_cut(total: int, parts: Sequence[int]) -> None:
    cut = intervals_of(total, parts)
    assert [start for start, _ in cut] == [0, *(stop for _, stop in cut[:-1])]
    assert cut[-1][1] == total
    for (start, stop), part in zip(cut, parts, strict=True):
        assert abs((stop - start) - Fraction(total * part, sum(parts))) < 1
        assert part or start == stop


@given(ROOM)
def test_parts_are_within_the_room_where_there_is_enough(room: Sequence[float]) -> None:
    parts = parts_in_proportion(room)
    for part, fraction, other_part, other in zip(parts, room, parts[::-1], room[::-1], strict=True):
        if sum(room) >= 1:
            assert part / sum(parts) <= fraction + 1e-6
        assert fraction <= other or part >= other_part


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(1, 100)), min_size=1, max_size=4))
def test_the_largest_part_is_where_the_first_line_meets_the_room(
    lines: Sequence[tuple[float, float]],
) -> None:
    """A rank needs the most of its moments: bytes beside its part, and bytes that grow with it."""
    room = 60.0
    found = largest_part(lambda part: max(a + b * part for a, b in lines), room)
    expected = max(0.0, min((room - a) / b for a, b in lines))
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def stack(blocks: int = 100, width: int = 2**13) -> ModelProfile:
    """Equal products, one after another: 67 M parameters each, and few values of a sample."""
    s = Sketch()
    s.input("features", f"B {width}", "float32")
    value = "features"
    for i in range(blocks):
        s.parameter(f"blocks.{i}.weight", f"{width} {width}")
        value = s.call(
            f"h{i}", "linear.default", value, f"blocks_{i}_weight", shape=f"B {width}",
            module=f"blocks.{i}", flops=2.0 * width * width,
        )  # fmt: skip
    s.call("loss", "mean.default", value, shape="")
    return s.profile("stack", "loss")


def plan_of(zero: int, state: object = "auto", blocks: int = 100, batch: int = 32) -> Plan:
    """Eight V100 of 32 GB beside eight P100 of 16 GB, under AdamW."""
    graph = {"replicate": {"zero": zero, "state": state}}
    train = replace(training(batch), optimizer="adamw", optimizer_options={})
    return resolve(strategy_of({"graph": graph}), mixed(), stack(blocks), train)


def memory_of(plan: Plan) -> list[float]:
    return [rank.memory_bytes.total for rank in plan.ranks]


ROOMS = [device.room_bytes for device in mixed().devices]


@pytest.mark.parametrize(("zero", "blocks"), [(1, 46), (2, 48), (3, 240)])
def test_state_follows_memory_where_equal_parts_do_not_fit(zero: int, blocks: int) -> None:
    with pytest.raises(PlanError) as refused:
        plan_of(zero, "even", blocks)
    assert "p100_pcie_16gb" in str(refused.value)
    plan = plan_of(zero, "auto", blocks)
    (task_graph,) = plan.task_graphs
    parts = task_graph.state_parts
    assert len(set(parts[:8])) == len(set(parts[8:])) == 1
    assert parts[0] > 1.5 * parts[8]
    # Shares of the batch follow speed all the same.
    assert task_graph.shares[0] > task_graph.shares[8]
    assert all(need <= room for need, room in zip(memory_of(plan), ROOMS, strict=True))
    assert all(rank.deepspeed == {"0": None} for rank in plan.ranks)
    chosen, by_memory = (x for x in plan.decisions if x.key.endswith(".state"))
    assert (chosen.chosen, chosen.rejected) == ("memory", "even")
    assert "even needs" in chosen.reason
    assert by_memory.chosen.startswith("8 x ")


def test_equal_parts_stay_where_they_fit() -> None:
    plan = plan_of(3)
    assert plan.task_graphs[0].state_parts == ()
    assert plan.ranks[0].deepspeed["0"]
    (decision,) = (x for x in plan.decisions if x.key.endswith(".state"))
    assert (decision.chosen, decision.rejected) == ("even", "memory")


def test_a_larger_part_needs_more_memory() -> None:
    """Of rank 0; the state of 16 equal ranks is 17 times as many parts."""
    needs = [memory_of(plan_of(3, [part, *[1] * 15]))[0] for part in (0, 1, 2, 4)]
    assert needs == sorted(needs)
    state_bytes = 16 * 100 * 2**26  # weights, gradients and two moments, of fp32
    assert needs[1] - needs[0] == pytest.approx(state_bytes / 16, rel=1e-6)


def test_what_fits_in_no_parts_is_refused_as_equal_ones_are() -> None:
    refusals = []
    for state in ("auto", "even"):
        with pytest.raises(PlanError) as refused:
            plan_of(3, state, 600)
        refusals.append(str(refused.value))
    assert refusals[0] == refusals[1]


def test_the_remedy_of_equal_parts_are_parts_by_memory() -> None:
    for state in ("even", [1] * 16):
        with pytest.raises(PlanError) as refused:
            plan_of(2, state, 48)
        assert str(refused.value).endswith("; use strategy.graph.replicate.state=memory")


def test_parts_by_memory_that_do_not_fit() -> None:
    with pytest.raises(PlanError) as refused:
        plan_of(2, "memory", 80)
    (fault,) = refused.value.faults
    assert (fault.key, fault.value) == ("strategy.graph.replicate.state", "memory")
    assert fault.rule.endswith(", whatever the parts of the state")
    assert fault.remedy.startswith("use strategy.graph.replicate.zero=3, ")
    plan_of(3, "memory", 80)


@pytest.mark.parametrize(
    ("graph", "fault"),
    [
        (
            {"replicate": {"zero": 3, "state": [3, 1]}},
            "strategy.graph.replicate.state=[3, 1] has 2 parts, and there are 16 copies; "
            "give 16 parts, or use memory",
        ),
        (
            {"replicate": {"degree": 2, "zero": 3, "state": "memory", "of": {"split": {}}}},
            "strategy.graph.replicate.state=memory cuts the weights of a whole model, and this "
            "strategy runs parts of it; use auto or even",
        ),
        (
            [{"replicate": {"zero": 1, "state": "memory"}}, {"split": {"modules": "blocks.3"}}],
            "strategy.graph[0].replicate.state=memory cuts the state of copies, and beside a split "
            "part each member keeps its own; use auto or even",
        ),
        (
            {"replicate": {"zero": 3, "state": "memory", "offload": {"activations": "cpu"}}},
            "strategy.graph.replicate.state=memory has an engine of its own, which does not go "
            "with offload.activations; use auto or even",
        ),
    ],
)
def test_parts_that_a_strategy_cannot_have_are_refused(graph: object, fault: str) -> None:
    with pytest.raises(PlanError) as refused:
        resolve(strategy_of({"graph": graph}), mixed(), stack(4), training(32))
    assert [str(x) for x in refused.value.faults] == [fault]
