"""The predicted timeline, in the form of a run's."""

from whale_train.strategies.schedule.instructions import Instruction, Kind
from whale_train.strategies.simulate.chrome_trace import events_of
from whale_train.strategies.simulate.simulator import UPDATE, Lane, Task, simulate

BACKWARD = Instruction(Kind.BACKWARD, 0, 1)


def test_pieces_are_one_event_and_ranks_do_what_stands_for_them() -> None:
    tasks = [
        Task((0,), Lane.COMPUTE, 0.1, instruction=BACKWARD),
        Task((0,), Lane.COMPUTE, 0.2, (0,), instruction=BACKWARD),
        Task((0,), Lane.LINK, 0.15, (0,), name="sum of gradients"),
        Task((0,), Lane.COMPUTE, 0.05, (1, 2), name=UPDATE),
        Task((0,), Lane.COMPUTE, 0.0, (3,), name=UPDATE),  # of nothing, which is not shown
    ]
    names, events = [], []
    for event in events_of(simulate(tasks), {0: 0, 1: 0}, {0: "fast", 1: "slow"}):
        (names if event["ph"] == "M" else events).append(event)
    assert [(x["pid"], x["args"]["name"]) for x in names] == [
        (0, "rank 0 (fast)"),
        (1, "rank 1 (slow)"),
    ]
    found = [
        (x["pid"], x["tid"], x["name"], round(x["ts"]), round(x["dur"]), x["args"]) for x in events
    ]
    expected = [
        (0, "backward 1", 0, 300_000, {"chunk": 0, "micro_batch": 1}),
        (1, "sum of gradients", 100_000, 150_000, {}),
        (0, "update", 300_000, 50_000, {}),
    ]
    assert found == [(rank, *each) for rank in range(2) for each in expected]
