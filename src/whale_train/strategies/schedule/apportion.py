"""Integer apportionment: samples divided among devices that differ in speed and memory.

Solves hardware-aware balancing: integer shares within the devices' caps, whose slowest device
finishes as early as possible. All arithmetic is on integers, so the result is exact and the same
everywhere. The caller decides what a speed and a cap mean (FLOP/s, a stage's time, samples that
fit), and what a result of None means.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import gcd, lcm

_SAME = 1.05  # ratio up to which fixed parts count as equal: the error of predictions
_ROUNDS = 3  # enough for shares to settle: the fixed part of a step is small


def apportion(
    balance: str, total: int, speeds: Sequence[float], caps: Sequence[int], minimum: int = 0
) -> tuple[int, ...] | None:
    """Return integer shares of `total`, each at least `minimum` and at most its cap; None where no
    such shares exist.

    The shares are proportional to `speeds` (`balance` "hardware") or equal to within one ("even").
    """
    if balance == "even":
        shares = even_shares(total, len(caps), caps)
        return None if shares is None or min(shares, default=minimum) < minimum else shares
    return optimal_shares(total, speeds, caps, minimum)


def apportion_by_time(
    balance: str,
    total: int,
    times: Sequence[Callable[[int], float]],
    caps: Sequence[int],
    minimum: int = 0,
) -> tuple[int, ...] | None:
    """Return integer shares of `total` as `apportion` does, for members that take `times[i](n)`
    seconds for n samples.

    All members finish together, as nearly as whole samples allow. Members with the same function
    are priced once.

    Around a share, a time is taken to be linear: a fixed part, and one that grows with the samples.
    Starting from equal shares, each round takes the shares whose lines end together; the best of a
    few rounds is returned.
    """
    count = len(times)
    if balance == "even" or count < 2:
        return apportion(balance, total, [1.0] * count, caps, minimum)
    if min(caps) < minimum:
        return None
    shares: Sequence[int] = [min(cap, max(1, total // count)) for cap in caps]
    best: tuple[float, tuple[int, ...]] | None = None
    for _ in range(_ROUNDS):
        members = [*zip(times, shares, strict=True)]
        of_unlike = {member: _line(*member) for member in dict.fromkeys(members)}
        lines = [of_unlike[member] for member in members]
        next_shares = apportion(balance, total, _ending_together(total, lines), caps, minimum)
        if next_shares is None:
            return None
        slowest = max(time(n) for time, n in set(zip(times, next_shares, strict=True)))
        if best is None or slowest < best[0]:
            best = (slowest, next_shares)
        if next_shares == tuple(shares):
            break
        shares = next_shares
    assert best is not None
    return best[1]


def _line(time: Callable[[int], float], samples: int) -> tuple[float, float]:
    """Return the (fixed, per sample) seconds of the line through the times of `samples` and of
    twice as many."""
    samples = max(samples, 1)
    once, twice = time(samples), time(2 * samples)
    per_sample = max((twice - once) / samples, 1e-30)  # no division by 0 where they take no time
    return max(once - per_sample * samples, 0.0), per_sample


def _ending_together(total: int, lines: Sequence[tuple[float, float]]) -> list[float]:
    """Return the fractional shares of `total` with which members of (fixed, per sample) seconds all
    finish together.

    A member whose fixed part alone takes longer gets next to nothing. Fixed parts that differ by
    less than a prediction's error count as equal.
    """
    fixed = [start for start, _ in lines]
    if max(fixed) <= _SAME * min(fixed):
        return [1 / per_sample for _, per_sample in lines]
    rate = sum(1 / per_sample for _, per_sample in lines)
    end = (total + sum(start / per_sample for start, per_sample in lines)) / rate
    return [max((end - start) / per_sample, 1e-6) for start, per_sample in lines]


def most_shared(balance: str, caps: Sequence[int]) -> int:
    """Return the largest total that can be divided within `caps`. Under `balance` "even", shares
    are equal to within one."""
    if balance == "even":
        lowest = min(caps)
        return lowest * len(caps) + sum(cap > lowest for cap in caps)
    return sum(caps)


def optimal_shares(
    total: int, speeds: Sequence[float], caps: Sequence[int], minimum: int = 0
) -> tuple[int, ...] | None:
    """Return the integer shares of `total` that minimise the step time, max of share[i] / speed[i].

    `speeds` (samples/s in any common unit) must be positive and finite; minimum <= share[i] <=
    caps[i] and the shares sum to `total`. Among shares of equal step time, the result is the one
    whose times, sorted from slowest to fastest, are lexicographically smallest; among equally fast
    devices, the lower rank gets more. Returns None when no shares satisfy the bounds: a cap is
    below `minimum`, or `total` is outside [len(caps) * minimum, sum(caps)]. Raises ValueError for a
    speed that is not positive and finite, and for lengths that differ.

    Giving each next sample to the device that would finish it first (ties: the fastest device, then
    the lowest rank) is optimal, by exchange: moving a sample to a later finish never makes the
    sorted times smaller. The samples that finish by the *continuous* optimum are given at once;
    fewer than one per device remain, and they go through a heap. O(n log n), whatever `total` is.
    Whale's Algorithm 1 (USENIX ATC 2022) moves load between devices instead, can leave a device
    over its memory, and cannot detect that nothing fits.
    """
    if len(speeds) != len(caps):
        raise ValueError(f"{len(speeds)} speeds but {len(caps)} caps")
    if any(cap < minimum for cap in caps) or not len(caps) * minimum <= total <= sum(caps):
        return None
    if not caps:
        return ()
    rates = _integers_in_proportion(speeds)
    # Fractions k / rate are compared as k * scale // rate. Unequal fractions differ by at least
    # 1 / max(rates)^2, so they stay apart and equal ones stay equal.
    scale = max(rates) ** 2
    time, per = _continuous_optimum(total, rates, caps, minimum, scale)
    shares = [
        min(cap, max(minimum, time * rate // per)) for rate, cap in zip(rates, caps, strict=True)
    ]
    heap = [
        ((share + 1) * scale // rate, -rate, rank)
        for rank, (share, rate, cap) in enumerate(zip(shares, rates, caps, strict=True))
        if share < cap
    ]
    heapq.heapify(heap)
    for _ in range(total - sum(shares)):
        _, negative_rate, rank = heap[0]
        shares[rank] += 1
        if shares[rank] < caps[rank]:
            finish = (shares[rank] + 1) * scale // rates[rank]
            heapq.heapreplace(heap, (finish, negative_rate, rank))
        else:
            heapq.heappop(heap)
    return tuple(shares)


def even_shares(total: int, count: int, caps: Sequence[int]) -> tuple[int, ...] | None:
    """Return shares of `total` that are equal to within one, whatever the speeds (`balance: even`).

    The larger shares go to the lowest ranks whose caps allow it. Returns None where some device
    cannot hold its share. Raises ValueError unless there are `count` caps.
    """
    if len(caps) != count:
        raise ValueError(f"{count} devices but {len(caps)} caps")
    if count == 0:
        return () if total == 0 else None
    share, left = divmod(total, count)
    if total < 0 or min(caps) < share:
        return None
    shares = []
    for cap in caps:
        extra = 1 if left and cap > share else 0
        left -= extra
        shares.append(share + extra)
    return None if left else tuple(shares)


def tile(total: int, shares: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the [start, stop) of each share, laid end to end over [0, total).

    Raises ValueError for a negative share, or shares that do not sum to `total`.
    """
    if any(share < 0 for share in shares) or sum(shares) != total:
        raise ValueError(f"shares {tuple(shares)} do not tile {total}")
    stops = accumulate(shares)
    return tuple((stop - share, stop) for share, stop in zip(shares, stops, strict=True))


