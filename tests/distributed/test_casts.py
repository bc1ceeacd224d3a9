"""Casts, against the same program on whole tensors."""

import pytest
import torch
from tests.distributed.harness import RankError, run_ranks
from torch import Tensor, fx, nn
from torch import distributed as dist

from whale_train.runtime.comms import layout_collectives as casts
from whale_train.runtime.comms.layout_collectives import ShardGroup
from whale_train.strategies.plan.program import PlannedShard

# Shards are equal, or unlike with one that is empty; two members show no more than three.
SIZES = [
    pytest.param((3, 3), marks=pytest.mark.full),
    pytest.param((4, 1), marks=pytest.mark.full),
    (1, 0, 4),
    (2, 2, 2),
]


def shard_group(sizes: tuple[int, ...]) -> ShardGroup:
    return ShardGroup(dist.group.WORLD, sizes, dist.get_rank())


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shard(x: Tensor, dim: int, outer: int, sizes: tuple[int, ...], rank: int) -> Tensor:
    """By index lists, which the code under test does not use."""
    total, start = sum(sizes), sum(sizes[:rank])
    kept = [o * total + i for o in range(outer) for i in range(start, start + sizes[rank])]
    return x.index_select(dim, torch.tensor(kept, dtype=torch.long)).detach().clone()


