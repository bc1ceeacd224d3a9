"""Describe the position of a rank's part of a tensor in the whole tensor.

Verifications and checkpoints both use this description. A rank holds a part along one dimension,
perhaps of several intervals (a fused weight is sharded in several places at once). Where copies
partition that part, a rank holds a range of its flattened elements. In both cases the rank's
elements form a few blocks: boxes of neighbouring elements, in every dimension.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from whale_train.checkpoints.safetensors_files import Block, Shape
from whale_train.strategies.plan.plan import Plan

Intervals = tuple[tuple[int, int], ...]  # [start, stop) each, ascending


@dataclass(frozen=True)
class Placement:
    """The part of a tensor that a rank holds.

    shape: the shape of the whole tensor.
    intervals: for each dimension, the intervals of the part in ascending order; None for all of the
        dimension.
    """

    shape: Shape
    intervals: tuple[Intervals | None, ...]

    @property
    def held_shape(self) -> Shape:
        """Return the shape of the part."""
        return tuple(
            size if held is None else sum(stop - start for start, stop in held)
            for size, held in zip(self.shape, self.intervals, strict=True)
        )

    @property
    def has_first_element(self) -> bool:
        """Return True if the part includes the first element of the whole tensor."""
        return all(not held or held[0][0] == 0 for held in self.intervals)

    def blocks(self, held: Tensor, start: int | None = None) -> Iterator[tuple[Block, Tensor]]:
        """Yield the blocks of the whole tensor that `held` contains, each with a view of its
        elements in `held`.

        `held` is the rank's part. With `start`, it is a range of the flattened part that begins at
        element `start`.
        """
        if start is None:
            assert tuple(held.shape) == self.held_shape, (held.shape, self)
            yield from self._cut(Block((0,) * held.dim(), self.held_shape), held)
            return
        end = 0
        for box in _boxes(self.held_shape, start, start + held.numel()):
            size = prod(box.shape)
            yield from self._cut(box, held[end : end + size].view(box.shape))
            end += size

    def _cut(self, box: Block, view: Tensor) -> Iterator[tuple[Block, Tensor]]:
        """Yield a box of the part as blocks of the whole tensor, divided where two intervals
        meet."""
        pieces = [(box.offsets, view)]
        for dim, held in enumerate(self.intervals):
            if held is not None:
                pieces = [
                    ((*at[:dim], offset, *at[dim + 1 :]), piece)
                    for at, uncut in pieces
                    for offset, piece in _along(dim, held, at[dim], uncut)
                ]
        for offsets, piece in pieces:
            if piece.numel():
                yield Block(offsets, tuple(piece.shape)), piece


def whole(shape: Sequence[int]) -> Placement:
    """Return the placement of a rank that holds a whole tensor of `shape`."""
    return Placement(tuple(shape), (None,) * len(shape))


def placement(plan: Plan, rank: int, path: str, shape: Shape) -> Placement:
    """Return the placement of the part of the parameter or buffer `path` that `rank` holds.

    `shape` is the shape of the part.
    """
    sizes = list(shape)
    intervals: list[Intervals | None] = [None] * len(shape)
    for number in plan.ranks[rank].task_graphs:
        task_graph = plan.task_graphs[number]
        if path not in task_graph.shards:
            continue
        ranks = next(ranks for ranks in task_graph.replicas if rank in ranks)
        units = max(stop for _, stop in task_graph.shards[path])
        start, stop = task_graph.shards[path][ranks.index(rank)]
        layout = task_graph.shard_layouts[path]
        held, offset = [], 0
        for extent in (layout.pieces or (units,)) * layout.outer:
            held.append((offset + start * extent // units, offset + stop * extent // units))
            offset += extent
        dim = task_graph.shard_dims[path]
        intervals[dim], sizes[dim] = tuple(held), offset
    return Placement(tuple(sizes), tuple(intervals))


def _boxes(shape: Shape, start: int, stop: int) -> Iterator[Block]:
    """Yield the boxes that make up the elements [start, stop) of a flattened tensor of `shape`.

    Boxes are in the order of their elements. For n dimensions there are at most 2n - 1 boxes.
    """
    if start >= stop:
        return
    if not shape:
        yield Block((), ())
        return
    row = prod(shape[1:])
    (first, into), (last, beyond) = divmod(start, row), divmod(stop, row)
    if into or first == last:
        end = beyond if first == last else row
        yield from _in_row(first, _boxes(shape[1:], into, end))
        if first == last:
            return
        first += 1
    if first < last:
        yield Block((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if beyond:
        yield from _in_row(last, _boxes(shape[1:], 0, beyond))


def _in_row(number: int, boxes: Iterator[Block]) -> Iterator[Block]:
    """Yield boxes of a row as boxes of the tensor in which the row has the first index `number`."""
    for box in boxes:
        yield Block((number, *box.offsets), (1, *box.shape))


def _along(dim: int, held: Intervals, first: int, view: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the pieces of `view` in single intervals, with their offsets in the whole tensor.

    `view` begins at element `first` of the part along `dim`, whose intervals are `held`.
    """
    begin, end = first, first + view.shape[dim]
    position = 0
    for start, stop in held:
        low, high = max(begin, position), min(end, position + stop - start)
        if low < high:
            yield start + low - position, view.narrow(dim, low - first, high - low)
        position += stop - start
