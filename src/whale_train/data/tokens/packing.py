"""Arrange documents in samples of one length: the tokens of each sample and their places.

A sample is a list of segments. A segment is a run of consecutive tokens of one document.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from whale_train.data.tokens.stored_array import Int64Rows, Int64s

PackMode = Literal["concat", "best_fit"]


@dataclass(frozen=True, eq=False)
class Layout:
    """The segments of all samples.

    num_samples: number of samples.
    segments: function that returns the segments of a sample, int64 `[n, 2]` of (first token, number
        of tokens), in the order of the sample. They fill the sample from its beginning on.
    """

    num_samples: int
    segments: Callable[[int], Int64s]


def concatenated(ends: Int64Rows, length: int) -> Layout:
    """Return samples of `length` consecutive tokens, across the ends of documents.

    `ends` are the ends of the documents among all tokens, int64 `[documents]`, ascending. The
    tokens after the last full sample are left out.
    """
    total = int(ends[-1]) if len(ends) else 0

    def segments(sample: int) -> Int64s:
        start, stop = sample * length, (sample + 1) * length
        first = bisect_right(ends, start)
        last = bisect_right(ends, stop - 1, first)
        starts = np.concatenate([[start], ends[first:last]])
        return np.stack([starts, np.diff([*starts, stop])], axis=1).astype(np.int64)

    return Layout(total // length, segments)


def one_by_one(ends: Int64Rows, length: int) -> Layout:
    """Return a sample for each document: its first `length` tokens.

    `ends` are the ends of the documents among all tokens, int64 `[documents]`, ascending.
    """

    def segments(sample: int) -> Int64s:
        start = int(ends[sample - 1]) if sample else 0
        return np.array([[start, min(length, int(ends[sample]) - start)]], np.int64)

    return Layout(len(ends), segments)


def best_fit(ends: Int64s, length: int) -> tuple[Int64s, Int64s]:
    """Pack documents into samples of `length` tokens, without cutting those that fit.

    Longer documents are cut into pieces of `length` tokens and a rest. Pieces go, longest first,
    into the sample with the least room that is enough (best-fit decreasing: Ding et al., "Fewer
    Truncations Improve Language Modeling", ICML 2024, arXiv 2404.10830).

    Returns the segments of all samples, int64 `[segments, 2]` of (first token, number of tokens),
    and the index after each sample's last segment, int64 `[samples]`. Samples are in the order of
    their first tokens.
    """
    starts, lengths = _pieces(ends, length)
    samples = _assigned(lengths, length)
    # Segments in the order of the corpus within samples, and samples by their first segment.
    first = np.full(int(samples.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, samples, starts)
    order = np.lexsort((starts, first[samples]))
    segments = np.stack([starts[order], lengths[order]], axis=1)
    changes = np.flatnonzero(np.diff(first[samples][order])) + 1
    return segments, np.append(changes, len(segments)) if len(segments) else changes


def packed(segments: Int64Rows, stops: Int64Rows) -> Layout:
    """Return the layout of the samples that `best_fit` returned."""

    def of_sample(sample: int) -> Int64s:
        start = int(stops[sample - 1]) if sample else 0
        return np.asarray(segments[start : int(stops[sample])], np.int64)

    return Layout(len(stops), of_sample)


def _pieces(ends: Int64s, length: int) -> tuple[Int64s, Int64s]:
    """Return the first token and the number of tokens of all pieces of documents. No piece is
    empty."""
    ends = np.asarray(ends, np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(ends)]
    counts = -((starts - ends) // length)
    document = np.repeat(np.arange(len(ends)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = starts[document] + number * length
    return first, np.minimum(length, ends[document] - first)


def _assigned(lengths: Int64s, capacity: int) -> Int64s:
    """Return the sample of each piece, int64 `[pieces]`, by best-fit decreasing.

    Pieces of one length are placed together: the sample with the least room that is enough stays
    that sample until no further piece of the length fits.
    """
    assigned = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    bounds = np.flatnonzero(np.diff(lengths[by_length])) + 1
    with_room: dict[int, list[Int64s]] = {}  # samples by the room that is left in them
    num_samples = 0
    for group in np.split(by_length, bounds) if len(lengths) else ():
        size = int(lengths[group[0]])
        for room in sorted(x for x in with_room if x >= size):
            if not len(group):
                break
            group = _placed(group, with_room.pop(room), room, size, assigned, with_room)
        if len(group):
            count = -(-len(group) // (capacity // size))
            new = np.arange(num_samples, num_samples + count)
            num_samples += count
            _placed(group, [new], capacity, size, assigned, with_room)
    return assigned


def _placed(
    group: Int64s,
    samples: Sequence[Int64s],
    room: int,
    size: int,
    assigned: Int64s,
    with_room: dict[int, list[Int64s]],
) -> Int64s:
    """Place pieces of `size` tokens into `samples`, which all have `room`, and return the pieces
    that do not fit.

    Samples with room left are added to `with_room`.
    """
    candidates = np.concatenate(samples)
    per_sample = room // size
    placed = min(len(group), per_sample * len(candidates))
    assigned[group[:placed]] = np.repeat(candidates, per_sample)[:placed]
    full, rest = divmod(placed, per_sample)
    for part, left in (
        (candidates[:full], room - per_sample * size),
        (candidates[full : full + 1], room - rest * size) if rest else (candidates[:0], 0),
        (candidates[full + bool(rest) :], room),
    ):
        if len(part) and left:
            with_room.setdefault(left, []).append(part)
    return group[placed:]
