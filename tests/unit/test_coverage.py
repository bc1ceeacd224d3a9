"""Counting of samples by places, against counts made one by one."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_train.data.coverage import (
    Places,
    SampleOrder,
    missing_places,
    not_tiled,
    repeated_places,
    taken_twice,
)
from whale_train.data.mixture import BLOCK, MixedOrder

INTERVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda x: (x[0], x[0] + x[1])), max_size=5
)


def members(intervals: list[Places]) -> Counter[int]:
    return Counter(place for start, stop in intervals for place in range(start, stop))


@given(INTERVALS, st.integers(0, 40))
def test_places_that_are_missing_or_taken_again(intervals: list[Places], stop: int) -> None:
    counts = members(intervals)
    assert set(members(missing_places(intervals, stop))) == set(range(stop)) - set(counts)
    assert set(members(repeated_places(intervals))) == {x for x, n in counts.items() if n > 1}


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_every_sample_once(shuffle: bool) -> None:
    order = SampleOrder(37, seed=3, shuffle=shuffle)
    samples, epochs = order.samples((20, 100)), order.epochs((20, 100))
    assert epochs.tolist() == [0] * 17 + [1] * 37 + [2] * 26
    assert sorted(samples[17:54]) == list(range(37))
    assert order.taken_before(100) == (100,)
    assert taken_twice(order, 100) == ()


def test_sources_are_counted_each() -> None:
    order = SampleOrder(60, 5, True, MixedOrder((7, 50, 3), (300, 690, 10)))
    stop = 2 * BLOCK + 137
    samples, epochs = order.samples((0, stop)), order.epochs((0, stop))
    sources = np.digitize(samples, [7, 57])
    assert order.taken_before(stop) == tuple(np.bincount(sources).tolist())
    for number, (first, size) in enumerate([(0, 7), (7, 50), (57, 3)]):
        own = sources == number
        assert epochs[own].tolist() == [i // size for i in range(int(own.sum()))]
        assert set(samples[own & (epochs == 0)]) == set(range(first, first + size))
    assert taken_twice(order, stop) == ()


def test_a_thousand_million_samples_need_no_table() -> None:
    order = SampleOrder(10**9, seed=1, shuffle=True)
    stop = 3 * 10**9 + 5
    assert order.taken_before(stop) == (stop,)
    assert order.epochs((3 * 10**9 - 1, stop)).tolist() == [2, 3, 3, 3, 3, 3]
    assert len(set(order.samples((stop - 1000, stop)).tolist())) == 1000


def test_an_order_that_takes_a_sample_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    order = SampleOrder(10, seed=1, shuffle=False)
    monkeypatch.setattr(SampleOrder, "samples", lambda _, places: np.arange(*places) % 10 // 2 * 2)
    assert taken_twice(order, 20) == (0, 2, 4, 6, 8)


@pytest.mark.parametrize(
    ("replicas", "wrong"),
    [
        ([[(0, 3)], [(3, 8)]], ()),
        ([[(0, 3), (0, 3)], [(3, 8), (3, 8)]], ()),  # copies of two ranks each
        ([[(0, 3)], [(4, 8)]], ((3, 4),)),
        ([[(0, 4)], [(3, 8)]], ((3, 4),)),
        ([[(0, 4)], [(4, 9)]], ((8, 9),)),
    ],
)
def test_shares_of_a_batch(replicas: list[list[Places]], wrong: tuple[Places, ...]) -> None:
    assert not_tiled(replicas, 8) == wrong