def _integers_in_proportion(speeds: Sequence[float]) -> list[int]:
    """Return the smallest integers in exactly the ratios of `speeds`."""
    try:
        ratios = [speed.as_integer_ratio() for speed in speeds]
    except OverflowError as error:
        raise ValueError("speeds must be finite") from error
    if any(numerator <= 0 for numerator, _ in ratios):
        raise ValueError("speeds must be positive")
    common = lcm(*(denominator for _, denominator in ratios))
    integers = [numerator * (common // denominator) for numerator, denominator in ratios]
    divisor = gcd(*integers)
    return [number // divisor for number in integers]


def _continuous_optimum(
    total: int, rates: Sequence[int], caps: Sequence[int], minimum: int, scale: int
) -> tuple[int, int]:
    """Return, as a fraction, the time t at which exactly `total` is done if samples could be
    divided.

    At t, the sum over i of t * rates[i], clamped to [minimum, caps[i]], is `total`. The sum is
    linear between the times at which a device passes its minimum or reaches its cap. These times
    are visited in order until the sum reaches `total`.
    """
    events = sorted(
        (bound * scale // rate, bound, rate, starts)
        for rate, cap in zip(rates, caps, strict=True)
        for bound, starts in ((minimum, True), (cap, False))
    )
    fixed, slope = len(rates) * minimum, 0
    for _, bound, rate, starts in events:
        if slope * bound >= (total - fixed) * rate:
            # With slope 0 the sum stands still at `total`; any time up to this event does.
            return (total - fixed, slope) if slope else (bound, rate)
        fixed += -bound if starts else bound
        slope += rate if starts else -rate
    raise AssertionError("total is above the sum of the caps")
