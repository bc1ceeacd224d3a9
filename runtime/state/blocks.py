"""Where what a rank holds of a tensor lies in the whole one: the one description of that, of which
a verification and a checkpoint are made.

A rank holds a part along one dimension, perhaps of several intervals (a fused weight is cut in
several places at once), and of that part, where copies partition it, a range of its flattened
elements. Either is a few blocks: boxes of neighbouring elements, in every dimension.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from whale_train.checkpoints.safetensors_files import Block, Shape
from whale_train.strategies.plan.plan import Plan

Intervals = tuple[tuple[int, int], ...]  # [start, stop), one after another


@dataclass(frozen=True)
class Placement:
    """Which part of a tensor of `shape` a rank holds: per dimension the `intervals`, put one after
    another, or None for all of it."""

    shape: Shape
    intervals: tuple[Intervals | None, ...]

    @property
    def held_shape(self) -> Shape:
        """The shape of the part."""
        return tuple(
            size if held is None else sum(stop - start for start, stop in held)
            for size, held in zip(self.shape, self.intervals, strict=True)
        )

    @property
    def has_first_element(self) -> bool:
        return all(not held or held[0][0] == 0 for held in self.intervals)

    def blocks(self, held: Tensor, start: int | None = None) -> Iterator[tuple[Block, Tensor]]:
        """Yield the blocks that `held` consists of, each with the view of `held` that has its
        elements. `held` is the part itself, or, with `start`, the elements of the flattened part
        from there on, as many as it has."""
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
        """Yield a box of the part, cut where its intervals meet, as blocks of the whole."""
        pieces = [(box.offsets, view)]
        for dim, held in enumerate(self.intervals):
            if held is not None:
                pieces = [
                    ((*at[:dim], offset, *at[dim + 1 :]), piece)
                    for at, whole in pieces
                    for offset, piece in _along(dim, held, at[dim], whole)
                ]
        for offsets, piece in pieces:
            if piece.numel():
                yield Block(offsets, tuple(piece.shape)), piece


def whole(shape: Sequence[int]) -> Placement:
    """Return the placement of all of a tensor."""
    return Placement(tuple(shape), (None,) * len(shape))


def placement(plan: Plan, rank: int, path: str, shape: Shape) -> Placement:
    """Return where what `rank` holds of the parameter or buffer `path`, of `shape`, lies."""
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
    """Yield the boxes that the elements [start, stop) of a flattened tensor of `shape` consist of,
    in their order: at most two for every dimension but the last, and one."""
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
    for box in boxes:
        yield Block((number, *box.offsets), (1, *box.shape))


def _along(dim: int, held: Intervals, first: int, view: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the pieces of `view`, which begins at element `first` of the part along `dim`, that lie
    in one interval of it, each with its offset in the whole tensor."""
    begin, end = first, first + view.shape[dim]
    position = 0
    for start, stop in held:
        low, high = max(begin, position), min(end, position + stop - start)
        if low < high:
            yield start + low - position, view.narrow(dim, low - first, high - low)
        position += stop - start
