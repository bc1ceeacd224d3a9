"""Shares against brute force, and the properties that hold for every input."""

from fractions import Fraction
from itertools import pairwise, product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.pairs import examples

from whale_train.strategies.schedule.apportion import even_shares, optimal_shares, tile

speeds_and_caps = st.lists(
    st.tuples(st.sampled_from([1.0, 2.0, 3.0, 0.5, 0.1, 0.3, 7.0]), st.integers(0, 6)),
    min_size=1,
    max_size=4,
)


def brute_force(
    total: int, speeds: list[float], caps: list[int], minimum: int
) -> tuple[int, ...] | None:
    """Every vector of shares, judged by exact times; then more for lower ranks."""
    ranges = [range(minimum, cap + 1) for cap in caps]
    feasible = (shares for shares in product(*ranges) if sum(shares) == total)

    def order(shares: tuple[int, ...]) -> tuple[list[Fraction], list[int]]:
        times = [share / Fraction(speed) for share, speed in zip(shares, speeds, strict=True)]
        return sorted(times, reverse=True), [-share for share in shares]

    return min(feasible, key=order, default=None)


@settings(max_examples=examples(200))
@given(speeds_and_caps, st.integers(0, 16), st.integers(0, 2))
# Both would finish their next sample at the same time: the faster one takes it.
@example([(2.0, 6), (1.0, 6)], 2, 0)
@example([(1.0, 6), (2.0, 6)], 2, 0)
@example([(1.0, 6), (1.0, 6), (2.0, 6)], 6, 0)  # so does the lower rank of two equal ones
@example([(1.0, 6), (2.0, 6), (0.9, 6), (0.9, 6)], 2, 0)  # and when it took the one before
@example([(1.0, 6), (2.0, 2), (3.0, 6)], 7, 1)
def test_equals_brute_force(devices: list[tuple[float, int]], total: int, minimum: int) -> None:
    speeds, caps = [speed for speed, _ in devices], [cap for _, cap in devices]
    expected = brute_force(total, speeds, caps, minimum)
    assert optimal_shares(total, speeds, caps, minimum) == expected


many = st.lists(
    st.tuples(st.floats(1e-3, 1e15), st.integers(1, 3000)), min_size=1, max_size=60
).flatmap(lambda ds: st.tuples(st.just(ds), st.integers(len(ds), sum(cap for _, cap in ds))))


@given(many)
def test_whole_shares_within_the_bounds(case: tuple[list[tuple[float, int]], int]) -> None:
    devices, total = case
    caps = [cap for _, cap in devices]
    shares = optimal_shares(total, [speed for speed, _ in devices], caps, minimum=1)
    assert shares is not None
    assert sum(shares) == total
    assert all(1 <= share <= cap for share, cap in zip(shares, caps, strict=True))


@given(many)
def test_no_sample_would_finish_earlier_elsewhere(
    case: tuple[list[tuple[float, int]], int],
) -> None:
    devices, total = case
    speeds, caps = [Fraction(speed) for speed, _ in devices], [cap for _, cap in devices]
    shares = optimal_shares(total, [speed for speed, _ in devices], caps)
    assert shares is not None
    last = max(share / speed for share, speed in zip(shares, speeds, strict=True))  # the step time
    earliest_free = min(
        (
            (share + 1) / speed
            for share, speed, cap in zip(shares, speeds, caps, strict=True)
            if share < cap
        ),
        default=last,
    )
    assert earliest_free >= last


@given(speeds_and_caps, st.integers(0, 20), st.integers(1, 10**9))
def test_only_the_ratios_of_speeds_matter(
    devices: list[tuple[float, int]], total: int, scale: int
) -> None:
    whole, caps = [round(10 * speed) for speed, _ in devices], [cap for _, cap in devices]
    scaled = [scale * speed for speed in whole]
    assert optimal_shares(total, scaled, caps) == optimal_shares(total, whole, caps)


