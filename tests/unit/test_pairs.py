"""The cases a run of the tests takes show every pair of values that all of them show."""

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st
from tests.pairs import covering, pairs


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5))
def test_every_pair_of_a_product_is_there(sizes: list[int]) -> None:
    rows = list(product(*(range(size) for size in sizes)))
    chosen = covering(rows, lambda row: pairs(*row), full=False)
    for (i, first), (j, second) in combinations(enumerate(sizes), 2):
        wanted = set(product(range(first), range(second)))
        assert {(row[i], row[j]) for row in chosen} == wanted
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= set(rows)


def test_no_row_is_there_for_nothing() -> None:
    """Nine rows are the fewest for three axes of three, in an orthogonal array."""
    rows = list(product(range(3), repeat=3))
    assert 9 <= len(covering(rows, lambda row: pairs(*row), full=False)) <= 11
    assert covering(rows, lambda row: pairs(*row), full=False) == covering(
        rows, lambda row: pairs(*row), full=False
    )


def test_rows_that_are_no_product_keep_their_pairs() -> None:
    rows = [("a", 1, "x"), ("a", 1, "y"), ("a", 2, "x"), ("b", 2, "y"), ("b", 2, "x")]
    chosen = covering(rows, lambda row: pairs(*row), full=False)
    # (1, x) is only in the first, (1, y) in the second, and so on.
    assert chosen == rows
    shown = {pair for row in chosen for pair in pairs(*row)}
    assert shown == {pair for row in rows for pair in pairs(*row)}


def test_what_may_be_combined_freely_is_combined_evenly() -> None:
    rows = list(product(range(12), "abc"))
    chosen = covering(rows, lambda row: {("number", row[0]), ("letter", row[1])}, full=False)
    assert [row[0] for row in chosen] == list(range(12))
    assert {letter: sum(row[1] == letter for row in chosen) for letter in "abc"} == {
        "a": 4,
        "b": 4,
        "c": 4,
    }


def test_a_full_run_takes_all() -> None:
    rows = list(product(range(4), repeat=3))
    assert covering(rows, lambda row: pairs(*row), full=True) == rows
