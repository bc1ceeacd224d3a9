"""Schedules against the textbook's closed forms, and what must hold for every pipeline.

`execute` is an independent machine: it obeys the lists with sends that do not block, receives
that do, and one first-in first-out queue for each pair of positions, edge and direction.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, inf

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from whale_train.strategies.grammar import SCHEDULES
from whale_train.strategies.instructions import Durations, Instruction, Kind, Position, in_flight
from whale_train.strategies.schedule import makespan, owners, schedule

COMPUTATIONS = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHT: "W",
}
Lists = Sequence[Sequence[Instruction]]


@dataclass(frozen=True)
class Pipeline:
    """The arguments of `schedule` after the name."""

    positions: tuple[Position, ...]
    owners: tuple[tuple[int, ...], ...]
    edges: dict[tuple[int, int], bool]
    micro_batches: int
    durations: dict[tuple[int, int], Durations] | None = None
    transits: dict[tuple[int, int], float] | None = None

    def run(self, name: str) -> Lists:
        given = (self.positions, self.owners, self.edges, self.micro_batches)
        return schedule(name, *given, self.durations, self.transits)

    def makespan(self, name: str) -> float:
        given = (self.positions, self.owners, self.edges, self.micro_batches)
        return makespan(name, *given, self.durations, self.transits)


def wide(widths: Sequence[int], micro_batches: int, chunks_each: int = 1) -> Pipeline:
    """Stages of these widths, the micro-batches dealt to their replicas in turn."""
    stages = len(widths)
    first = [sum(widths[:stage]) for stage in range(stages)]
    chunks = range(stages * chunks_each)
    return Pipeline(
        positions=tuple(
            Position(tuple(range(stage, len(chunks), stages)))
            for stage, width in enumerate(widths)
            for _ in range(width)
        ),
        owners=tuple(
            tuple(first[c % stages] + m % widths[c % stages] for m in range(micro_batches))
            for c in chunks
        ),
        edges={(c, c + 1): True for c in chunks[:-1]},
        micro_batches=micro_batches,
    )


def regular(stages: int, micro_batches: int, chunks_each: int = 1) -> Pipeline:
    return wide([1] * stages, micro_batches, chunks_each)


def words(instructions: Sequence[Instruction]) -> str:
    """The computations of a position of one chunk, as in "F0 F1 B0 B1"."""
    done = (each for each in instructions if each.kind in COMPUTATIONS)
    return " ".join(f"{COMPUTATIONS[each.kind]}{each.micro_batch}" for each in done)


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


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    stages = draw(st.integers(1, 4))
    num_chunks = draw(st.integers(stages, 3 * stages))  # stages may hold unlike numbers of chunks
    micro_batches = draw(st.integers(1, 9))
    stage_of = [s for s in range(stages) for _ in range(draw(st.integers(1, 3)))]
    replicas = [[p for p, s in enumerate(stage_of) if s == stage] for stage in range(stages)]
    owned = tuple(
        tuple(draw(st.sampled_from(replicas[c % stages])) for _ in range(micro_batches))
        for c in range(num_chunks)
    )
    # Nothing need flow between neighbours, as where encoder and decoder begin side by side.
    linked = draw(st.booleans())
    edges = {(c, c + 1): True for c in range(num_chunks - 1) if linked or draw(st.booleans())}
    if num_chunks > 1:
        ends = st.tuples(st.integers(0, num_chunks - 1), st.integers(0, num_chunks - 1))
        forward = ends.filter(lambda edge: edge[0] < edge[1])
        edges |= draw(st.dictionaries(forward, st.booleans(), max_size=4))
    time = st.sampled_from([0, 0.1, 1, 1, 2, 7.5])
    durations = {
        (c, p): Durations(draw(time), draw(time), draw(time))
        for c in range(num_chunks)
        for p in replicas[c % stages]
    }
    positions = tuple(Position(tuple(range(s, num_chunks, stages))) for s in stage_of)
    transits = {ends: draw(time) for edge in edges for ends in (edge, edge[::-1])}
    return Pipeline(
        *(positions, owned, edges, micro_batches),
        draw(st.sampled_from([None, durations])),
        draw(st.sampled_from([None, transits])),
    )


def execute(pipeline: Pipeline, lists: Lists) -> dict[tuple[str, int, int], int]:
    """Run the lists to their end; which position did each (F, B, I or W; chunk; micro-batch).

    Fails on a deadlock, on a message that is not the one awaited, on one that nobody took, on
    work without what it needs, and on work done twice.
    """
    queues: dict[tuple[int, int, int, int], deque[int]] = defaultdict(deque)
    todo = [deque(each) for each in lists]
    has: set[tuple[int, str, int, int]] = set()  # position, what, chunk, micro-batch
    done: dict[tuple[str, int, int], int] = {}

    def step(here: int, do: Instruction) -> bool:
        chunk, m, peer = do.chunk, do.micro_batch, do.peer
        if do.kind in (Kind.SEND, Kind.SEND_GRADIENT):
            assert (here, "F" if do.kind is Kind.SEND else "G", chunk, m) in has
            queues[here, pipeline.owners[peer][m], chunk, peer].append(m)
        elif do.kind in (Kind.RECEIVE, Kind.RECEIVE_GRADIENT):
            queue = queues[pipeline.owners[peer][m], here, peer, chunk]
            if not queue:
                return False
            assert queue.popleft() == m
            has.add((here, "F" if do.kind is Kind.RECEIVE else "G", peer, m))
        else:
            what = COMPUTATIONS[do.kind]
            gradients = [edge for edge, gradient in pipeline.edges.items() if gradient]
            needs = {
                "F": [("F", a) for a, b in pipeline.edges if b == chunk],
                "W": [("G", chunk)],
            }.get(what, [("F", chunk), *(("G", b) for a, b in gradients if a == chunk)])
            assert all((here, need, source, m) in has for need, source in needs)
            assert (what, chunk, m) not in done
            done[what, chunk, m] = here
            has.add((here, "F" if what == "F" else "G", chunk, m))
        return True

    while any(todo):
        progress = False
        for here, left in enumerate(todo):
            while left and step(here, left[0]):
                left.popleft()
                progress = True
        assert progress, "deadlock"
    assert not any(queues.values())
    return done


@settings(max_examples=150, deadline=None)
@given(pipelines(), st.sampled_from(SCHEDULES))
@example(regular(4, 1), "interleaved_1f1b")
@example(regular(4, 5, chunks_each=3), "interleaved_1f1b")
@example(wide([2, 3], 7, chunks_each=2), "zero_bubble")
def test_every_schedule_runs_to_its_end(pipeline: Pipeline, name: str) -> None:
    lists = pipeline.run(name)
    assert lists == pipeline.run(name)
    done = execute(pipeline, lists)
    parts = "FIW" if name == "zero_bubble" else "FB"
    assert done == {
        (part, chunk, m): owner
        for chunk, row in enumerate(pipeline.owners)
        for m, owner in enumerate(row)
        for part in parts
    }


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 24))
def test_in_flight_stays_within_the_limit(widths: list[int], micro_batches: int) -> None:
    pipeline = wide(widths, micro_batches)
    spare = 0 if len(set(widths)) == 1 else 1
    most = [
        1 + ceil(sum(widths[stage + 1 :]) / width) + spare
        for stage, width in enumerate(widths)
        for _ in range(width)
    ]
    lists = pipeline.run("1f1b")
    assert all(in_flight(each) <= limit for each, limit in zip(lists, most, strict=True))
    # ZB-H1 lets every stage hold what the fullest may.
    assert all(in_flight(each) <= max(most) for each in pipeline.run("zero_bubble"))


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


@given(pipelines(), st.sampled_from(SCHEDULES))
@settings(max_examples=50, deadline=None)
def test_no_schedule_beats_the_busiest_position(pipeline: Pipeline, name: str) -> None:
    work: defaultdict[int, float] = defaultdict(float)
    for chunk, row in enumerate(pipeline.owners):
        for owner in row:
            times = (pipeline.durations or defaultdict(Durations))[chunk, owner]
            work[owner] += times.forward + times.backward_input + times.backward_weight
    total = pipeline.makespan(name)
    assert max(work.values()) <= total + 1e-9
    underway = sum((pipeline.transits or {}).values()) * pipeline.micro_batches
    assert total <= sum(work.values()) + underway + 1e-9  # something is always done, or on its way


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


def test_branches_that_meet_later_do_not_block_each_other() -> None:
    # Chunks 0 and 1 have no edge, and the first replica of chunk 0 is slow: a limit of 2, filled
    # with the micro-batches of the fast one, would keep chunk 1 from ever doing the others.
    pipeline = Pipeline(
        positions=(Position((0,)), Position((0,)), Position((1,)), Position((2,))),
        owners=((0, 1, 0, 1), (2,) * 4, (3,) * 4),
        edges={(0, 2): True, (1, 2): True},
        micro_batches=4,
        durations={
            (0, 0): Durations(9, 9, 9),
            (0, 1): Durations(),
            (1, 2): Durations(),
            (2, 3): Durations(),
        },
    )
    lists = pipeline.run("1f1b")
    execute(pipeline, lists)
    assert words(lists[2]) == "F0 F1 B0 F2 B1 F3 B2 B3"