@given(st.integers(1, 50), st.integers(0, 10**6), st.floats(1e-6, 1e18))
def test_equal_speeds_give_equal_shares(count: int, total: int, speed: float) -> None:
    caps = [total] * count
    shares = optimal_shares(total, [speed] * count, caps)
    assert shares is not None
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)
    assert shares == even_shares(total, count, caps)


@given(st.floats(1e9, 1e15), st.floats(1e9, 1e15), st.integers(0, 10**6))
def test_two_unlike_devices_get_their_proportion_within_one(
    first: float, second: float, total: int
) -> None:
    shares = optimal_shares(total, [first, second], [total, total])
    assert shares is not None
    proportion = total * Fraction(first) / (Fraction(first) + Fraction(second))
    assert abs(shares[0] - proportion) <= 1


@given(st.lists(st.floats(1e9, 1e15), min_size=1, max_size=30), st.integers(0, 10**6))
def test_nobody_gets_a_whole_sample_less_than_its_proportion(
    speeds: list[float], total: int
) -> None:
    shares = optimal_shares(total, speeds, [total] * len(speeds))
    assert shares is not None
    per_speed = total / sum(map(Fraction, speeds))
    assert all(
        share > per_speed * Fraction(speed) - 1 for share, speed in zip(shares, speeds, strict=True)
    )


def test_v100_and_p100_by_hand() -> None:
    # 8 x 15.7 + 8 x 9.3 = 200 TFLOP/s: a batch of 2,000 is 157 and 93 samples exactly.
    speeds = [15.7e12] * 8 + [9.3e12] * 8
    assert optimal_shares(2000, speeds, [2000] * 16) == (157,) * 8 + (93,) * 8
    # Each V100 holds 150: 56 samples move to the P100s, 7 each.
    assert optimal_shares(2000, speeds, [150] * 8 + [2000] * 8) == (150,) * 8 + (100,) * 8


def test_ten_thousand_devices() -> None:
    speeds = [1.0 + rank for rank in range(10_000)]
    total = sum(range(1, 10_001))  # the proportion is a whole number for each
    assert optimal_shares(total, speeds, [total] * 10_000) == tuple(range(1, 10_001))


@pytest.mark.parametrize(
    ("total", "caps", "minimum"),
    [(10, [4, 5], 0), (3, [5, 0], 1), (1, [5, 5], 1), (-1, [5], 0), (1, [], 0), (0, [-1], 0)],
)
def test_nothing_fits(total: int, caps: list[int], minimum: int) -> None:
    assert optimal_shares(total, [1.0] * len(caps), caps, minimum) is None


def test_no_devices_share_nothing() -> None:
    assert optimal_shares(0, [], []) == ()
    assert even_shares(0, 0, []) == ()
    assert even_shares(1, 0, []) is None


@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_speeds_must_be_positive_and_finite(speed: float) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (float says nan in its own words)
        optimal_shares(3, [1.0, speed], [3, 3])


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="2 speeds but 1 caps"):
        optimal_shares(1, [1.0, 2.0], [1])
    with pytest.raises(ValueError, match="2 devices but 1 caps"):
        even_shares(1, 2, [1])


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 20))
def test_even_shares_equal_brute_force(caps: list[int], total: int) -> None:
    even = [
        shares
        for shares in product(*(range(cap + 1) for cap in caps))
        if sum(shares) == total and max(shares) - min(shares) <= 1
    ]
    assert even_shares(total, len(caps), caps) == max(even, default=None)


@given(st.lists(st.integers(0, 1000), max_size=30))
def test_tiles_meet_and_cover(shares: list[int]) -> None:
    tiles = tile(sum(shares), shares)
    assert [stop - start for start, stop in tiles] == shares
    assert all(left[1] == right[0] for left, right in pairwise(tiles))
    assert not tiles or (tiles[0][0], tiles[-1][1]) == (0, sum(shares))


@pytest.mark.parametrize("shares", [[3, 4], [9, -1]])
def test_shares_that_do_not_tile(shares: list[int]) -> None:
    with pytest.raises(ValueError, match="do not tile 8"):
        tile(8, shares)
