"""Estimate the seconds of a pipeline, and the micro-batches its stages have in flight, without a
schedule.

Each stage starts with the first micro-batch it receives, is busy with all of them, and its last
gradients pass through the stages before it. The pipeline takes as long as the longest of these
paths. After Narayanan et al. 2021 (arXiv 2104.04473, section 2.2) and Qi et al. 2023 (arXiv
2401.10241, section 2), for stages that differ.
"""

from collections.abc import Sequence


def pipeline_s(
    schedule: str,
    times: Sequence[tuple[float, float, float]],
    copies: Sequence[int],
    in_flight: Sequence[int],
    sent: Sequence[float],
    pieces: int,
) -> float:
    """Return the seconds of a pipeline: the time at which its last stage is done.

    times: for each stage, seconds of a micro-batch (forward, gradients of inputs, of weights).
    copies: for each stage, its copies, which take turns.
    in_flight: for each stage, the most micro-batches that a copy has in flight.
    sent: for each stage but the last, seconds to send a micro-batch to the next stage.
    pieces: number of micro-batches.
    """
    if schedule == "interleaved_1f1b":  # the same work, half of each wait, and twice the sends
        busy = [
            -(-pieces // n) * sum(stage_times) for n, stage_times in zip(copies, times, strict=True)
        ]
        slowest = max(range(len(times)), key=busy.__getitem__)
        others = sum(
            sum(stage_times) for number, stage_times in enumerate(times) if number != slowest
        )
        return busy[slowest] + others / 2 + 4 * sum(sent)
    waits = schedule != "zero_bubble"  # stages wait for the weight gradients of later stages
    backs = [of_input + (of_weight if waits else 0.0) for _, of_input, of_weight in times]
    after, behind = [0.0], 0.0  # from the end of a stage's forward to its backward
    for number in range(len(times) - 1, 0, -1):
        behind += times[number][0] + backs[number] + 2 * sent[number - 1]
        after.append(behind)
    after.reverse()
    deferred = max(in_flight)  # most micro-batches whose weight gradients wait
    fill = drain = pace = longest = 0.0
    for number, (forward, _, of_weight) in enumerate(times):
        back, own = backs[number], -(-pieces // copies[number])
        flight = max(1, min(own, in_flight[number]))
        weights = 0.0 if waits else own * of_weight
        last = fill + (min(copies[number], pieces) - 1) * pace  # when its last copy begins
        ends = drain if waits else 0.0
        # Micro-batches whose weight gradients cannot wait.
        early = 0 if waits else max(0, own - deferred)
        trip = forward + after[number]
        longest = max(
            longest,
            last + own * (forward + back) + early * of_weight + drain,
            last + own * (forward + back) + weights + ends,
            fill + max(flight * forward, trip) + own * back + (own - flight) * forward
            + weights + ends,
            fill + own / flight * (trip + back) + ends,
        )  # fmt: skip
        if number < len(sent):
            fill += forward + sent[number]
            drain += back + sent[number]
        pace = max(pace, forward / copies[number])
    return longest


def in_flight_of(schedule: str, copies: Sequence[int], number: int, pieces: int) -> int:
    """Return the most micro-batches that a copy of stage `number` has in flight.

    They are counted in units of all chunks that the copy holds (see `list_scheduling.py`). `copies`
    are the copies of each stage, and `pieces` is the number of micro-batches.
    """
    own = copies[number]
    later = sum(copies[number + 1 :])
    most = -(-pieces // own)
    if schedule == "gpipe":
        return most
    if schedule == "interleaved_1f1b":
        return min(most, -(-(2 * later + len(copies) + 1) // (2 * own)))
    return min(most, 1 + -(-later // own))
