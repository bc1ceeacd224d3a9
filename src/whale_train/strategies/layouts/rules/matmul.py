"""Rules for products of two tensors: linear layers, matrix products, convolutions, attention.

A product has one label for each dimension, as in einsum. Sharding a label of the result shards the
result. Sharding a contracted label, equally in both operands, leaves a partial sum. Each rule
returns the layouts that an operation wants and gives, or None where it has no rule for the layouts
of its inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from whale_train.strategies.graph.operation_graph import Ref, Size
from whale_train.strategies.layouts.types import (
    BATCH,
    ENTERED,
    Layout,
    P,
    PartialByRow,
    PartialSum,
    R,
    RuleInput,
    RuleResult,
    Shard,
)

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Term:
    """An operand of a product, and the label of each of its dimensions."""

    name: str
    labels: Labels


@dataclass(frozen=True)
class Product:
    """A product of two terms.

    left: the first operand.
    right: the second operand.
    out: the labels of the result.
    added: the term that is added to the product; its name is '' for none.
    """

    left: Term
    right: Term
    out: Labels
    added: Term


NO_TERM = Term("", ())


def linear(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a linear layer: x [.., in] times weight [out, in], plus bias [out]."""
    rows = _letters(typed.rank - 1)
    return contract(
        typed,
        Product(
            Term(typed.value(0), (*rows, "in")),
            Term(typed.value(1), ("out", "in")),
            (*rows, "out"),
            Term(typed.value(2, "bias"), ("out",)),
        ),
    )


