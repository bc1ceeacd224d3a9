"""When stages are done at the earliest, worked out by hand."""

import pytest

from whale_train.strategies.cost import Times
from whale_train.strategies.segments import Line
from whale_train.strategies.stage_ends import (
    Affine,
    StageTimes,
    done_together_s,
    ends_of,
)

# A second of a sample's forward, of its gradients, and of the weights': a micro-batch takes 3 s
# where 4 samples are in 4 pieces.
EACH = StageTimes.of([Line(Times(), Times(1.0, 1.0, 1.0))])
NOTHING = Affine()


def at_4(affine: Affine) -> float:
    return affine.offset + 4 * affine.slope


@pytest.mark.parametrize(
    ("schedule", "ends"),
    [
        ("1f1b", [[12.0], [15.0], [18.0]]),  # (pieces + stages - 1) x 3
        # A stage has all of its work after the forwards before it; and all but the weights' before
        # the backwards that come after.
        ("zero_bubble", [[12.0, 8.0], [13.0, 10.0], [14.0, 12.0]]),
    ],
)
def test_three_equal_stages(schedule: str, ends: list[list[float]]) -> None:
    found = ends_of([(EACH, NOTHING, 1)] * 3, 4, 1.0, schedule)
    assert [[at_4(each) for each in stage.computed] for stage in found] == ends
    # The first gradients of the last backward are there an eighth into its 2 s.
    begun = [at_4(stage.done[0]) - at_4(stage.last_backward[0]) for stage in found]
    assert begun == [pytest.approx(7 / 8 * 2)] * 3


def test_what_is_sent_goes_there_and_back() -> None:
    send = Affine(0.5, 0.25)
    _, last = ends_of([(EACH, send, 1), (EACH, NOTHING, 1)], 4, 1.0, "1f1b")
    assert at_4(last.computed[0]) == 15.0 + 2 * (0.5 + 0.25)


def test_copies_of_a_stage_share_the_pieces() -> None:
    """Three pieces for two copies: one has two of them."""
    first, last = ends_of([(EACH, NOTHING, 2), (EACH, NOTHING, 1)], 3, 1.0, "1f1b")
    each = 3 * 4 / 3
    assert at_4(first.computed[0]) == pytest.approx(2 * each)
    assert at_4(last.computed[0]) == pytest.approx(each + 3 * each)


def test_a_smaller_micro_batch_is_waited_for_less() -> None:
    _, last = ends_of([(EACH, NOTHING, 1)] * 2, 4, 0.5, "1f1b")
    assert at_4(last.computed[0]) == 12.0 + 1.5


def test_unlike_copies_are_done_together() -> None:
    """At 1 s and 2 s a sample, two of the first kind and one of the second: 12, 12 and 6."""
    assert done_together_s(30, [2, 1], [Affine(0.0, 1.0), Affine(0.0, 2.0)]) == 12.0
    # A second in which the fast ones do nothing is one in which 2 of the samples are not done.
    assert done_together_s(30, [2, 1], [Affine(1.0, 1.0), Affine(0.0, 2.0)]) == 12.8
