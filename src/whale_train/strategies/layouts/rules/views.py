"""Rules for operations that change the shape or the order of a tensor.

All of them are linear, so a partial sum passes through. Operations that split and join tensors are
in `slicing.py`.
"""

from collections.abc import Sequence

from whale_train.strategies.graph.operation_graph import Shape, Size
from whale_train.strategies.layouts.types import (
    P,
    PartialByRow,
    PartialSum,
    R,
    RuleInput,
    RuleResult,
    Shard,
    dimension,
    dimensions,
    product,
    times,
)


def reshape(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a view. It stays sharded where the sharded run of elements becomes one
    dimension, or the leading factor of one."""
    layout = typed.only
    if isinstance(layout, PartialSum):
        return RuleResult({}, P)
    if not isinstance(layout, Shard):
        return None
    view = viewed(layout, typed.shape(0), typed.operation.shape or ())
    if view is None:
        return None
    gives, extents = view
    return RuleResult({}, gives, coarsen=tuple((layout.axis, extent) for extent in extents))


def viewed(layout: Shard, source: Shape, target: Shape) -> tuple[Shard, tuple[int, ...]] | None:
    """Return a cut of `source` as a cut of `target`, and the extents that the units of its axis
    must then divide; None where no such cut exists.

    In row-major order, the cut elements are `outer` runs of blocks: the product of what precedes
    them is the same in both shapes, and one block's extent is a multiple of the other's.
    """
    if any(size.fixed and size.per_sample for size in (*source, *target)):
        return None
    outer = product([layout.outer] if isinstance(layout.outer, Size) else [Size(layout.outer)])
    before = _times(product(source[: layout.dim]), outer)
    extent = _over(product([source[layout.dim]]), outer)
    assert extent is not None, layout
    inner = product(source[layout.dim + 1 :])
    best: tuple[Shard, tuple[int, ...]] | None = None
    largest = 1
    for dim, size in enumerate(target):
        repeats = _over(before, product(target[:dim]))
        block = _over(product([size]), repeats) if repeats else None
        if repeats is None or block is None or repeats[1] > 1:
            continue
        if _times(block, product(target[dim + 1 :])) != _times(extent, inner):
            continue
        new_outer = Size(0, repeats[0]) if repeats[1] else repeats[0]
        if block == extent:
            if layout.pieces or not repeats[1]:
                return Shard(dim, layout.axis, new_outer, layout.pieces), ()
        elif layout.pieces and not block[1] and block[0] > largest:
            rescaled = _rescaled(layout, dim, new_outer, block[0], extent[0])
            best, largest = (rescaled, block[0]) if rescaled else (best, largest)
    return best


def _rescaled(
    layout: Shard, dim: int, outer: int | Size, block: int, extent: int
) -> tuple[Shard, tuple[int, ...]] | None:
    """Return the cut where `extent` elements become `block` indices, or the other way round, and
    the extents that the units of its axis must divide; None where the pieces are not integers."""
    if block % extent == 0:
        pieces = tuple(piece * (block // extent) for piece in layout.pieces)
        return Shard(dim, layout.axis, outer, pieces), ()
    if extent % block or any(piece % (extent // block) for piece in layout.pieces):
        return None
    pieces = tuple(piece // (extent // block) for piece in layout.pieces)
    return Shard(dim, layout.axis, outer, pieces), pieces


def transpose(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a swap of two dimensions. `aten.t` names none: it swaps 0 and 1."""
    first = dimension(typed.argument(1, 0), typed.rank)
    second = dimension(typed.argument(2, 1), typed.rank)
    return moved(typed, {first: second, second: first})


def reverse(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of `x.T`: all dimensions in reverse order."""
    return moved(typed, {dim: typed.rank - 1 - dim for dim in range(typed.rank)})


def matrix_transpose(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of `x.mT`: a swap of the last two dimensions."""
    last = typed.rank - 1
    return moved(typed, {last: last - 1, last - 1: last})


def permute(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a permutation of the dimensions."""
    order = typed.argument(1)
    assert isinstance(order, tuple)
    places = [dimension(x, typed.rank) for x in order]
    return moved(typed, {old: new for new, old in enumerate(places)})


def movedim(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of dimensions that are moved to other places, with the rest in order
    around them."""
    sources = dimensions(typed.argument(1), typed.rank)
    targets = dimensions(typed.argument(2), typed.rank)
    places = dict(zip(sources, targets, strict=True))
    rest = iter(dim for dim in range(typed.rank) if dim not in targets)
    for dim in range(typed.rank):
        if dim not in sources:
            places[dim] = next(rest)
    return moved(typed, places)


def select(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of one index of a dimension, which the result loses."""
    along = dimension(typed.argument(1), len(typed.shape(0)))
    return without(typed, (along,))


def squeeze(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of the removal of dimensions of extent 1."""
    sizes = typed.shape(0)
    asked = dimensions(typed.argument(1, ()), len(sizes))
    return without(typed, tuple(dim for dim in asked if sizes[dim] == Size(1)))


def unsqueeze(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a new dimension of extent 1."""
    new = dimension(typed.argument(1), typed.rank)
    return moved(typed, {dim: dim + (new <= dim) for dim in range(typed.rank)})


def expand(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of dimensions of extent 1 that are repeated, and of new leading ones. A
    partial sum is reduced before it grows."""
    source, target = typed.shape(0), typed.operation.shape or ()
    if isinstance(typed.only, PartialSum):
        return RuleResult({}, P) if product(source) == product(target) else None
    new = len(target) - len(source)
    typing = moved(typed, {dim: dim + new for dim in range(len(source))})
    if typing is None or not isinstance(typing.gives, Shard):
        return None
    if target[typing.gives.dim] != source[typing.gives.dim - new]:
        return None
    model = typed.value(1)  # the second argument of `expand_as`, which gives only its shape
    return RuleResult({model: typing.gives}, typing.gives) if model else typing


def repeat(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a tensor that is repeated. Along the sharded dimension, its pieces are
    repeated equally often."""
    layout, counts = typed.only, typed.argument(1)
    if not isinstance(layout, Shard) or not isinstance(counts, tuple) or not layout.pieces:
        return None
    dim = layout.dim + len(counts) - len(typed.shape(0))
    count = counts[dim]
    if not isinstance(count, int):
        return None
    return RuleResult({}, Shard(dim, layout.axis, times(layout.outer, count), layout.pieces))


def repeat_interleave(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of every index of a dimension, repeated several times in a row."""
    layout, count, dim = typed.only, typed.argument(1), typed.argument(2)
    if isinstance(dim, bool) or not isinstance(dim, int) or not isinstance(count, int):
        return None
    if not isinstance(layout, Shard) or layout.dim != dim % typed.rank:
        return RuleResult({}, layout) if isinstance(layout, Shard) else None
    if not layout.pieces:
        return None
    pieces = tuple(piece * count for piece in layout.pieces)
    return RuleResult({}, Shard(layout.dim, layout.axis, layout.outer, pieces))


def flip(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a reversal of some dimensions."""
    along = dimensions(typed.argument(1), typed.rank)
    layout = typed.only
    if isinstance(layout, PartialSum):
        return RuleResult({}, P)
    return RuleResult({}, layout) if isinstance(layout, Shard) and layout.dim not in along else None


def fresh(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a new tensor of given sizes, or of a size. Only facts are read that are
    equal on all ranks."""
    layout, of_size = typed.only, typed.operation.target == "aten.sym_size.int"
    asked = dimension(typed.argument(1), len(typed.shape(0))) if of_size else -1
    return None if isinstance(layout, Shard) and layout.dim == asked else RuleResult({}, R)


def moved(typed: RuleInput, places: dict[int, int]) -> RuleResult | None:
    """Return the rule result of an operation that moves dimensions: `places` maps an old dimension
    to its new place. An absent dimension keeps its place."""
    layout = typed.only
    if isinstance(layout, PartialSum):
        return RuleResult({}, layout if isinstance(layout, PartialByRow) and not places else P)
    if not isinstance(layout, Shard):
        return None
    dim = places.get(layout.dim, layout.dim)
    return RuleResult({}, Shard(dim, layout.axis, layout.outer, layout.pieces))


def without(typed: RuleInput, gone: Sequence[int]) -> RuleResult | None:
    """Return the rule result of an operation that removes the dimensions `gone`; None where the
    sharded one is among them."""
    layout = typed.only
    if isinstance(layout, PartialSum):
        return RuleResult({}, P)
    if not isinstance(layout, Shard) or layout.dim in gone:
        return None
    return RuleResult({}, shifted(layout, gone))


def shifted(layout: Shard, gone: Sequence[int]) -> Shard:
    """Return the cut of a tensor without the dimensions `gone`, which do not include the sharded
    one."""
    dim = layout.dim - sum(1 for other in gone if other < layout.dim)
    return Shard(dim, layout.axis, layout.outer, layout.pieces)


def _times(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] * b[0], a[1] + b[1]


def _over(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int] | None:
    """Return the exact quotient of two products of sizes; None where it does not exist."""
    if b[0] == 0 or a[0] % b[0] or a[1] < b[1]:
        return None
    return a[0] // b[0], a[1] - b[1]
