"""The simulated step: by hand, against the textbook's pipelines, and what holds for any tasks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_train.strategies.hardware.cluster import Cluster, Device, Link, Node
from whale_train.strategies.schedule.instructions import Durations, Instruction, Kind, Position
from whale_train.strategies.schedule.orders import schedule
from whale_train.strategies.simulate.prediction import simulated
from whale_train.strategies.simulate.simulator import Lane, RankTime, Task, rank_times, simulate
from whale_train.strategies.simulate.tasks import Actor, Cost, Step, Sync, tasks_of

COMPUTE, LINK = Lane.COMPUTE, Lane.LINK


def test_a_lane_does_one_thing_after_another_and_two_lanes_go_on_together() -> None:
    tasks = [
        Task((0,), COMPUTE, 2.0),
        Task((0,), LINK, 3.0, (0,)),
        Task((0,), COMPUTE, 1.0),
        Task((0,), COMPUTE, 1.0, (1,), name="update"),
    ]
    spans = simulate(tasks)
    assert spans.starts == (0.0, 2.0, 2.0, 5.0)
    assert spans.ends == (2.0, 5.0, 3.0, 6.0)
    # It waits from 3 to 5, while the transfer goes on.
    assert rank_times(spans) == {0: RankTime(3.0, 2.0, 1.0, 0.0)}


def test_a_collective_waits_for_its_last_member() -> None:
    tasks = [
        Task((0,), COMPUTE, 1.0),
        Task((1,), COMPUTE, 4.0),
        Task((0, 1), COMPUTE, 2.0, (), 2.0),
    ]
    spans = simulate(tasks)
    assert (spans.starts[2], spans.seconds) == (4.0, 6.0)
    assert rank_times(spans) == {0: RankTime(1.0, 2.0, 0.0, 3.0), 1: RankTime(4.0, 2.0, 0.0, 0.0)}


def test_what_waits_for_a_later_task_is_refused() -> None:
    with pytest.raises(ValueError, match="task 0 waits for a later one"):
        simulate([Task((0,), COMPUTE, 1.0, (1,)), Task((0,), COMPUTE, 1.0)])


def test_ranks_share_processors() -> None:
    # Three ranks on two processors: 2/3 of one each, until the first is done after 1.5; then the
    # others have one each.
    tasks = [Task((0,), COMPUTE, 1.0), Task((1,), COMPUTE, 2.0), Task((2,), COMPUTE, 2.0)]
    assert simulate(tasks, 2).ends == pytest.approx((1.5, 2.5, 2.5))
    assert simulate(tasks, 3).ends == (1.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("busy", "ends"),
    [
        # Two and a processor that copies want three of two: all take half longer. Then two do.
        (1.0, (2.5, 2.5, 1.5)),
        # Two and a half of two: of the transfer only the half that needs one takes longer.
        (0.5, (2.225, 2.225, 1.125)),
        (0.0, (2.0, 2.0, 1.0)),
    ],
)
def test_transfers_need_processors(busy: float, ends: tuple[float, ...]) -> None:
    tasks = [Task((0,), COMPUTE, 2.0), Task((1,), COMPUTE, 2.0), Task((0,), LINK, 1.0, busy=busy)]
    assert simulate(tasks, 2).ends == pytest.approx(ends)
    assert simulate(tasks, 3).ends == (2.0, 2.0, 1.0)


@st.composite
def listed_tasks(draw: st.DrawFn) -> list[Task]:
    found: list[Task] = []
    for number in range(draw(st.integers(1, 14))):
        ranks = draw(st.sets(st.integers(0, 3), min_size=1, max_size=3))
        after = draw(st.sets(st.integers(0, max(number - 1, 0)), max_size=2)) if number else set()
        lane, seconds = draw(st.sampled_from(Lane)), draw(st.sampled_from([0.0, 0.5, 1.0, 2.5]))
        found.append(Task(tuple(sorted(ranks)), lane, seconds, tuple(sorted(after))))
    return found


@given(listed_tasks(), st.sampled_from([1.0, 2.0, 3.5, 100.0]))
def test_any_tasks_end_in_order(tasks: list[Task], processors: float) -> None:
    spans = simulate(tasks, processors)
    for number, task in enumerate(tasks):
        assert spans.ends[number] - spans.starts[number] >= task.seconds - 1e-9
        assert all(spans.starts[number] >= spans.ends[other] - 1e-9 for other in task.after)
        for before in range(number):
            other = tasks[before]
            if other.lane is task.lane and set(other.ranks) & set(task.ranks):
                assert spans.starts[number] >= spans.ends[before] - 1e-9
    # Nobody computes more than there are processors to compute on, nor less than alone.
    work = sum(task.seconds * len(task.ranks) for task in tasks if task.lane is COMPUTE)
    assert spans.seconds >= work / processors - 1e-9
    alone = simulate(tasks)
    assert spans.seconds >= alone.seconds - 1e-9
    for rank, times in rank_times(alone).items():
        parts = times.compute_s + times.communication_s + times.optimizer_s + times.idle_s
        assert parts == pytest.approx(alone.seconds), rank


def pipeline(
    name: str,
    stages: int,
    micro_batches: int,
    forward: float = 1.0,
    send_s: float = 0.0,
    busy: float = 0.0,
) -> Step:
    """Equal stages in a row; a backward takes twice a forward."""
    orders = schedule(
        name,
        [Position((stage,)) for stage in range(stages)],
        [[stage] * micro_batches for stage in range(stages)],
        {(stage, stage + 1): True for stage in range(stages - 1)},
        micro_batches,
        {(stage, stage): Durations(forward, forward, forward) for stage in range(stages)},
    )
    price = {
        Kind.FORWARD: forward,
        Kind.BACKWARD: 2 * forward,
        Kind.BACKWARD_INPUT: forward,
        Kind.BACKWARD_WEIGHT: forward,
        Kind.SEND: send_s,
        Kind.SEND_GRADIENT: send_s,
    }
    actors = [
        Actor((stage,), 0, order, lambda each: Cost(price[each.kind], 0.0, busy), 0.0)
        for stage, order in enumerate(orders)
    ]
    return Step(actors, ())


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(st.integers(1, 5), st.integers(1, 9))
def test_a_pipeline_has_the_textbooks_bubble(name: str, stages: int, micro_batches: int) -> None:
    # (m + p - 1) forwards and backwards: Huang et al. 2019, section 2.3.
    seconds = simulate(tasks_of(pipeline(name, stages, micro_batches))).seconds
    assert seconds == pytest.approx(3 * (micro_batches + stages - 1))


def test_a_zero_bubble_schedule_has_less_of_it() -> None:
    # ZB-H1: (p - 1) (F + B - W) of bubble, with F = B = W = 1 (Qi et al. 2023, table 2).
    seconds = simulate(tasks_of(pipeline("zero_bubble", 4, 12))).seconds
    assert seconds == pytest.approx(3 * 12 + 3)


def test_what_is_sent_arrives_later() -> None:
    # One micro-batch through three stages and back: four sends, one after another.
    spans = simulate(tasks_of(pipeline("1f1b", 3, 1, send_s=0.25)))
    assert spans.seconds == pytest.approx(9 + 4 * 0.25)


def two_copies(sync: Sync) -> Step:
    table = {(Kind.FORWARD, 0, 0): Cost(1.0), (Kind.BACKWARD, 0, 0): Cost(2.0)}
    order = pipeline("1f1b", 1, 1).actors[0].instructions
    actors = [Actor((rank,), rank, order, lambda x: table[x[:3]], 0.5) for rank in range(2)]
    return Step(actors, [sync])


@pytest.mark.parametrize(
    ("sync", "seconds"),
    [
        (Sync((0, 1), 1.0, 1, False), 3 + 1 + 0.5),
        # In two pieces: the first goes while the second half of the backward is computed.
        (Sync((0, 1), 1.0, 2, True), 3 + 0.5 + 0.5),
        (Sync((0, 1), 4.0, 2, True), 2 + 4 + 0.5),  # the link is the slower one
        # A transfer that processors carry themselves hides nothing.
        (Sync((0, 1), 1.0, 2, True, busy=1.0), 3 + 1 + 0.5),
        (Sync((0, 1), 1.0, 2, True, busy=0.5), 3 + 0.25 + 0.5 + 0.5),  # the first half of the sum
        (Sync((0, 1), 1.0, 1, True, busy=0.5), 3 + 1 + 0.5),  # there is nothing beside it
        (Sync((0, 1), 1.0, 1, False, busy=0.5), 3 + 1 + 0.5),
        (Sync((0, 1), 1.0, 1, False, gathers_s=0.25), 3 + 1 + 0.5 + 0.25),
    ],
)
def test_sums_of_gradients(sync: Sync, seconds: float) -> None:
    assert simulate(tasks_of(two_copies(sync))).seconds == pytest.approx(seconds)


def test_a_sum_in_one_piece_is_beside_no_chunk() -> None:
    """Of two chunks: it waits for the backwards of both."""
    order = [Instruction(Kind.FORWARD, 0, 0), Instruction(Kind.FORWARD, 1, 0)]
    order += [Instruction(Kind.BACKWARD, 1, 0), Instruction(Kind.BACKWARD, 0, 0)]
    actors = [Actor((rank,), rank, order, lambda _: Cost(1.0), 0.5) for rank in range(2)]
    whole, halves = Sync((0, 1), 1.0, 1, True, busy=0.5), Sync((0, 1), 1.0, 2, True, busy=0.5)
    assert simulate(tasks_of(Step(actors, [whole]))).seconds == pytest.approx(4 + 1 + 0.5)
    # A half takes a quarter of a second of what is beside it.
    assert simulate(tasks_of(Step(actors, [halves]))).seconds == pytest.approx(4.25 + 0.5 + 0.5)


def test_what_processors_carry_is_slowed_where_ranks_share_them() -> None:
    after, beside = Sync((0, 1), 1.0, 1, False, busy=1.0), Sync((0, 1), 1.0, 2, True, busy=1.0)
    for sync in (after, beside):  # two ranks on one processor: all takes twice as long
        assert simulate(tasks_of(two_copies(sync)), 1).seconds == pytest.approx(2 * (3 + 1 + 0.5))
    free = Sync((0, 1), 1.0, 1, False)
    assert simulate(tasks_of(two_copies(free)), 1).seconds == pytest.approx(2 * (3 + 0.5) + 1)


def test_sends_need_processors() -> None:
    def seconds(busy: float, processors: float) -> float:
        step = pipeline("1f1b", 2, 4, send_s=0.5, busy=busy)
        return simulate(tasks_of(step), processors).seconds

    # On one processor all is done one after another: 4 x 2 x 3 s of computing, 4 x 2 sends.
    assert seconds(1.0, 1) == pytest.approx(24 + 8 * 0.5)
    assert seconds(1.0, 1) > seconds(0.5, 1) > seconds(0.0, 1)
    assert seconds(1.0, 4) == seconds(0.0, 2)


def test_one_that_stands_for_others_has_its_part_of_the_processors() -> None:
    device = Device("cpu_process", {}, 0.0, 1.0)
    link = Link("", 1.0, 0.0)
    cluster = Cluster("cpu", (Node((device,) * 4, link),), link, processors=4.0)
    step = pipeline("zero_bubble", 2, 4, send_s=2.0, busy=1.0)
    alone = simulated(step, {0: 0, 1: 1}, cluster.first(2), 8)
    twice = simulated(step, {0: 0, 1: 1, 2: 0, 3: 1}, cluster, 16)
    assert alone.spans == simulate(tasks_of(step))
    assert twice.spans == simulate(tasks_of(step), 2.0)
    assert twice.spans.seconds > alone.spans.seconds


def test_the_norm_is_everyones() -> None:
    step = two_copies(Sync((0, 1), 1.0, 1, False))
    with_norm = Step(step.actors, step.syncs, norm_s=0.125)
    assert simulate(tasks_of(with_norm)).seconds == pytest.approx(3 + 1 + 0.125 + 0.5)
