"""Ends of stages, moved while that makes the step shorter."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.plan_requests import strategy_of, training
from tests.unit.test_staged import LINK, cluster, planned
from tests.unit.test_stages import model

from whale_train.errors import PlanError
from whale_train.quantities import in_seconds
from whale_train.strategies.hardware.cluster import Cluster, Device, HostFigures, HostShare, Node
from whale_train.strategies.memory.host_memory import host_bytes
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.resolver.boundary_search import Boundaries, Trial, shift_boundaries
from whale_train.strategies.resolver.evaluated import EvaluatedStrategy
from whale_train.strategies.resolver.resolve import consider, resolve
from whale_train.strategies.stages.analysis import ModelAnalysis

PLACES = 12
NEIGHBOURS = (-2, -1, 1, 2)


def neighbours(cut: Boundaries) -> list[Boundaries]:
    moved = (
        (*cut[:end], cut[end] + far, *cut[end + 1 :])
        for end in range(1, len(cut) - 1)
        for far in NEIGHBOURS
    )
    return [each for each in moved if all(a < b for a, b in pairwise(each))]


def looks(
    seconds: Callable[[Boundaries], float], short: Callable[[Boundaries], float] = lambda cut: 0.0
) -> Callable[[Boundaries], Trial[Boundaries]]:
    return lambda cut: Trial(cut, short(cut), seconds(cut), 1)


@given(
    st.lists(st.integers(1, PLACES - 1), min_size=1, max_size=4, unique=True).map(sorted),
    st.randoms(use_true_random=False),
)
def test_no_move_of_one_end_is_better_than_what_is_found(inner: list[int], random: Any) -> None:
    cut = (0, *inner, PLACES)
    known: dict[Boundaries, tuple[float, float]] = {}

    def of(cut: Boundaries) -> tuple[float, float]:
        return known.setdefault(cut, (random.choice([-1.0, 0.0, 2.0, 3.0]), random.random()))

    look = looks(lambda cut: of(cut)[1], lambda cut: of(cut)[0])
    found, best = shift_boundaries(cut, look(cut), look, 10**6)
    assert best.found == found
    for other in (cut, *neighbours(found)):
        short, seconds = of(other)
        if best.short_bytes > 0:
            assert short >= best.short_bytes
        else:
            assert short > 0 or seconds >= best.seconds * (1 - 1e-3)
    assert shift_boundaries(cut, look(cut), look, 10**6) == (found, best)


def test_cuts_that_cannot_be_are_passed_over_and_none_is_looked_at_twice() -> None:
    looked: list[Boundaries] = []

    def look(cut: Boundaries) -> Trial[Boundaries] | None:
        looked.append(cut)
        return Trial(cut, 0.0, abs(cut[1] - 9.0), 1) if cut[1] % 2 == 0 else None

    first = Trial((0, 4, PLACES), 0.0, 5.0, 1)
    assert shift_boundaries((0, 4, PLACES), first, look, 100)[0] == (0, 8, PLACES)
    assert len(set(looked)) == len(looked)


def test_looks_end_when_they_have_taken_as_much_work() -> None:
    cut = (0, 1, PLACES)
    for work in range(1, 6):
        looked: list[Boundaries] = []

        def look(cut: Boundaries, looked: list[Boundaries] = looked) -> Trial[Boundaries]:
            looked.append(cut)
            return Trial(cut, 0.0, -float(cut[1]), 1)

        _, best = shift_boundaries(cut, Trial(cut, 0.0, 0.0, 1), look, work)
        assert (best.work, len(looked)) == (work, work - 1)


# --- Of strategies ---

PROFILE = model([1e9] * 6)
PIPELINE = {"pipeline": {"stages": 2, "micro_batches": 8}}
NAMED = [{"stage": {"modules": "blocks.0"}}, {"stage": {}}]
# As fast as two of the other by FLOP/s, and slower than that in all that is bound by memory.
NARROW = Device("narrow", {"fp32": 2e12}, 1e9, 2e5)
WIDE = Device("wide", {"fp32": 1e12}, 1e9, 1e12)
UNLIKE = Cluster("mine", (Node((NARROW, WIDE), LINK),), LINK)


def stages_of(plan: Plan) -> list[int]:
    """How many blocks every stage has."""
    return [len(each.parameters) for each in plan.task_graphs]


def balanced(devices: Cluster, graph: Any = PIPELINE) -> EvaluatedStrategy:
    findings = ModelAnalysis(PROFILE, "fp32")
    return consider(strategy_of({"graph": graph}), devices, findings, training(16))


def test_a_stage_has_less_where_its_device_is_slower_than_its_flops() -> None:
    before, plan = balanced(UNLIKE), planned(PIPELINE, UNLIKE, PROFILE)
    assert stages_of(before.plan()) == [4, 2]
    assert stages_of(plan) == [2, 4]
    assert plan.predicted.step_time_s < 0.8 * before.step.spans.seconds
    (decision,) = [each for each in plan.decisions if each.key == "strategy.graph.pipeline.stages"]
    assert (decision.chosen, decision.rejected) == ("33%, 67%", "67%, 33%")
    was, now = before.step.spans.seconds, plan.predicted.step_time_s
    expected = f"{in_seconds(now)} a step, simulated, and {in_seconds(was)} "
    assert decision.reason == expected + "if the slowest stage were done first"
    assert all(rank.samples for rank in plan.ranks)


def test_a_stage_has_less_where_its_device_has_no_room_for_more() -> None:
    alike = cluster(1.0, 1.0)
    first, second = alike.devices
    need = balanced(alike).plan().ranks[1].memory_bytes.total
    small = replace(second, memory_bytes=need - 1)
    there = replace(alike, nodes=(replace(alike.nodes[0], devices=(first, small)),))
    with pytest.raises(PlanError):
        balanced(there)
    plan = planned(PIPELINE, there, PROFILE)
    assert stages_of(plan) == [4, 2]
    assert plan.ranks[1].memory_bytes.total <= small.memory_bytes
    (decision,) = [each for each in plan.decisions if each.key == "strategy.graph.pipeline.stages"]
    assert decision.reason == "by speed alone, memory is 1 B short"


@pytest.mark.parametrize(
    ("keys", "stages"),
    [
        ({"balance": "even"}, [3, 3]),
        ({"graph": {"pipeline": {"stages": NAMED}}}, [4, 2]),
    ],
    ids=["even", "named"],
)
def test_what_the_strategy_says_stays(keys: dict[str, Any], stages: list[int]) -> None:
    strategy = {"graph": PIPELINE, **keys}
    plan = planned(strategy.pop("graph"), UNLIKE, PROFILE, **strategy)
    assert stages_of(plan) == stages


def test_a_stage_has_no_more_than_its_host_has_room_for() -> None:
    stages = [{"stage": {"device": name}} for name in ("narrow", "wide")]
    pipeline = {"pipeline": {"micro_batches": 8, "stages": stages}}
    keeping = {"degree": 2, "zero": 1, "offload": {"optimizer": "cpu"}}
    graph = {"replicate": {**keeping, "of": pipeline}}
    train = training(32)
    block = 64 * host_bytes(1, ("optimizer",), train)

    def planned_on(blocks: float) -> Plan:
        """With room on the host of the wide devices for so many blocks."""
        nodes = []
        for device, room in ((NARROW, 6.0), (WIDE, blocks)):
            host = HostFigures("host", room * block, 1e11, LINK)
            share = HostShare(host.memory_bandwidth_bytes_s / 2, LINK.bandwidth_bytes_s)
            nodes.append(Node((replace(device, host=share),) * 2, LINK, host=host))
        return resolve(
            strategy_of({"graph": graph}), Cluster("mine", tuple(nodes), LINK), PROFILE, train
        )

    assert stages_of(planned_on(6.0)) == [2, 4]
    assert stages_of(planned_on(3.0)) == [3, 3]
    with pytest.raises(PlanError):
        planned_on(1.0)
