"""Documents laid out in samples of one length, and samples of several sources in proportions."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pairs import examples

from whale_train.data.dataset import Indices, RowDataset, hold_back
from whale_train.data.mixture import BLOCK, MixedDataset, shares_of
from whale_train.data.order import samples_at
from whale_train.data.tokens import stored_array
from whale_train.data.tokens.packing import Layout, best_fit, concatenated, one_by_one, packed
from whale_train.data.tokens.stored_array import StoredArray, differences
from whale_train.strategies.graph.operation_graph import InputField

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=40)


def tokens_of(layout: Layout) -> list[list[int]]:
    """The tokens of every sample, numbered by their places in the corpus."""
    return [
        [token for start, count in layout.segments(i) for token in range(start, start + count)]
        for i in range(layout.num_samples)
    ]


@given(LENGTHS, st.integers(2, 20))
@settings(max_examples=examples(50))
def test_concatenated_documents_are_cut_every_length(lengths: list[int], length: int) -> None:
    ends = np.cumsum(lengths)
    layout = concatenated(ends, length)
    whole = ends[-1] // length
    assert tokens_of(layout) == np.arange(whole * length).reshape(whole, length).tolist()
    cuts = {0, *ends.tolist()}
    for sample in range(layout.num_samples):
        for number, (start, _) in enumerate(layout.segments(sample)):
            assert (start in cuts) or number == 0


def bins_of_best_fit(sizes: list[int], capacity: int) -> int:
    """How many bins best-fit decreasing takes, placing one item after another."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [(room, i) for i, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting)[1]] -= size
        else:
            rooms.append(capacity - size)
    return len(rooms)


@given(LENGTHS, st.integers(2, 20))
@settings(max_examples=examples(100))
def test_best_fit_packs_every_token_once(lengths: list[int], length: int) -> None:
    ends = np.cumsum(lengths)
    layout = packed(*best_fit(ends, length))
    tokens = tokens_of(layout)
    assert sorted(token for sample in tokens for token in sample) == list(range(ends[-1]))
    assert all(len(sample) <= length for sample in tokens)
    firsts = [sample[0] for sample in tokens]
    assert firsts == sorted(firsts)
    # Documents that fit are whole: a segment is a document, or a piece of a longer one.
    for sample in range(layout.num_samples):
        for start, count in layout.segments(sample):
            document = int(np.searchsorted(ends, start, side="right"))
            assert count == min(length, ends[document] - start)
    pieces = [min(length, size - at) for size in lengths for at in range(0, size, length)]
    assert layout.num_samples == bins_of_best_fit(pieces, length)


def test_one_by_one_takes_the_first_tokens() -> None:
    assert tokens_of(one_by_one(np.array([3, 4, 10]), 4)) == [[0, 1, 2], [3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((1, 1), (500, 500)),
        ((1, 2), (333, 667)),
        ((1, 1, 1), (334, 333, 333)),
        ((1, 9999), (0, 1000)),
    ],
)
def test_shares_are_of_a_thousand(weights: tuple[float, ...], shares: tuple[int, ...]) -> None:
    assert shares_of(weights) == shares


def rows(first: int, count: int) -> RowDataset:
    """Samples that hold their own numbers, from `first` on."""

    def read(indices: Indices, draws: Indices) -> dict[str, Indices]:
        return {"x": first + indices, "draw": draws}

    fields = (InputField("x", (), "int64"), InputField("draw", (), "int64"))
    return RowDataset(fields, hold_back(count, 0.0), read)


@pytest.mark.parametrize("shuffle", [True, False])
def test_sources_have_their_shares_and_all_their_samples(shuffle: bool) -> None:
    mixture = MixedDataset((rows(0, 7), rows(100, 50), rows(1000, 3)), (300, 690, 10))
    assert mixture.num_samples == 60
    indices = samples_at(mixture, 0, 2 * BLOCK, 5, shuffle)
    values = mixture.samples(indices, np.arange(2 * BLOCK))
    assert values["draw"].tolist() == list(range(2 * BLOCK))
    of_source = np.digitize(values["x"], [100, 1000])
    for block in of_source.reshape(2, BLOCK):
        assert np.bincount(block).tolist() == [300, 690, 10]
    for number, (first, count) in enumerate([(0, 7), (100, 50), (1000, 3)]):
        own = values["x"][of_source == number]
        passes = [sorted(own[at : at + count]) for at in range(0, len(own) - count + 1, count)]
        assert all(x == list(range(first, first + count)) for x in passes)
    # From any place on, whatever the batch.
    parts = [samples_at(mixture, at, 40, 5, shuffle) for at in range(0, 2 * BLOCK, 40)]
    assert np.concatenate(parts).tolist() == indices.tolist()


def test_array_in_a_file_reads_as_the_array_does(tmp_path: Path) -> None:
    ends = np.cumsum(np.arange(1, 9))
    np.save(tmp_path / "ends.npy", ends)
    pairs = np.arange(12).reshape(6, 2)
    np.save(tmp_path / "pairs.npy", pairs)
    np.save(tmp_path / "floats.npy", np.zeros(3))
    stored = StoredArray.of_npy(tmp_path / "ends.npy")
    assert [int(x) for x in stored] == ends.tolist()
    assert stored[-1] == ends[-1]
    np.testing.assert_array_equal(stored[2:5], ends[2:5])
    np.testing.assert_array_equal(StoredArray.of_npy(tmp_path / "pairs.npy")[1:4], pairs[1:4])
    with pytest.raises(IndexError):
        stored[8]
    with pytest.raises(ValueError, match="float64"):
        StoredArray.of_npy(tmp_path / "floats.npy")


def test_differences_of_an_array_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_array, "_CHUNK", 3)
    ends = np.array([2, 3, 9, 10, 30, 31, 40])
    assert np.concatenate([*differences(ends)]).tolist() == [2, 1, 6, 1, 20, 1, 9]
    assert [*differences(ends[:0])] == []
