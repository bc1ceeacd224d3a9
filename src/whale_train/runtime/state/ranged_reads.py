"""Read a part of a tensor from a file of a store, by ranges of bytes."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import torch
from torch import Tensor

from whale_train.checkpoints.safetensors_files import Shape, StoredBlock, read_range

# Two runs with at most this many bytes between them are read as one range: a store sends about as
# many bytes in the time of one more request.
MOST_BETWEEN_BYTES = 2**18
_MOST_BYTES = 2**26  # the limit for a range of several runs


def read_slice(stored: StoredBlock, index: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
    """Read a part of a block that has at least one element, and return it as a tensor.

    index: the part, a slice from a start to a stop in each dimension of the block.
    dtype: the dtype of the block.

    Raises OSError where the store cannot be read.
    """
    shape = tuple(x.stop - x.start for x in index)
    content = bytearray(prod(shape) * dtype.itemsize)
    run_bytes, starts = runs(stored.block.shape, index, dtype.itemsize)
    filled = 0
    for group in _near(starts, run_bytes):
        begin = stored.start + group[0]
        read = memoryview(read_range(stored.file, begin, stored.start + group[-1] + run_bytes))
        for start in group:
            at = start - group[0]
            content[filled : filled + run_bytes] = read[at : at + run_bytes]
            filled += run_bytes
    return torch.frombuffer(content, dtype=dtype).view(shape)


def runs(shape: Shape, index: Sequence[slice], itemsize: int) -> tuple[int, list[int]]:
    """Return the length of the contiguous runs that make up a part of a row-major block, and their
    starts.

    All runs have the same length, in bytes. The starts are bytes from the begin of the block,
    ascending.

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
    """Yield groups of run starts, each to be read as one range."""
    group: list[int] = []
    for start in starts:
        is_near = group and start - group[-1] - run_bytes <= MOST_BETWEEN_BYTES
        if group and not (is_near and start + run_bytes - group[0] <= _MOST_BYTES):
            yield group
            group = []
        group.append(start)
    yield group