def two_layers(sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """A hidden layer sharded by its columns, then by its rows; the input is read twice."""
    shards, rank = shard_group(sizes), dist.get_rank()
    x, first, second = drawn(0, 7, 6), drawn(1, 6, sum(sizes)), drawn(2, sum(sizes), 5)
    x.requires_grad_()
    mine = shard(first, 1, 1, sizes, rank).requires_grad_()
    rows = shard(second, 0, 1, sizes, rank).requires_grad_()
    partial = (casts.copy_to_parallel_region(x, shards.group) @ mine).tanh() @ rows
    before = partial.detach().clone()
    y = casts.reduce(partial, shards.group) + x[:, :5]
    assert torch.equal(partial, before)
    loss = (y * drawn(3, 7, 5)).pow(2).sum()
    loss.backward()
    return loss.detach(), x.grad, mine.grad, rows.grad


@pytest.mark.parametrize("sizes", SIZES)
def test_enter_and_reduce(sizes: tuple[int, ...]) -> None:
    x, first, second = drawn(0, 7, 6), drawn(1, 6, sum(sizes)), drawn(2, sum(sizes), 5)
    for leaf in (x, first, second):
        leaf.requires_grad_()
    loss = (((x @ first).tanh() @ second + x[:, :5]) * drawn(3, 7, 5)).pow(2).sum()
    loss.backward()
    for rank, (found, x_grad, columns, rows) in enumerate(run_ranks(two_layers, len(sizes), sizes)):
        torch.testing.assert_close(found, loss.detach())
        torch.testing.assert_close(x_grad, x.grad)
        torch.testing.assert_close(columns, shard(first.grad, 1, 1, sizes, rank))
        torch.testing.assert_close(rows, shard(second.grad, 0, 1, sizes, rank))


def gathered(dim: int, outer: int, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """S to R before work that all repeat; R to S and back around work that is local."""
    shards, rank = shard_group(sizes), dist.get_rank()
    shape = [2, 3, 4]
    shape[dim] = outer * sum(sizes)
    whole = drawn(4, *shape)
    mine = shard(whole, dim, outer, sizes, rank).requires_grad_()
    y = casts.gather(mine, dim - 3, outer, shards)
    (y.pow(3) * drawn(5, *shape)).sum().backward()

    replicated = whole.clone().requires_grad_()
    piece = casts.slice_(replicated, dim, outer, shards)
    assert piece.is_contiguous()
    z = casts.gather(piece.pow(3), dim, outer, shards)
    (z * drawn(5, *shape)).sum().backward()
    return y.detach(), mine.grad, piece.detach(), z.detach(), replicated.grad


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("dim", "outer"), [(0, 1), (1, 1), (2, 3), (0, 2)])
def test_gather_and_slice(dim: int, outer: int, sizes: tuple[int, ...]) -> None:
    shape = [2, 3, 4]
    shape[dim] = outer * sum(sizes)
    whole, weights = drawn(4, *shape), drawn(5, *shape)
    grad = 3 * whole.pow(2) * weights
    for rank, results in enumerate(run_ranks(gathered, len(sizes), dim, outer, sizes)):
        y, mine_grad, piece, z, replicated_grad = results
        assert torch.equal(y, whole)
        torch.testing.assert_close(mine_grad, shard(grad, dim, outer, sizes, rank))
        assert torch.equal(piece, shard(whole, dim, outer, sizes, rank))
        torch.testing.assert_close(z, whole.pow(3))
        torch.testing.assert_close(replicated_grad, grad)


PIECES = [
    pytest.param(((4, 2), (2, 1)), marks=pytest.mark.full),
    ((1, 2, 3), (2, 4, 6), (1, 2, 3)),
]


def in_pieces(dim: int, outer: int, pieces: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
    """A dimension of several pieces, each cut: gathered, sliced, scattered."""
    rank = dist.get_rank()
    sizes = tuple(sum(each) for each in zip(*pieces, strict=True))
    shards = ShardGroup(dist.group.WORLD, sizes, rank, pieces)
    whole = whole_of(dim, outer, pieces)
    mine = part(whole, dim, outer, pieces, rank).requires_grad_()
    y = casts.gather(mine, dim, 0, shards)  # how often it repeats, the tensor says
    (y.pow(3) * drawn(5, *y.shape)).sum().backward()
    replicated = whole.clone().requires_grad_()
    piece = casts.slice_(replicated, dim, outer, shards)
    (piece.pow(3) * part(drawn(5, *y.shape), dim, outer, pieces, rank)).sum().backward()
    scattered = casts.reduce_scatter(whole * (rank + 1), dim, shards, outer)
    assert torch.equal(casts.all_gather_reduce_scatter(mine, dim, shards, outer), y)
    other, last = (dim + 1) % 3, [0] * (len(sizes) - 2)
    rows = (1, whole.shape[(dim + 1) % 3] - 1, *last)
    there = casts.reshard(mine.detach(), dim, outer, shards, other, 1, shard_group(rows))
    assert torch.equal(there, shard(whole, other, 1, rows, rank))
    back = casts.reshard(there, other, 1, shard_group(rows), dim, outer, shards)
    assert torch.equal(back, mine.detach())
    return y.detach(), mine.grad, piece.detach(), replicated.grad, scattered


def whole_of(dim: int, outer: int, pieces: tuple[tuple[int, ...], ...]) -> Tensor:
    shape = [2, 3]
    shape.insert(dim, outer * sum(map(sum, pieces)))
    return drawn(4, *shape)


def part(x: Tensor, dim: int, outer: int, pieces: tuple[tuple[int, ...], ...], rank: int) -> Tensor:
    """By index lists, which the code under test does not use."""
    kept, position = [], 0
    for _ in range(outer):
        for sizes in pieces:
            start = position + sum(sizes[:rank])
            kept += range(start, start + sizes[rank])
            position += sum(sizes)
    return x.index_select(dim, torch.tensor(kept)).detach().clone()


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize(("dim", "outer"), [(0, 1), (1, 2), (2, 1)])
def test_several_pieces(dim: int, outer: int, pieces: tuple[tuple[int, ...], ...]) -> None:
    whole = whole_of(dim, outer, pieces)
    grad = 3 * whole.pow(2) * drawn(5, *whole.shape)
    members = len(pieces[0])
    for rank, results in enumerate(run_ranks(in_pieces, members, dim, outer, pieces)):
        y, mine_grad, piece, replicated_grad, scattered = results
        assert torch.equal(y, whole)
        torch.testing.assert_close(mine_grad, part(grad, dim, outer, pieces, rank))
        assert torch.equal(piece, part(whole, dim, outer, pieces, rank))
        torch.testing.assert_close(replicated_grad, grad)
        total = whole * (members * (members + 1) / 2)
        torch.testing.assert_close(scattered, part(total, dim, outer, pieces, rank))


def added_once() -> tuple[Tensor, Tensor]:
    bias = torch.arange(3.0, requires_grad=True)
    partial = torch.full((2, 3), dist.get_rank() + 1.0)
    y = casts.reduce(partial + casts.replicate_to_partial(bias, dist.group.WORLD), dist.group.WORLD)
    (y * torch.tensor([[1.0], [2.0]])).sum().backward()
    return y.detach(), bias.grad


def test_once_adds_to_a_sum_on_one_member_alone() -> None:
    for y, grad in run_ranks(added_once, 3):
        assert torch.equal(y, torch.arange(3.0).expand(2, 3) + 6)
        assert grad.tolist() == [3.0] * 3


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize(
    ("layout", "extents"),
    [
        (PlannedShard(1, "axis"), (8,)),
        (PlannedShard(0, "axis", 3, (16,)), (16,) * 3),
        (PlannedShard(1, "axis", 1, (24, 8)), (24, 8)),
        (PlannedShard(-1, "axis", 0, (8,)), (8, 8)),
    ],
)
def test_a_shard_is_copied_out_of_a_whole_tensor(
    layout: PlannedShard, extents: tuple[int, ...], index: int
) -> None:
    intervals = ((0, 5), (5, 6), (6, 8))
    shape = [5, 7]
    shape[layout.dim] = sum(extents)
    whole = drawn(9, *shape)
    kept, position = [], 0
    for extent in extents:
        each = extent // 8
        kept += range(position + each * intervals[index][0], position + each * intervals[index][1])
        position += extent
    found = casts.shard_of(whole, layout, intervals, index)
    assert torch.equal(found, whole.index_select(layout.dim, torch.tensor(kept)))
    assert found.is_contiguous()
    assert found.untyped_storage().nbytes() == found.nbytes


def test_a_shard_of_no_elements_has_its_shape() -> None:
    layout = PlannedShard(1, "axis", 1, (6, 2))
    assert casts.shard_of(torch.empty(0, 8), layout, ((0, 1), (1, 2)), 1).shape == (0, 4)


def resharded(dim: int, sizes: tuple[int, ...], natively: bool) -> tuple[Tensor, ...]:
    """S gathered for work that is different on each rank, whose partial sums are scattered."""
    casts._scatters_well = lambda group: natively  # both ways to a slice of a sum, on gloo
    shards, rank = shard_group(sizes), dist.get_rank()
    shape = [3, 4, 5]
    shape[dim] = sum(sizes)
    mine = shard(drawn(6, *shape), dim, 1, sizes, rank).requires_grad_()
    partial = (casts.all_gather_reduce_scatter(mine, dim, shards) * drawn(10 + rank, *shape)).tanh()
    y = casts.reduce_scatter(partial, dim, shards)
    loss = (y.pow(2) * shard(drawn(7, *shape), dim, 1, sizes, rank)).sum()
    loss.backward()
    return y.detach(), mine.grad


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("natively", [False, True])
def test_gather_enter_and_reduce_scatter(dim: int, sizes: tuple[int, ...], natively: bool) -> None:
    shape = [3, 4, 5]
    shape[dim] = sum(sizes)
    whole = drawn(6, *shape).requires_grad_()
    y = sum((whole * drawn(10 + rank, *shape)).tanh() for rank in range(len(sizes)))
    (y.pow(2) * drawn(7, *shape)).sum().backward()
    for rank, (found, grad) in enumerate(run_ranks(resharded, len(sizes), dim, sizes, natively)):
        torch.testing.assert_close(found, shard(y, dim, 1, sizes, rank))
        torch.testing.assert_close(grad, shard(whole.grad, dim, 1, sizes, rank))


def exchanged(
    ends: tuple[tuple[int, int], tuple[int, int]], sizes: tuple[tuple[int, ...], ...]
) -> tuple[Tensor, ...]:
    """S along one dimension to S along another, of a value that each member does other work on."""
    rank = dist.get_rank()
    (from_dim, from_outer), (dim, outer) = ends
    shape = [3, 4, 5]
    shape[from_dim], shape[dim] = from_outer * sum(sizes[0]), outer * sum(sizes[1])
    mine = shard(drawn(6, *shape), from_dim, from_outer, sizes[0], rank).requires_grad_()
    groups = [shard_group(each) for each in sizes]
    y = casts.reshard(mine, from_dim, from_outer, groups[0], dim, outer, groups[1])
    (y.pow(2) * shard(drawn(7, *shape), dim, outer, sizes[1], rank)).sum().backward()
    flags = casts.reshard(mine.detach() > 0, from_dim, from_outer, groups[0], dim, outer, groups[1])
    assert torch.equal(flags, y.detach() > 0)
    return y.detach(), mine.grad


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(((2, 1), (1, 3)), marks=pytest.mark.full),
        ((2, 2), (3, 3)),
        ((1, 3, 2), (2, 0, 1)),
    ],
)
@pytest.mark.parametrize(
    "ends",
    [((0, 1), (2, 1)), ((2, 1), (0, 1)), ((2, 3), (0, 1)), ((1, 1), (2, 2)), ((2, 1), (2, 1))],
)
def test_reshard(
    ends: tuple[tuple[int, int], tuple[int, int]], sizes: tuple[tuple[int, ...], ...]
) -> None:
    if ends[0][0] == ends[1][0]:  # along one dimension, in other parts
        sizes = (sizes[0], tuple(reversed(sizes[0])))
    (from_dim, from_outer), (dim, outer) = ends
    shape = [3, 4, 5]
    shape[from_dim], shape[dim] = from_outer * sum(sizes[0]), outer * sum(sizes[1])
    whole = drawn(6, *shape).requires_grad_()
    (whole.pow(2) * drawn(7, *shape)).sum().backward()
    for rank, (found, grad) in enumerate(run_ranks(exchanged, len(sizes[0]), ends, sizes)):
        torch.testing.assert_close(found, shard(whole, dim, outer, sizes[1], rank))
        torch.testing.assert_close(grad, shard(whole.grad, from_dim, from_outer, sizes[0], rank))


