"""Read a part of a tensor from a file of a store, by the ranges of bytes that it is in."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import torch
from torch import Tensor

from whale_train.checkpoints.safetensors_files import Shape, StoredBlock, read_range

# Bytes between two runs of wanted ones up to which they are read as one range: about what a store
# sends in the time of a further request.
MOST_BETWEEN_BYTES = 2**18
_MOST_BYTES = 2**26  # of a range that has several runs


def read_slice(stored: StoredBlock, index: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
    """Return a part of a block, which has at least one element.

    index: the part, a slice from a start to a stop in each dimension of the block.
    dtype: the dtype of the block.

    Raises OSError.
    """
    shape = tuple(x.stop - x.start for x in index)
    content = bytearray(prod(shape) * dtype.itemsize)
    run_bytes, starts = runs(stored.block.shape, index, dtype.itemsize)
    written = 0
    for group in _near(starts, run_bytes):
        begin = stored.start + group[0]
        read = memoryview(read_range(stored.file, begin, stored.start + group[-1] + run_bytes))
        for start in group:
            at = start - group[0]
            content[written : written + run_bytes] = read[at : at + run_bytes]
            written += run_bytes
    return torch.frombuffer(content, dtype=dtype).view(shape)


def runs(shape: Shape, index: Sequence[slice], itemsize: int) -> tuple[int, list[int]]:
    """Return the bytes of each run of a part of a row-major block that lies in one piece, and the
    byte of the block at which each begins, in ascending order.

    shape: the shape of the block.
    index: the part, as in `read_slice`.
    itemsize: bytes of an element.
    """
    cut = [dim for dim, x in enumerate(index) if x.stop - x.start < shape[dim]]
    last = cut[-1] if cut else 0
    strides = [itemsize * prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if not shape:
        return itemsize, [0]
    run_bytes = (index[last].stop - index[last].start) * strides[last]
    first = index[last].start * strides[last]
    outer = (range(x.start * s, x.stop * s, s) for x, s in zip(index[:last], strides, strict=False))
    return run_bytes, [sum(starts) + first for starts in product(*outer)]


def _near(starts: Sequence[int], run_bytes: int) -> Iterator[list[int]]:
    """Yield the runs that are read as one range, group by group."""
    group: list[int] = []
    for start in starts:
        is_near = group and start - group[-1] - run_bytes <= MOST_BETWEEN_BYTES
        if group and not (is_near and start + run_bytes - group[0] <= _MOST_BYTES):
            yield group
            group = []
        group.append(start)
    yield group