def addmm(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a bias plus x [row, in] times weight [in, out] (Hugging Face's
    Conv1D)."""
    out = ("row", "out")
    bias = out[-len(typed.shape(0)) :] if typed.shape(0) else ()
    left, right = Term(typed.value(1), ("row", "in")), Term(typed.value(2), ("in", "out"))
    return contract(typed, Product(left, right, out, Term(typed.value(0), bias)))


def matmul(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a matrix product of the last two dimensions. The dimensions before them
    are broadcast, as in NumPy."""
    left, right = len(typed.shape(0)), len(typed.shape(1))
    if left < 2 or right < 2:
        return None
    batch = _letters(max(left, right) - 2)
    first = (*batch[len(batch) - left + 2 :], "row", "in")
    second = (*batch[len(batch) - right + 2 :], "in", "out")
    terms = Term(typed.value(0), first), Term(typed.value(1), second)
    return contract(typed, Product(*terms, (*batch, "row", "out"), NO_TERM))


def baddbmm(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a batch of matrix products, added to the first argument."""
    out = ("batch", "row", "out")
    added = Term(typed.value(0), out[3 - len(typed.shape(0)) :])
    left = Term(typed.value(1), ("batch", "row", "in"))
    return contract(typed, Product(left, Term(typed.value(2), ("batch", "in", "out")), out, added))


def einsum(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a product of two tensors whose equation has one letter for each
    dimension."""
    equation, operands = typed.argument(0), typed.argument(1)
    names = [x.name for x in operands if isinstance(x, Ref)] if isinstance(operands, tuple) else []
    if not isinstance(equation, str) or "->" not in equation or "." in equation or len(names) != 2:
        return None
    inputs, out = equation.replace(" ", "").split("->")
    left, right = inputs.split(",")
    if any(len(set(labels)) < len(labels) for labels in (left, right)):
        return None  # a diagonal
    terms = Term(names[0], tuple(left)), Term(names[1], tuple(right))
    return contract(typed, Product(*terms, tuple(out), NO_TERM))


def convolution(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a convolution of x [N, in, ..] with weight [out, in / groups, ..],
    sharded by channels."""
    if typed.argument(6, 1, "groups") != 1:
        return _grouped(typed)
    return _by_channel(typed, ("out", "in"))


def transposed_convolution(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a transposed convolution of x [N, in, ..] with weight [in, out /
    groups, ..], sharded by channels. A grouped one has no rule."""
    return _by_channel(typed, ("in", "out")) if typed.argument(6, 1, "groups") == 1 else None


def _by_channel(typed: RuleInput, channels: Labels) -> RuleResult | None:
    space = range(typed.rank - 2)
    left = Term(typed.value(0), ("sample", "in", *(f"from{i}" for i in space)))
    right = Term(typed.value(1), (*channels, *(f"window{i}" for i in space)))
    out = ("sample", "out", *(f"to{i}" for i in space))
    return contract(typed, Product(left, right, out, Term(typed.value(2, "bias"), ("out",))))


def _grouped(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a grouped convolution, sharded by groups: the channels of a group
    depend only on each other."""
    groups = typed.argument(6, 1, "groups")
    assert isinstance(groups, int)
    x, weight, bias = typed.value(0), typed.value(1), typed.value(2, "bias")
    ins, outs = (typed.shape(i)[d].fixed // groups for i, d in ((0, 1), (1, 0)))
    cuts = [(typed.layouts[x], 1, ins), (typed.layouts[weight], 0, outs)]
    by_group = [
        (cut.axis, cut.outer, tuple(piece // width for piece in cut.pieces))
        for cut, dim, width in cuts
        if isinstance(cut, Shard)
        and cut.dim == dim
        and cut.pieces
        and not any(piece % width for piece in cut.pieces)
    ]
    if not by_group or len(by_group) < sum(isinstance(cut, Shard) for cut, _, _ in cuts):
        return None
    axis, outer, pieces = by_group[0]
    if any(other[1:] != (outer, pieces) for other in by_group):
        return None
    channels = Shard(1, axis, outer, tuple(piece * ins for piece in pieces))
    rows = Shard(0, axis, outer, tuple(piece * outs for piece in pieces))
    wants: dict[str, Layout] = {x: channels, weight: rows}
    if bias:
        wants[bias] = rows
    unite = tuple((axis, other[0]) for other in by_group[1:] if other[0] != axis)
    gives = Shard(1, axis, outer, rows.pieces)
    return RuleResult(wants, gives, "", unite, tuple((axis, piece) for piece in pieces))


def grouped_mm(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of the product of each row of x, sorted by expert, with the weight of its
    expert [experts, in, out].

    The third argument holds the end offsets of each expert's rows. Sharded by experts, a rank
    computes the rows of its own experts: it picks them out of all rows, or holds no others. Sharded
    along another dimension, it is a product like any other.
    """
    weight, x, ends = typed.layout(1), typed.layout(0), typed.value(2, "offs")
    if isinstance(weight, Shard) and weight.dim == 0:
        if isinstance(x, Shard) and (x.dim, x.axis) == (0, weight.axis):
            return RuleResult({}, x, "own_grouped_mm")
        wants: dict[str, Layout] = {ends: R, typed.value(0): ENTERED}
        unite: tuple[tuple[str, str], ...] = ()
        if isinstance(x, PartialByRow) and x.rows == ends:
            wants[typed.value(0)] = x
            unite = ((x.axis, weight.axis),) if x.axis != weight.axis else ()
        if weight.outer != 1 or len(weight.pieces) > 1:
            return None
        return RuleResult(wants, PartialByRow(weight.axis, ends), "split_grouped_mm", unite)
    if len(typed.shape(1)) != 3:
        return None
    left, right = Term(typed.value(0), ("row", "in")), Term(typed.value(1), ("expert", "in", "out"))
    return contract(typed, Product(left, right, ("row", "out"), NO_TERM))


def attention(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of scaled dot-product attention of values [batch, heads, tokens, width],
    sharded by heads or by samples. Where keys and values have fewer heads, groups of query heads
    share them."""
    names = [typed.value(i) for i in range(3)]
    cuts = {name: x for name in names if isinstance(x := typed.layouts[name], Shard)}
    if not cuts:
        return None
    shapes = {name: typed.graph[name].shape or () for name in names}
    query = names[0]
    dim = next(iter(cuts.values())).dim
    if any(x.dim != dim for x in cuts.values()) or dim >= typed.rank - 2:
        return None
    heads = shapes[query][dim]
    if query in cuts:
        of_query = cuts[query]
    else:
        name, cut = next(iter(cuts.items()))
        of_query = _per_head(cut, shapes[name][dim], heads)[0] or cut
    wants: dict[str, Layout] = {}
    coarsen: list[tuple[str, int]] = []
    for name in names:
        wanted, extents = _per_head(of_query, heads, shapes[name][dim])
        if wanted is None:
            return None
        own_cut = cuts.get(name, wanted)
        if (own_cut.outer, own_cut.pieces) != (wanted.outer, wanted.pieces):
            return None
        wants[name] = own_cut
        coarsen += [(wanted.axis, extent) for extent in extents]
    mask = typed.value(3, "attn_mask")
    if mask:
        shape = typed.graph[mask].shape or ()
        at = dim - typed.rank + len(shape)
        has_cut = at >= 0 and shape[at] == heads
        cut_mask = Shard(at, of_query.axis, of_query.outer, of_query.pieces)
        laid = typed.layouts[mask]
        if isinstance(laid, Shard):
            if not has_cut or (laid.dim, laid.outer, laid.pieces) != (
                at, of_query.outer, of_query.pieces
            ):  # fmt: skip
                return None
            cuts[mask] = laid
        else:
            wants[mask] = cut_mask if has_cut else ENTERED
    axes = [cut.axis for cut in cuts.values() if cut.axis != of_query.axis]
    unite = tuple((of_query.axis, axis) for axis in axes)
    return RuleResult(wants, of_query, "", unite, tuple(coarsen))


def _per_head(cut: Shard, extent: Size, wanted: Size) -> tuple[Shard | None, tuple[int, ...]]:
    """Return a cut of `extent` heads as the cut of `wanted` heads, and the extents that the units
    of its axis must then divide. The cut is None where the pieces are not integers."""
    if extent == wanted:
        return cut, ()
    if extent.per_sample or wanted.per_sample or not cut.pieces:
        return None, ()
    scaled = [piece * wanted.fixed for piece in cut.pieces]
    if any(piece % extent.fixed for piece in scaled):
        return None, ()
    pieces = tuple(piece // extent.fixed for piece in scaled)
    return Shard(cut.dim, cut.axis, cut.outer, pieces), pieces


def contract(typed: RuleInput, equation: Product) -> RuleResult | None:
    """Derive the layouts of a product of two terms, by the common rule of all products: the sharded
    label determines the layout of every term."""
    left, right = equation.left, equation.right
    cuts = [(term, x) for term in (left, right) if isinstance(x := typed.layouts[term.name], Shard)]
    if not cuts:
        return _only_added(typed, equation)
    term, cut = cuts[-1]  # where the two differ, the second operand's (a weight's) is kept
    label = term.labels[cut.dim]
    summed = label not in equation.out
    if summed and not (label in left.labels and label in right.labels):
        return None  # a convolution's window
    if cut.axis == BATCH and all(operand != right for operand, _ in cuts):
        return None  # samples are gathered for unsharded weights
    added = equation.added.name
    if summed and added and isinstance(typed.layouts[added], Shard):
        return None
    unite: tuple[tuple[str, str], ...] = ()
    wants: dict[str, Layout] = {}
    extent = (typed.graph[term.name].shape or ())[cut.dim]
    for other in (left, right):
        if other == term:
            continue
        laid = typed.layouts[other.name]
        at = other.labels.index(label) if label in other.labels else -1
        shape = typed.graph[other.name].shape or ()
        if at < 0 or shape[at] != extent:
            wants[other.name] = ENTERED
        elif not isinstance(laid, Shard) or laid.dim != at:
            wants[other.name] = Shard(at, cut.axis, cut.outer, cut.pieces)
        elif (laid.outer, laid.pieces) != (cut.outer, cut.pieces):
            return None
        elif laid.axis != cut.axis:
            unite = ((cut.axis, laid.axis),)
    gives: Layout = P
    if label in equation.out:
        gives = Shard(equation.out.index(label), cut.axis, cut.outer, cut.pieces)
    if equation.added.name:
        wants[equation.added.name] = _added(typed, equation.added, label, cut, extent, gives)
    return RuleResult(wants, gives, "", unite)


def _added(
    typed: RuleInput, added: Term, label: str, cut: Shard, extent: Size, gives: Layout
) -> Layout:
    if gives == P:
        return P  # added once, on the first rank alone
    shape = typed.graph[added.name].shape or ()
    at = added.labels.index(label) if label in added.labels else -1
    if at >= 0 and shape[at] == extent:
        return Shard(at, cut.axis, cut.outer, cut.pieces)
    return ENTERED


def _only_added(typed: RuleInput, equation: Product) -> RuleResult | None:
    """Derive the layouts of a product of unsharded operands, after its partial sums are reduced."""
    partial = [name for name, x in typed.layouts.items() if isinstance(x, PartialSum)]
    cut = any(isinstance(x, Shard) for x in typed.layouts.values())
    return RuleResult(dict.fromkeys(partial, R), R) if partial and not cut else None


def _letters(count: int) -> Sequence[str]:
    return tuple(f"batch{i}" for i in range(count))
