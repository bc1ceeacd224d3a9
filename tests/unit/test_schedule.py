"""Schedules against the textbook's closed forms, and what they refuse."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.pipelines import COMPUTATIONS, Pipeline, regular, wide, words

from whale_train.strategies.schedule.instructions import (
    Durations,
    Instruction,
    Kind,
    Position,
    in_flight,
)
from whale_train.strategies.schedule.orders import owners, schedule


def textbook_1f1b(stage: int, stages: int, micro_batches: int) -> str:
    warm_up = min(stages - stage - 1, micro_batches)
    order = [f"F{m}" for m in range(warm_up)]
    for m in range(micro_batches - warm_up):
        order += [f"F{warm_up + m}", f"B{m}"]
    return " ".join(order + [f"B{m}" for m in range(micro_batches - warm_up, micro_batches)])


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 7, 8, 13])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_1f1b_is_the_textbook_order(stages: int, micro_batches: int) -> None:
    pipeline = regular(stages, micro_batches)
    expected = [textbook_1f1b(stage, stages, micro_batches) for stage in range(stages)]
    assert [words(each) for each in pipeline.run("1f1b")] == expected
    # Times of 1 forward and 2 backward: the last stage starts S - 1 late, its last backward
    # takes 2 (S - 1) to come back.
    assert pipeline.makespan("1f1b") == 3 * micro_batches + 3 * (stages - 1)


@pytest.mark.parametrize("micro_batches", [1, 3, 8])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_gpipe_is_all_forwards_then_all_backwards(stages: int, micro_batches: int) -> None:
    pipeline = regular(stages, micro_batches)
    order = [f"F{m}" for m in range(micro_batches)] + [f"B{m}" for m in range(micro_batches)]
    assert [words(each) for each in pipeline.run("gpipe")] == [" ".join(order)] * stages
    assert pipeline.makespan("gpipe") == 3 * micro_batches + 3 * (stages - 1)


def test_communication_stands_around_its_computation() -> None:
    first, last = regular(2, 2).run("1f1b")
    assert first == (
        Instruction(Kind.FORWARD, 0, 0),
        Instruction(Kind.SEND, 0, 0, peer=1),
        Instruction(Kind.FORWARD, 0, 1),
        Instruction(Kind.SEND, 0, 1, peer=1),
        Instruction(Kind.RECEIVE_GRADIENT, 0, 0, peer=1),
        Instruction(Kind.BACKWARD, 0, 0),
        Instruction(Kind.RECEIVE_GRADIENT, 0, 1, peer=1),
        Instruction(Kind.BACKWARD, 0, 1),
    )
    assert last == (
        Instruction(Kind.RECEIVE, 1, 0, peer=0),
        Instruction(Kind.FORWARD, 1, 0),
        Instruction(Kind.BACKWARD, 1, 0),
        Instruction(Kind.SEND_GRADIENT, 1, 0, peer=0),
        Instruction(Kind.RECEIVE, 1, 1, peer=0),
        Instruction(Kind.FORWARD, 1, 1),
        Instruction(Kind.BACKWARD, 1, 1),
        Instruction(Kind.SEND_GRADIENT, 1, 1, peer=0),
    )


def test_a_skip_edge_without_gradient_goes_one_way() -> None:
    pipeline = regular(3, 1)
    edges = {**pipeline.edges, (0, 2): False}
    first, _, last = schedule("zero_bubble", pipeline.positions, pipeline.owners, edges, 1)
    assert first == (
        Instruction(Kind.FORWARD, 0, 0),
        Instruction(Kind.SEND, 0, 0, peer=1),
        Instruction(Kind.SEND, 0, 0, peer=2),
        Instruction(Kind.RECEIVE_GRADIENT, 0, 0, peer=1),
        Instruction(Kind.BACKWARD_INPUT, 0, 0),
        Instruction(Kind.BACKWARD_WEIGHT, 0, 0),
    )
    assert last == (
        Instruction(Kind.RECEIVE, 2, 0, peer=0),
        Instruction(Kind.RECEIVE, 2, 0, peer=1),
        Instruction(Kind.FORWARD, 2, 0),
        Instruction(Kind.BACKWARD_INPUT, 2, 0),
        Instruction(Kind.SEND_GRADIENT, 2, 0, peer=1),
        Instruction(Kind.BACKWARD_WEIGHT, 2, 0),
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpipe", "F0 B0 F1 B1 F2 B2"),
        ("1f1b", "F0 B0 F1 B1 F2 B2"),
        ("interleaved_1f1b", "F0 B0 F1 B1 F2 B2"),
        ("zero_bubble", "F0 I0 W0 F1 I1 W1 F2 I2 W2"),
    ],
)
def test_one_stage_is_gradient_accumulation(name: str, expected: str) -> None:
    assert [words(each) for each in regular(1, 3).run(name)] == [expected]


def test_chunks_of_one_position_do_not_communicate() -> None:
    (only,) = regular(1, 1, chunks_each=3).run("interleaved_1f1b")
    assert [(each.kind, each.chunk) for each in only] == [
        *((Kind.FORWARD, chunk) for chunk in (0, 1, 2)),
        *((Kind.BACKWARD, chunk) for chunk in (2, 1, 0)),
    ]


@pytest.mark.parametrize("chunks_each", [2, 3, 4])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_interleaving_has_the_bubble_and_the_memory_of_megatron(
    stages: int, chunks_each: int
) -> None:
    for micro_batches in (stages, 2 * stages, 4 * stages):
        pipeline = regular(stages, micro_batches, chunks_each)
        # Narayanan et al. 2021, 2.2.2: idle (S - 1) / v of a micro-batch's time on a position,
        # which is v chunks of 1 forward and 2 backward.
        busy, idle = 3 * chunks_each * micro_batches, 3 * (stages - 1)
        assert pipeline.makespan("interleaved_1f1b") <= busy + idle
        for stage, each in enumerate(pipeline.run("interleaved_1f1b")):
            warm_up = 2 * (stages - stage - 1) + (chunks_each - 1) * stages
            assert in_flight(each) <= warm_up + 1
            # Where there are enough micro-batches, the first stage warms up in full.
            if stage == 0 and micro_batches > stages:
                assert in_flight(each) == warm_up + 1


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_zero_bubble_has_a_third_of_the_bubble_and_no_more_memory(stages: int) -> None:
    for micro_batches in (stages, stages + 1, 2 * stages, 5 * stages):
        pipeline = regular(stages, micro_batches)
        # Qi et al. 2023, table 1: (S - 1) (forward + input part - weight part) for ZB-H1,
        # (S - 1) (forward + input part + weight part) for 1F1B.
        assert pipeline.makespan("zero_bubble") == 3 * micro_batches + stages - 1
        most = max(in_flight(each) for each in pipeline.run("zero_bubble"))
        assert most <= max(in_flight(each) for each in pipeline.run("1f1b")) == stages


@pytest.mark.parametrize("micro_batches", [12, 13])
@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ([1, 1, 1], [3, 2, 1]),
        ([2, 2, 2], [3, 3, 2, 2, 1, 1]),  # two regular pipelines side by side
        ([1, 2], [4, 1, 1]),  # itself, both replicas of the second stage, and one to spare
        ([2, 1], [3, 3, 1]),  # itself, half of the second stage (rounded up), one to spare
        ([1, 3, 1], [6, 2, 2, 2, 1]),  # the first stage's limit holds the second's back
    ],
)
def test_a_position_keeps_the_later_ones_busy_and_no_more(
    widths: list[int], expected: list[int], micro_batches: int
) -> None:
    lists = timed([[1.0] * width for width in widths], micro_batches).run("1f1b")
    assert [in_flight(each) for each in lists] == expected


def timed(speeds: Sequence[Sequence[float]], micro_batches: int) -> Pipeline:
    """Stages that take equally long, of replicas whose speeds are in these proportions."""
    even = wide([len(each) for each in speeds], micro_batches)
    place = [(each[0], speed, each[1]) for each in enumerate(speeds) for speed in each[1]]
    times = [sum(mates) / speed for _, speed, mates in place]
    first = [min(p for p, each in enumerate(place) if each[0] == s) for s in range(len(speeds))]
    return Pipeline(
        positions=even.positions,
        owners=tuple(
            tuple(first[stage] + replica for replica in owners(each, micro_batches))
            for stage, each in enumerate(speeds)
        ),
        edges=even.edges,
        micro_batches=micro_batches,
        durations={
            (stage, p): Durations(time, time, time)
            for p, ((stage, _, _), time) in enumerate(zip(place, times, strict=True))
        },
    )


@pytest.mark.parametrize(
    "speeds", [[[1], [1, 1]], [[1, 1], [1]], [[1, 1, 1], [1, 1], [1]], [[1], [2, 1]], [[1], [5, 1]]]
)
def test_limits_cost_uneven_stages_no_time(speeds: list[list[float]]) -> None:
    pipeline = timed(speeds, 24)
    # Each stage takes 3 a micro-batch. All forwards first has no limits, so it never starves.
    assert 3 * 24 < pipeline.makespan("1f1b") <= pipeline.makespan("gpipe")
    assert pipeline.makespan("zero_bubble") < pipeline.makespan("1f1b")
    most = [max(in_flight(each) for each in pipeline.run(name)) for name in ("1f1b", "gpipe")]
    assert most[0] < most[1]


def test_what_is_on_its_way_is_waited_for() -> None:
    """A forward, a backward of 2, and 3 there and back: the last stage begins 4 late, and its first
    gradient takes 3 back. Nothing is on its way between chunks of one position."""
    pipeline = replace(regular(2, 4), transits={(0, 1): 3.0, (1, 0): 3.0})
    assert pipeline.makespan("gpipe") == 1 + 3 + 3 * 4 + 3 + 2
    assert regular(2, 4).makespan("gpipe") == 1 + 3 * 4 + 2
    alone = Pipeline((Position((0, 1)),), ((0,), (0,)), {(0, 1): True}, 1, None, {(0, 1): 9.0})
    assert alone.makespan("gpipe") == 6


def test_while_something_is_on_its_way_another_is_computed() -> None:
    """The last stage makes a gradient of weights while its last micro-batch is on its way, which it
    would leave for later were that there at once."""
    pipeline = regular(2, 3)
    slow = replace(pipeline, transits={(0, 1): 2.0, (1, 0): 2.0})
    assert words(pipeline.run("zero_bubble")[1]) == "F0 I0 F1 I1 W0 F2 I2 W1 W2"
    assert words(slow.run("zero_bubble")[1]) == "F0 I0 F1 I1 W0 W1 F2 I2 W2"


@pytest.mark.parametrize("time", [-1.0, float("inf"), float("nan")])
def test_refuses_transits_that_are_none(time: float) -> None:
    with pytest.raises(ValueError, match=r"is no time from chunk 0 to chunk 1"):
        replace(regular(2, 1), transits={(0, 1): time}).run("1f1b")


def test_in_flight_ends_with_the_weight_part() -> None:
    def line(text: str) -> list[Instruction]:
        kinds = {letter: kind for kind, letter in COMPUTATIONS.items()}
        return [Instruction(kinds[word[0]], 0, int(word[1:])) for word in text.split()]

    assert in_flight([]) == 0
    assert in_flight(line("F0 F1 B0 F2 B1 B2")) == 2
    assert in_flight(line("F0 I0 F1 I1 F2 W0 W1 I2 W2")) == 3
    assert in_flight([Instruction(Kind.RECEIVE, 1, 0, peer=0), *line("F0 B0")]) == 1


@pytest.mark.parametrize(
    ("weights", "micro_batches", "expected"),
    [
        ([1.0], 3, (0, 0, 0)),
        ([1, 1], 4, (0, 1, 0, 1)),
        ([2, 1], 6, (0, 1, 0, 0, 1, 0)),
        ([1, 3], 4, (1, 0, 1, 1)),
        ([5, 1, 1], 7, (0, 0, 1, 0, 2, 0, 0)),
        ([1, 1, 1], 2, (0, 1)),
        ([9, 1], 2, (0, 1)),  # though both would be done sooner on the faster one
        ([9, 1], 4, (0, 0, 1, 0)),
    ],
)
def test_owners_by_hand(
    weights: list[float], micro_batches: int, expected: tuple[int, ...]
) -> None:
    assert owners(weights, micro_batches) == expected


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=5), st.integers(1, 40))
def test_owners_take_turns_in_proportion(weights: list[float], micro_batches: int) -> None:
    dealt = owners(weights, micro_batches)
    counts = Counter(dealt)
    assert counts.total() == len(dealt) == micro_batches
    least = int(micro_batches >= len(weights))
    assert min(counts[i] for i in range(len(weights))) >= least
    # Those beyond the one that every replica has can be moved.
    slowest = max(
        (counts[i] / weight for i, weight in enumerate(weights) if counts[i] > least), default=0.0
    )
    earliest_free = min((counts[i] + 1) / weight for i, weight in enumerate(weights))
    assert slowest <= earliest_free * (1 + 1e-9)  # no move makes the slowest earlier
    for end in range(micro_batches):
        so_far = Counter(dealt[:end])
        for i in counts:
            assert so_far[i] < Fraction(end * counts[i], micro_batches) + 1


@pytest.mark.parametrize("weights", [[], [0.0], [-1.0], [inf]])
def test_owners_refuses_what_is_no_speed(weights: list[float]) -> None:
    with pytest.raises(ValueError, match=r"shared|speeds"):
        owners(weights, 4)


TWO = (Position((0,)), Position((1,)))
HALVES = ((0, 0), (1, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", TWO, HALVES, {(0, 1): True}, 2), "unknown schedule 2f2b; one of gpipe, 1f1b"),
        (("1f1b", TWO, (), {}, 2), "0 chunks"),
        (("1f1b", TWO, ((), ()), {}, 0), "0 micro-batches"),
        (("1f1b", TWO, HALVES, {}, 3), "2 owners in chunk 0, not 3"),
        (("1f1b", TWO, ((0, 0), (1, 0)), {}, 2), "chunk 1 is not held by its owner 0"),
        (("1f1b", TWO, ((0, 0), (1, 2)), {}, 2), "chunk 1 is not held by its owner 2"),
        (("1f1b", (*TWO, Position(())), HALVES, {}, 2), r"position 2 holds chunks \(\)"),
        (("1f1b", (Position((0, 1)), *TWO), HALVES, {}, 2), r"position 0 holds chunks \(0, 1\)"),
        (("1f1b", TWO, HALVES, {(1, 0): True}, 2), "edge 1 -> 0 is not forward"),
        (("1f1b", TWO, HALVES, {(1, 2): True}, 2), "edge 1 -> 2 is not forward in 2 chunks"),
        (("1f1b", TWO, HALVES, {}, 2, {(0, 0): Durations()}), "no durations of chunk 1 on pos"),
    ],
)
def test_refuses_what_is_no_pipeline(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("time", [-1.0, inf, float("nan")])
def test_refuses_durations_that_are_none(time: float) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        Durations(backward_weight=time)
