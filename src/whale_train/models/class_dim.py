"""Find the dimension of the classes in a model's logits, from the shapes of logits and labels.

`torch.nn.functional.cross_entropy` takes logits [batch, classes, ...] with labels [batch, ...].
Language models return [batch, sequence, classes] with labels [batch, sequence]. Both forms are
accepted, and the shapes tell which one is meant.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from whale_train.strategies.graph.operation_graph import Logits

FIRST, LAST = 1, -1  # the values of `model.class_dim`


@dataclass(frozen=True)
class ClassDim:
    """Dimension of the classes in logits.

    dim: 1 or -1.
    is_open: whether the shapes fit the other dimension as well.
    """

    dim: int
    is_open: bool = False


def class_dim(logits: Sequence[Any], labels: Sequence[Any], wanted: int | None) -> ClassDim | None:
    """Return the dimension of the classes, or None where the number of labels fits neither
    dimension.

    logits, labels: shapes. Sizes are ints, or torch's symbols while a batch of any size is
        exported.
    wanted: the only dimension to try; None tries both.

    Logits of two dimensions have their classes last. Otherwise a dimension fits if the logits
    without it have as many places as there are labels, which may be flattened. If both fit, the
    dimension is preferred whose removal leaves the labels' shape, then the one that leaves it up to
    dimensions of size 1. If both still fit, logits of three dimensions have their classes last,
    like a sequence's, and logits of more have them second, like torch's.
    """
    dims = (wanted,) if wanted is not None else (LAST,) if len(logits) < 3 else (FIRST, LAST)
    sizes, label_sizes = _known(logits), _known(labels)
    if sizes is None or label_sizes is None:
        return ClassDim(wanted or LAST)
    places = {dim: _without(sizes, dim) for dim in dims}
    fitting = [dim for dim in dims if prod(places[dim]) == prod(label_sizes)]
    if not fitting:
        return None
    for form in (list, _beside_ones):
        same_shape = [dim for dim in fitting if form(places[dim][1:]) == form(label_sizes[1:])]
        if same_shape:
            fitting = same_shape
            break
    last = LAST in fitting and (len(fitting) == 1 or len(logits) < 4)
    return ClassDim(LAST if last else FIRST, is_open=len(fitting) > 1)


def read_logits(
    shapes: Sequence[tuple[int, ...]], batch: Mapping[str, Any], wanted: int | None
) -> Logits | None:
    """Return the logits of `batch` as the loss reads them, or None where the loss reads no logits.

    shapes: shapes of all computed logits; the first shape is that of the logits of `batch`.
    wanted: as in `class_dim`.
    """
    read = class_dim(shapes[0], batch["labels"].shape, wanted) if shapes else None
    return None if read is None else Logits(shapes[0][1:], read.dim, read.is_open)


def _without(shape: list[int], dim: int) -> list[int]:
    dim %= len(shape)
    return [*shape[:dim], *shape[dim + 1 :]]


def _beside_ones(shape: list[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _known(shape: Sequence[Any]) -> list[int] | None:
    """Return the sizes of a shape as ints, or None where a size depends on the values of a tensor.

    A symbol becomes its size in the traced batch, without a guard on the trace.
    """
    known = all(isinstance(size, int) or size.node.has_hint() for size in shape)
    return [size if isinstance(size, int) else size.node.hint for size in shape] if known else None
