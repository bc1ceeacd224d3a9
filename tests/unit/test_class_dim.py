"""The dimension of logits that is the classes: as torch has it, as language models do, as said."""

import pytest

from whale_train.models.class_dim import FIRST, LAST, ClassDim, class_dim

Shape = tuple[int, ...]


@pytest.mark.parametrize(
    ("logits", "labels", "expected"),
    [
        ((4, 5), (4,), LAST),
        ((4, 5), (4, 1), LAST),
        ((4, 4), (4,), LAST),
        ((4, 7, 5), (4, 7), LAST),  # a sequence
        ((28, 5), (4, 7), LAST),  # a sequence that the model flattened
        ((4, 7, 5), (28,), LAST),
        ((4, 1, 5), (4,), LAST),
        ((4, 5, 7), (4, 7), FIRST),
        ((4, 5, 8, 6), (4, 8, 6), FIRST),
        ((4, 8, 8, 6), (4, 8, 6), FIRST),
        ((4, 5, 8, 5), (4, 8, 5), FIRST),  # as many classes as the width
        ((4, 5, 8, 5), (4, 1, 8, 5), FIRST),
        ((4, 5, 8, 6), (4, 48), FIRST),
        ((4, 8, 6, 5), (4, 8, 6), LAST),
        ((4, 8, 6, 8), (4, 8, 6), LAST),
        ((4, 8, 6, 8), (4, 8, 6, 1), LAST),
        ((4, 7, 1, 7), (4, 7, 1), LAST),
        ((4, 7, 1, 7), (4, 1, 7), FIRST),
        ((4, 5, 2, 3, 6), (4, 2, 3, 6), FIRST),
        ((4, 2, 3, 6, 5), (4, 2, 3, 6), LAST),
        ((1, 5, 8, 5), (1, 8, 5), FIRST),  # whatever the batch is
        ((5, 5, 8, 5), (5, 8, 5), FIRST),
    ],
)
def test_the_shapes_say_it(logits: Shape, labels: Shape, expected: int) -> None:
    assert class_dim(logits, labels, None) == ClassDim(expected)


@pytest.mark.parametrize(
    ("logits", "labels", "expected"),
    [
        ((4, 7, 7), (4, 7), LAST),
        ((4, 7, 7), (28,), LAST),
        ((4, 8, 8, 8), (4, 8, 8), FIRST),
        ((4, 5, 8, 5), (4, 40), FIRST),
        ((4, 2, 2, 2, 2), (4, 2, 2, 2), FIRST),
    ],
)
def test_both_are_possible(logits: Shape, labels: Shape, expected: int) -> None:
    assert class_dim(logits, labels, None) == ClassDim(expected, is_open=True)
    for wanted in (FIRST, LAST):
        assert class_dim(logits, labels, wanted) == ClassDim(wanted)


@pytest.mark.parametrize(
    ("logits", "labels", "wanted"),
    [
        ((4, 5), (3,), None),
        ((4, 5), (4, 5), None),
        ((4, 5, 7), (4,), None),
        ((4, 5, 7), (4, 6), None),
        ((4, 5, 7), (4, 7), LAST),
        ((4, 7, 5), (4, 7), FIRST),
        ((4, 5, 8, 6), (4, 8), None),
    ],
)
def test_too_few_labels_or_too_many(logits: Shape, labels: Shape, wanted: int | None) -> None:
    assert class_dim(logits, labels, wanted) is None
