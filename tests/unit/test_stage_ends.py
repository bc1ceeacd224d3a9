"""When stages are done at the earliest, worked out by hand."""

from dataclasses import replace

import pytest

from whale_train.strategies.cost import Times
from whale_train.strategies.stage_ends import PieceTimes, StageOf, done_together_s, ends_of

# A second of a micro-batch's forward, of its gradients, and of the weights'.
EACH = PieceTimes.of([Times(1.0, 1.0, 1.0)])
HALF = PieceTimes.of([Times(0.5, 0.5, 0.5)])


def regular(stages: int) -> list[StageOf]:
    return [StageOf(EACH, EACH, in_flight=stages - number) for number in range(stages)]


@pytest.mark.parametrize(
    ("schedule", "ends"),
    [
        # All have 12 s of work, of which the last begins after 2; and its last gradients take 2 s
        # for each of the stages before.
        ("1f1b", [18.0, 16.0, 14.0]),
        # Without the gradients of weights the last has 8 s of it, and hands on in 1 s.
        ("zero_bubble", [12.0, 13.0, 14.0]),
    ],
)
def test_three_equal_stages(schedule: str, ends: list[float]) -> None:
    assert ends_of(regular(3), 4, schedule) == ends


def test_what_is_in_flight_has_to_come_back() -> None:
    """Two at a time go 6 s through both stages; three at a time would keep the first busy."""
    stages = [StageOf(EACH, EACH, in_flight=2), StageOf(EACH, EACH)]
    slow = [replace(stages[0], sends=3.0), stages[1]]
    assert ends_of(slow, 10, "1f1b")[0] == 10 / 2 * (6.0 + 2 * 3.0)
    assert ends_of([replace(slow[0], in_flight=4), slow[1]], 10, "1f1b")[0] == 1 + 30 + 2.0


def test_what_is_sent_goes_there_and_back() -> None:
    stages = [StageOf(EACH, EACH, in_flight=4, send=0.75), StageOf(EACH, EACH)]
    first, last = ends_of(stages, 4, "1f1b")
    assert last == 1.0 + 0.75 + 12.0
    assert first == last + 0.75 + 2.0


def test_a_link_sends_one_thing_at_a_time() -> None:
    """For 20 s each: values from the first on, of which the last is forwarded and comes back; or
    gradients from the second, the last of which makes the first's."""
    stages = [StageOf(EACH, EACH, in_flight=9, sending=20.0), StageOf(EACH, EACH)]
    assert ends_of(stages, 4, "1f1b")[0] == 1.0 + 20.0 + 1.0 + 2.0
    stages = [StageOf(EACH, EACH, in_flight=9), StageOf(EACH, EACH, sending=20.0)]
    assert ends_of(stages, 4, "1f1b")[0] == 1.0 + 1.0 + 20.0 + 2.0


def test_copies_of_a_stage_share_the_pieces() -> None:
    """Three pieces for two copies: one has two of them."""
    stages = [StageOf(EACH, EACH, copies=2, in_flight=9), StageOf(EACH, EACH, in_flight=9)]
    first, last = ends_of(stages, 3, "1f1b")
    assert last == 1.0 + 9.0
    assert first == last + 2.0
    assert ends_of([replace(stages[0], copies=2)], 3, "1f1b") == [6.0]


def test_a_smaller_micro_batch_is_waited_for_less() -> None:
    stages = [StageOf(EACH, HALF, in_flight=9), StageOf(EACH, HALF, in_flight=9)]
    assert ends_of(stages, 4, "1f1b") == [0.5 + 12.0 + 1.0, 0.5 + 12.0]


def test_both_chunks_of_interleaved_stages_come_back() -> None:
    """Two stages of two chunks of 3 s each, a second between them: the first chunk of the first
    stage passes through all four, that of the second through three, and the second chunks through
    the last two and the last."""
    twice = PieceTimes.of([Times(1.0, 1.0, 1.0)] * 2)
    stages = [
        StageOf(twice, twice, in_flight=1, send=1.0, sends=1.0),
        StageOf(twice, twice, in_flight=2),
    ]
    first, second = ends_of(stages, 4, "interleaved_1f1b")
    begun = 1.0 + 1.0
    assert second == begun + 4 / 2 * ((9.0 + 2.0) + 3.0)
    assert first == 4 / 1 * ((12.0 + 2.0 + 2.0) + (6.0 + 2.0))


def test_a_stage_that_reads_nothing_of_the_one_before_does_not_wait_for_it() -> None:
    stages = [StageOf(EACH, EACH, in_flight=2), StageOf(EACH, EACH, linked=False)]
    assert ends_of(stages, 4, "1f1b") == [12.0, 12.0]


def test_unlike_copies_are_done_together() -> None:
    """At 1 s and 2 s a sample, two of the first kind and one of the second: 12, 12 and 6."""
    assert done_together_s(30, [(2, 0.0, 1.0), (1, 0.0, 2.0)]) == 12.0
    # A second in which the fast ones do nothing is one in which 2 of the samples are not done.
    assert done_together_s(30, [(2, 1.0, 1.0), (1, 0.0, 2.0)]) == 12.8
