"""The dimension of a model's logits that is the classes, by the shapes of logits and labels.

`torch.nn.functional.cross_entropy` takes logits [batch, classes, ...] with labels [batch, ...];
language models return [batch, sequence, classes] with labels [batch, sequence]. Both are read, each
where the shapes say that it is meant.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from whale_train.strategies.graph.operation_graph import Logits

FIRST, LAST = 1, -1  # what `model.class_dim` may be


@dataclass(frozen=True)
class ClassDim:
    """Dimension of the classes in logits.

    dim: 1 or -1.
    is_open: whether the shapes fit the other dimension as well.
    """

    dim: int
    is_open: bool = False


def class_dim(logits: Sequence[Any], labels: Sequence[Any], wanted: int | None) -> ClassDim | None:
    """Return the dimension of the classes, or None where there are too few or too many labels.

    `logits` and `labels` are shapes; labels have one class for each place of the logits. Sizes are
    ints, or torch's symbols while a batch of any extent is exported. `wanted` is the dimension that
    the user says (None: none).

    Logits of two dimensions have their classes last. Otherwise a dimension fits whose removal
    leaves as many places as there are labels, which may be flattened. Of two that fit, the one
    counts that leaves the shape of the labels; or else leaves it but for dimensions of 1. Where
    both do equally well, logits of three dimensions are a sequence's, classes last, and logits of
    more are torch's, classes second.
    """
    dims = (wanted,) if wanted is not None else (LAST,) if len(logits) < 3 else (FIRST, LAST)
    sizes, label_sizes = _known(logits), _known(labels)
    if sizes is None or label_sizes is None:
        return ClassDim(wanted or LAST)
    places = {dim: _without(sizes, dim) for dim in dims}
    fitting = [dim for dim in dims if prod(places[dim]) == prod(label_sizes)]
    if not fitting:
        return None
    for kept in (list, _beside_ones):
        of_shape = [dim for dim in fitting if kept(places[dim][1:]) == kept(label_sizes[1:])]
        if of_shape:
            fitting = of_shape
            break
    last = LAST in fitting and (len(fitting) == 1 or len(logits) < 4)
    return ClassDim(LAST if last else FIRST, is_open=len(fitting) > 1)


def read_logits(
    shapes: Sequence[tuple[int, ...]], batch: Mapping[str, Any], wanted: int | None
) -> Logits | None:
    """Return the logits of `batch` as the loss reads them; None where there are none.

    `shapes` are the shapes of logits that were computed, the first of them those of `batch`.
    """
    read = class_dim(shapes[0], batch["labels"].shape, wanted) if shapes else None
    return None if read is None else Logits(shapes[0][1:], read.dim, read.is_open)


def _without(shape: list[int], dim: int) -> list[int]:
    dim %= len(shape)
    return [*shape[:dim], *shape[dim + 1 :]]


def _beside_ones(shape: list[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _known(shape: Sequence[Any]) -> list[int] | None:
    """Return the sizes of a shape as ints, or None where one follows the values of a tensor.

    A symbol is its size in the batch that is traced, which the trace is not held to.
    """
    known = all(isinstance(size, int) or size.node.has_hint() for size in shape)
    return [size if isinstance(size, int) else size.node.hint for size in shape] if known else None
