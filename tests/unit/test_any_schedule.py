"""What must hold of the schedules of every pipeline.

`execute` is an independent machine: it obeys the lists with sends that do not block, receives
that do, and one first-in first-out queue for each pair of positions, edge and direction.
"""

from collections import defaultdict, deque
from math import ceil

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.pairs import examples
from tests.unit.pipelines import COMPUTATIONS, Lists, Pipeline, regular, wide, words

from whale_train.strategies.grammar.nodes import SCHEDULES
from whale_train.strategies.schedule.instructions import (
    Durations,
    Instruction,
    Kind,
    Position,
    in_flight,
)


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


@settings(max_examples=examples(150))
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


@settings(max_examples=examples(60))
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


@given(pipelines(), st.sampled_from(SCHEDULES))
@settings(max_examples=examples(50))
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
