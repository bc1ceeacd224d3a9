"""The global order: bits, permutations, steps, shares, and the rows that are held back."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pairs import examples

from whale_train.data.dataset import hold_back
from whale_train.data.order import step_indices
from whale_train.data.permutation import permute
from whale_train.data.random_bits import nearly_normal, random_bits, stream_key

SIZES = st.integers(1, 300)
SEEDS = st.integers(0, 2**63)


def test_bits_are_splitmix64() -> None:
    """The published first outputs of SplitMix64 for the seed 1234567."""
    bits = random_bits(np.array([1234567], np.uint64), np.arange(5))
    assert bits.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_streams_differ_by_name_and_seed() -> None:
    keys = [stream_key(name, seed)[0] for name in ("a", "b") for seed in range(3)]
    assert len(set(keys)) == 6


def test_nearly_normal_has_mean_0_and_deviation_1() -> None:
    values = nearly_normal(random_bits(stream_key("test", 0), np.arange(400_000)))
    assert values.dtype == np.float32
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 1) < 0.01
    # A normal variable exceeds 1 deviation 31.7% of the time, 2 deviations 4.6%.
    assert abs((np.abs(values) > 1).mean() - 0.317) < 0.02
    assert abs((np.abs(values) > 2).mean() - 0.046) < 0.01


def test_nearly_normal_sums_all_four_parts() -> None:
    ends = np.array([0, 2**64 - 1, 0xFFFF, 0xFFFF << 16, 0xFFFF << 32, 0xFFFF << 48], np.uint64)
    low, high, *single = nearly_normal(ends).tolist()
    assert low == pytest.approx(-(12**0.5), rel=1e-4)
    assert high == pytest.approx(12**0.5, rel=1e-4)
    assert single == pytest.approx([-(12**0.5) / 2] * 4, rel=1e-4)


@given(SIZES, SEEDS)
def test_permute_is_a_permutation(size: int, seed: int) -> None:
    permuted = permute(np.arange(size), size, stream_key("test", seed))
    assert sorted(permuted.tolist()) == list(range(size))


def test_permute_of_a_large_set_needs_no_table() -> None:
    size = 10**15 + 37
    permuted = permute(np.arange(10_000), size, stream_key("test", 0))
    assert len(set(permuted.tolist())) == 10_000
    assert permuted.min() >= 0
    assert permuted.max() < size
    assert abs(permuted.mean() / size - 0.5) < 0.02


def test_permute_takes_each_index_through_its_own_permutation() -> None:
    keys = np.concatenate([stream_key("test", seed) for seed in range(3)])
    together = permute(np.full(3, 5), 1000, keys)
    alone = [permute(np.array([5]), 1000, key)[0] for key in np.split(keys, 3)]
    assert together.tolist() == alone
    assert len(set(alone)) == 3


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_permutations_of_a_small_set_occur_about_equally(size: int) -> None:
    num_permutations = int(np.prod(np.arange(1, size + 1)))
    draws = 60 * num_permutations
    keys = np.concatenate([stream_key("test", seed) for seed in range(draws)])
    permuted = permute(np.tile(np.arange(size), draws), size, np.repeat(keys, size))
    seen = Counter(map(tuple, permuted.reshape(draws, size).tolist()))
    assert len(seen) == num_permutations
    # 60 expected of each; binomial deviation is below 8.
    assert min(seen.values()) > 20
    assert max(seen.values()) < 120


def test_neighbours_are_not_kept_together() -> None:
    permuted = permute(np.arange(10_000), 10_000, stream_key("test", 0))
    assert abs(np.corrcoef(np.arange(10_000), permuted)[0, 1]) < 0.05
    # Two independent places are on average a third of the set apart.
    assert abs(np.abs(np.diff(permuted)).mean() - 10_000 / 3) < 200


@settings(max_examples=examples(50))
@given(
    num_samples=st.integers(1, 60),
    global_batch=st.integers(1, 100),
    seed=SEEDS,
    shuffle=st.booleans(),
)
def test_each_epoch_takes_every_sample_once(
    num_samples: int, global_batch: int, seed: int, shuffle: bool
) -> None:
    num_steps = -(-3 * num_samples // global_batch)
    steps = [
        step_indices(num_samples, global_batch, step, seed, shuffle) for step in range(num_steps)
    ]
    assert all(step.dtype == np.int64 and step.shape == (global_batch,) for step in steps)
    order = np.concatenate(steps)
    for epoch in range(3):
        taken = order[epoch * num_samples : (epoch + 1) * num_samples].tolist()
        assert sorted(taken) == list(range(num_samples))
        if not shuffle:
            assert taken == list(range(num_samples))


@given(batches=st.sampled_from([(12, 4), (6, 3), (24, 1)]), seed=SEEDS)
def test_the_order_does_not_depend_on_how_it_is_cut(batches: tuple[int, int], seed: int) -> None:
    whole, part = batches
    large = step_indices(31, whole, 5, seed, True)
    first = 5 * whole // part
    small = [step_indices(31, part, first + i, seed, True) for i in range(whole // part)]
    assert large.tolist() == np.concatenate(small).tolist()


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    epochs = [
        tuple(step_indices(100, 100, step, seed, True).tolist())
        for seed in range(4)
        for step in range(4)
    ]
    assert len(set(epochs)) == 16


def test_the_order_stays_what_it_is() -> None:
    """Golden: a resumed run must meet the order it was started with."""
    assert step_indices(10, 8, 0, 0, True).tolist() == [7, 2, 8, 6, 1, 0, 9, 4]
    assert step_indices(10, 8, 1, 0, True).tolist() == [3, 5, 5, 8, 4, 1, 3, 0]
    assert step_indices(10**9, 3, 10**6, 7, True).tolist() == [443697809, 582060346, 43052850]


@given(st.integers(1, 200), st.floats(0, 1, exclude_max=True))
def test_held_back_rows_and_training_rows_tile_the_rows(num_rows: int, fraction: float) -> None:
    held = hold_back(num_rows, fraction)
    training = held.training_rows(np.arange(num_rows - len(held.rows))).tolist()
    assert training == sorted(training)
    assert sorted([*training, *held.rows.tolist()]) == list(range(num_rows))
    assert training
    assert bool(len(held.rows)) == (fraction > 0 and num_rows > 1)


def test_held_back_rows_are_spread_and_of_the_number_asked_for() -> None:
    rows = hold_back(10_000, 0.1).rows
    assert len(rows) == 1000
    quarters = np.bincount(rows // 2500, minlength=4)
    assert quarters.min() > 200
