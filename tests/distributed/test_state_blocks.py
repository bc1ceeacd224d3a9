"""Blocks of a part of a tensor are its elements, each once, where the whole tensor has them."""

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from whale_train.checkpoints.safetensors_files import Block
from whale_train.runtime.state.blocks import Placement

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    shape = draw(SHAPES)
    intervals: list[tuple[tuple[int, int], ...] | None] = [None] * len(shape)
    if shape and draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        ends = sorted(draw(st.sets(st.integers(0, shape[dim]), max_size=4)))
        held = list(zip(ends[::2], ends[1::2], strict=False))
        if held:
            intervals[dim] = tuple(held)
    return Placement(shape, tuple(intervals))


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(prod(shape)).view(shape)


def part_of(whole: Tensor, where: Placement) -> Tensor:
    """The part as indexing has it, one interval after another."""
    for dim, held in enumerate(where.intervals):
        if held is not None:
            whole = whole.index_select(dim, torch.cat([torch.arange(a, b) for a, b in held]))
    return whole


@given(placements(), st.data())
def test_blocks_are_where_the_whole_has_them(where: Placement, data: st.DataObject) -> None:
    whole = numbered(where.shape)
    part = part_of(whole, where).contiguous()
    assert where.held_shape == tuple(part.shape)
    start = data.draw(st.integers(0, part.numel()))
    stop = data.draw(st.integers(start, part.numel()))
    fragment = part.flatten()[start:stop]
    for held, begin in ((part, None), (fragment, start)):
        seen = []
        for block, view in where.blocks(held, begin):
            index = tuple(slice(a, a + n) for a, n in zip(block.offsets, block.shape, strict=True))
            assert torch.equal(whole[index], view)
            assert view.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
            seen += view.flatten().tolist()
        assert sorted(seen) == sorted(held.flatten().tolist())


@given(SHAPES.flatmap(lambda shape: st.tuples(*[st.just(shape), boxes(shape), boxes(shape)])))
def test_an_overlap_is_what_both_have(drawn: tuple[tuple[int, ...], Block, Block]) -> None:
    shape, one, other = drawn
    whole = numbered(shape)
    mine, theirs = whole[box(one)], whole[box(other)]
    shared = one.overlap(other)
    both = set(mine.flatten().tolist()) & set(theirs.flatten().tolist())
    assert (shared is not None) == bool(both)
    if shared is not None:
        assert set(mine[shared.within(one)].flatten().tolist()) == both
        assert torch.equal(mine[shared.within(one)], theirs[shared.within(other)])


def boxes(shape: tuple[int, ...]) -> st.SearchStrategy[Block]:
    ends = [
        st.tuples(st.integers(0, size - 1), st.integers(1, size)).filter(lambda x: x[0] < x[1])
        for size in shape
    ]
    return st.tuples(*ends).map(
        lambda found: Block(tuple(a for a, _ in found), tuple(b - a for a, b in found))
    )


def box(block: Block) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(block.offsets, block.shape, strict=True))
