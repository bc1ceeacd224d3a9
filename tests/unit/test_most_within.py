"""How many samples there is room for, found in few looks."""

from bisect import bisect_right

from hypothesis import given
from hypothesis import strategies as st

from whale_train.strategies.stage_memory.rank_memory import largest_fitting

SIZES = st.floats(0, 50)


@given(SIZES, SIZES, st.floats(0, 1), SIZES, st.integers(0, 5000), st.floats(-10, 5000))
def test_it_is_what_looking_everywhere_finds(
    fixed: float, each: float, square: float, jump: float, limit: int, room: float
) -> None:
    looks = []

    def need(count: int) -> float:
        looks.append(count)
        return fixed + each * count + square * count**2 + jump * (count > 3)

    found = largest_fitting(need, limit, room)
    assert len(looks) <= 2 * limit.bit_length() + 3
    assert found == bisect_right(range(limit + 1), room, key=need) - 1