def other_dtypes(sizes: tuple[int, ...]) -> list[Tensor]:
    shards, rank = shard_group(sizes), dist.get_rank()
    ids = shard(torch.arange(3 * sum(sizes)).view(3, -1), 1, 1, sizes, rank)
    half = shard(torch.arange(3.0 * sum(sizes)).view(3, -1), 1, 1, sizes, rank).bfloat16()
    nothing = torch.empty(0, sizes[rank])
    return [
        casts.all_gather_reduce_scatter(ids, 1, shards),
        casts.all_gather_reduce_scatter(ids % 2 == 0, 1, shards),
        casts.all_gather_reduce_scatter(half, 1, shards),
        casts.reduce_scatter(torch.ones(sum(sizes), 2, dtype=torch.bfloat16), 0, shards),
        casts.gather(nothing, 1, 1, shards),
        casts.reduce(torch.empty(0, 3), shards.group),
    ]


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1, 0)])
def test_integers_bools_halves_and_nothing(sizes: tuple[int, ...]) -> None:
    whole = torch.arange(3 * sum(sizes)).view(3, -1)
    for rank, results in enumerate(run_ranks(other_dtypes, len(sizes), sizes)):
        ids, even, half, scattered, nothing, reduced = results
        assert torch.equal(ids, whole)
        assert even.dtype == torch.bool
        assert torch.equal(even, whole % 2 == 0)
        assert torch.equal(half, whole.bfloat16())
        assert torch.equal(scattered, torch.full((sizes[rank], 2), len(sizes)).bfloat16())
        assert nothing.shape == (0, sum(sizes))
        assert reduced.shape == (0, 3)


