"""Attention to blocks of keys, joined, is torch's attention to all of them.

Of a member's part of the sequence no number may depend on how many members there are: whole
attention in fp64 says what the rows and the gradients are.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from tests.distributed.harness import run_ranks
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional

from whale_train.runtime.comms.layout_collectives import ShardGroup, all_gather_reduce_scatter
from whale_train.runtime.kernels import attention_blocks
from whale_train.runtime.kernels.context_attention import (
    AttentionOptions,
    gathered_attention,
    heads_attention,
    in_a_ring,
)

HEADS, WIDTH, BATCH = 4, 8, 2
# Sizes of the members' parts, and the heads of keys.
CASES = [((8, 8), 4), ((9, 4, 3), 2), ((5, 4, 3, 4), 1)]
MASKS = ("none", "causal", "bool")


def drawn(positions: int, key_heads: int) -> tuple[Tensor, ...]:
    """Return queries, keys, values, a weight for every result, and a mask one of whose rows
    attends to nothing in some blocks."""
    torch.manual_seed(3)
    shapes = [(BATCH, n, positions, WIDTH) for n in (HEADS, key_heads, key_heads, HEADS)]
    mask = torch.rand(BATCH, 1, positions, positions) > 0.4
    mask[:, :, 5] = torch.arange(positions) == 2
    return *(torch.randn(shape) for shape in shapes), mask


def whole(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    return functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal, enable_gqa=True
    )


def expected(inputs: tuple[Tensor, ...], kind: str) -> list[Tensor]:
    """Return the attention in fp64, and the gradients of queries, keys and values."""
    query, key, value, weight, mask = inputs
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    result = whole(*leaves, mask if kind == "bool" else None, kind == "causal")
    (result * weight).sum().backward()
    return [result.detach(), *(x.grad for x in leaves if x.grad is not None)]


def members_parts(sizes: tuple[int, ...], key_heads: int, written_out: bool) -> None:
    if written_out:  # as on a device without a fused kernel
        attention_blocks._kernel = lambda *_: ""
    group = dist.group.WORLD
    assert group is not None
    shards = ShardGroup(group, sizes, dist.get_rank())
    own = slice(shards.start, shards.start + shards.size)
    inputs = drawn(sum(sizes), key_heads)
    ways: dict[str, Callable[..., Tensor]] = {"ring": in_a_ring, "gathered": gathered_attention}
    if not written_out:
        ways["heads"] = heads_attention
    for kind in MASKS:
        answers = expected(inputs, kind)
        for way, function in ways.items():
            query, key, value = (x[:, :, own].clone().requires_grad_() for x in inputs[:3])
            options = AttentionOptions(causal=kind == "causal")
            mask = inputs[4] if kind == "bool" else None
            keys = (key, value)
            call = partial(function, tokens=shards, options=options)
            if way == "gathered":
                gathered = (all_gather_reduce_scatter(x, 2, shards) for x in keys)
                mask = None if mask is None else mask[:, :, own]
                result = call(query, *gathered, mask)
            else:
                result = call(query, *keys, mask, of_keys=shards)
            (result * inputs[3][:, :, own]).sum().backward()
            found = [result, query.grad, key.grad, value.grad]
            for of_member, answer in zip(found, answers, strict=True):
                assert of_member is not None
                torch.testing.assert_close(
                    of_member.double(), answer[:, :, own], rtol=1e-5, atol=1e-5, msg=f"{way} {kind}"
                )


@pytest.mark.parametrize(("sizes", "key_heads"), CASES)
def test_every_way_is_whole_attention(sizes: tuple[int, ...], key_heads: int) -> None:
    run_ranks(members_parts, len(sizes), sizes, key_heads, False)


def test_scores_written_out_are_those_of_the_kernel() -> None:
    run_ranks(members_parts, 3, (6, 5, 5), 2, True)


def test_rows_without_positions_are_zero() -> None:
    query, key, value, *_ = drawn(8, HEADS)
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[3] = False
    out, lse = attention_blocks.attend(query, key, value, False, mask, None)
    assert not out[:, :, 3].any()
    assert lse[:, :, 3].isneginf().all()
    assert not lse[:, :, 2].isneginf().any()


def test_blocks_join_in_any_order() -> None:
    query, key, value, *_ = drawn(12, HEADS)
    parts = [
        attention_blocks.attend(query, key[:, :, a:b], value[:, :, a:b], False, None, None)
        for a, b in pairwise((0, 3, 4, 12))
    ]
    for order in ((0, 1, 2), (2, 0, 1)):
        out, lse = parts[order[0]]
        for number in order[1:]:
            out, lse = attention_blocks.join(out, lse, *parts[number])
        torch.testing.assert_close(out, whole(query, key, value, None, False))
