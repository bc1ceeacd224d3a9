"""Quantities and lists as people read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_train.quantities import (
    fold_modules,
    fold_numbers,
    in_bytes,
    in_count,
    in_rate,
    in_seconds,
)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (in_bytes(0), "0 B"),
        (in_bytes(999), "999 B"),
        (in_bytes(999_600), "1.00 MB"),
        (in_bytes(32e9), "32.0 GB"),
        (in_bytes(1.234e12), "1.23 TB"),
        (in_count(999), "999"),
        (in_count(51_300_000), "51.3 M"),
        (in_count(9_996), "10.0 k"),
        (in_seconds(0.00002), "20.0 us"),
        (in_seconds(0.0197), "19.7 ms"),
        (in_seconds(0.9996), "1.00 s"),
        (in_seconds(120), "120 s"),
        (in_rate(0.5), "0.50"),
        (in_rate(1939.4), "1,939"),
        (fold_numbers([3, 1, 2, 9]), "1-3, 9"),
        (fold_numbers([]), ""),
        (fold_numbers([0, 2, 4, 6, 8]), "0, 2, 4, 6, ... (5 in all)"),
        (fold_modules(["wte", "h.0", "h.1", "h.2", "ln_f"]), "wte, h.0-2, ln_f"),
        (fold_modules(["h.0.attn", "h.1.attn", "h.3.attn"]), "h.0-1.attn, h.3.attn"),
        (fold_modules(["a.1", "b.2"]), "a.1, b.2"),
        (fold_modules([""]), "the whole model"),
        (fold_modules(["a", "b", "c", "d", "e"]), "a, b, c, ..., e (5 modules)"),
    ],
)
def test_quantities_and_folds(shown: str, expected: str) -> None:
    assert shown == expected


@given(st.sets(st.integers(0, 300)))
def test_folded_numbers_name_each_number_once(numbers: set[int]) -> None:
    named: list[int] = []
    for run in filter(None, fold_numbers(numbers, most=1000).split(", ")):
        first, _, last = run.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(numbers)