def gradients_of_others() -> tuple[Tensor, Tensor]:
    """`enter` beside a plain use of what comes out: their gradients are one tensor."""
    rank = dist.get_rank()
    a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    ((casts.copy_to_parallel_region(a, dist.group.WORLD) + b) * (rank + 1.0)).sum().backward()
    return a.grad, b.grad


def test_enter_leaves_a_shared_gradient_alone() -> None:
    for rank, (entered, plain) in enumerate(run_ranks(gradients_of_others, 2)):
        assert entered.tolist() == [3.0] * 3
        assert plain.tolist() == [rank + 1.0] * 3


def changed_in_place() -> None:
    x = torch.ones(3, requires_grad=True)
    casts.copy_to_parallel_region(x * 2, dist.group.WORLD).relu_()


def test_enter_refuses_to_be_changed_in_place() -> None:
    with pytest.raises(RankError, match="modified inplace"):
        run_ranks(changed_in_place, 2)


def alone() -> bool:
    shards, x = shard_group((4,)), torch.ones(4)
    group = shards.group
    results = [
        casts.copy_to_parallel_region(x, group),
        casts.reduce(x, group),
        casts.gather(x, 0, 1, shards),
        casts.slice_(x, 0, 1, shards),
        casts.all_gather_reduce_scatter(x, 0, shards),
        casts.reduce_scatter(x, 0, shards),
    ]
    return all(result is x for result in results)


def test_a_group_of_one_does_nothing() -> None:
    assert run_ranks(alone, 1) == [True]


def in_a_graph(sizes: tuple[int, ...]) -> Tensor:
    """As targets of an fx graph, the group held by the graph's module."""
    root = nn.Module()
    root.shards = shard_group(sizes)
    graph = fx.Graph()
    x = graph.placeholder("x")
    shards = graph.get_attr("shards")
    piece = graph.call_function(casts.slice_, (x, 0, 1, shards))
    graph.output(graph.call_function(casts.gather, (piece, 0, 1, shards)))
    result: Tensor = fx.GraphModule(root, graph)(drawn(8, sum(sizes), 2))
    return result


def test_casts_are_targets_of_a_graph() -> None:
    for result in run_ranks(in_a_graph, 2, (3, 2)):
        assert torch.equal(result, drawn(8, 5, 2))
