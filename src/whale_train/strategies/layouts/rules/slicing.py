"""Rules for operations that split a tensor, pick from it, or join several.

All of them are linear, so a partial sum passes through. A sharded dimension may be split at the
ends of its pieces.
"""

from whale_train.strategies.graph.operation_graph import Ref, Size
from whale_train.strategies.layouts.rules.views import moved, shifted
from whale_train.strategies.layouts.types import (
    Layout,
    P,
    PartialByRow,
    PartialSum,
    R,
    RuleInput,
    RuleResult,
    Shard,
    dimension,
    flat_pieces,
    shard,
)

LISTS = ("split.Tensor", "split_with_sizes.default", "chunk.default", "tensor_split.sections")


def narrow(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a range of one dimension. The range may be along an unsharded
    dimension, or cover all of the sharded one or an integer number of its pieces."""
    along = dimension(typed.argument(1, 0), len(typed.shape(0)))
    extent = typed.shape(0)[along]
    start, length = _range(typed, along)
    if length == extent:
        return moved(typed, {})
    return _taken(typed, along, start, length.fixed)


def take_apart(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a split into a list of ranges of one dimension. The list has the layout
    of the tensor; `item` derives the layout of each part."""
    layout, along = typed.only, _list_dim(typed)
    if isinstance(layout, PartialSum):
        return RuleResult({}, layout if along else P)  # a split along dim 0 loses the owners
    if not isinstance(layout, Shard):
        return None
    if layout.dim == along:
        edges = {0}
        for piece in flat_pieces(layout) or ():
            edges.add(max(edges) + piece)
        sizes = part_sizes(typed)
        if sizes is None or not {sum(sizes[:i]) for i in range(len(sizes))} <= edges:
            return None
    return RuleResult({}, layout)


def item(typed: RuleInput) -> RuleResult | None:
    """Derive the layout of one part of a list of tensors."""
    source, number = typed.graph[typed.value(0)], typed.argument(1)
    layout = typed.only
    assert isinstance(number, int)
    apart = RuleInput(source, {source.inputs[0]: layout}, typed.graph, typed.gradients)
    kind = source.target.removeprefix("aten.")
    if isinstance(layout, PartialSum):
        return RuleResult({}, layout)
    if not isinstance(layout, Shard):
        return None
    if kind == "unbind.int":
        along = dimension(apart.argument(1, 0), len(apart.shape(0)))
        return RuleResult({}, shifted(layout, (along,)))
    if kind not in LISTS:
        return RuleResult({}, layout)  # values and indices of a search along another dimension
    along = _list_dim(apart)
    if layout.dim != along:
        return RuleResult({}, layout)
    sizes = part_sizes(apart)
    assert sizes is not None
    gives = _sub_pieces(layout, sum(sizes[:number]), sizes[number])
    return RuleResult({}, gives) if gives else None


def unbind(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of the list of all indices of a dimension, which the parts lose."""
    along = dimension(typed.argument(1, 0), len(typed.shape(0)))
    layout = typed.only
    if isinstance(layout, Shard) and layout.dim == along:
        return None
    return RuleResult({}, P if isinstance(layout, PartialSum) else layout)


def cat(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a concatenation. The tensors are sharded alike along another dimension,
    or each is sharded along the joined one."""
    along = dimension(typed.argument(1, 0, "dim"), typed.rank)
    # An empty tensor of one dimension may be joined to any other (a legacy of torch).
    parts = [x for x in _parts(typed) if typed.graph[x].shape != (Size(0),)]
    layouts = [typed.layouts[name] for name in parts]
    if all(isinstance(x, PartialSum) for x in layouts):
        return RuleResult({}, P)
    if any(not isinstance(x, Shard) for x in layouts) and any(
        isinstance(x, Shard) and x.dim == along for x in layouts
    ):
        return None
    cuts = [x for x in layouts if isinstance(x, Shard)]
    if not cuts or any(x.dim != cuts[0].dim for x in cuts):
        return None
    first = cuts[0]
    unite = tuple((first.axis, x.axis) for x in cuts[1:] if x.axis != first.axis)
    if first.dim == along:
        flat = [flat_pieces(x) for x in cuts]
        if any(pieces is None for pieces in flat):
            return None
        joined = [piece for pieces in flat for piece in pieces or ()]
        return RuleResult({}, shard(along, first.axis, joined), unite=unite)
    if any((x.outer, x.pieces) != (first.outer, first.pieces) for x in cuts):
        return None
    return RuleResult(
        dict.fromkeys((n for n in parts if not _is_cut(typed, n)), first), first, "", unite
    )


def stack(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of tensors that are joined along a new dimension. All are partial sums, or
    all are sharded alike."""
    new = dimension(typed.argument(1, 0, "dim"), typed.rank)
    parts = _parts(typed)
    layouts = [typed.layouts[name] for name in parts]
    if all(isinstance(x, PartialSum) for x in layouts):
        return RuleResult({}, P)
    cuts = [x for x in layouts if isinstance(x, Shard)]
    if not cuts:  # partial sums and unsharded tensors
        return None
    first = cuts[0]
    if any((x.dim, x.outer, x.pieces) != (first.dim, first.outer, first.pieces) for x in cuts):
        return None
    unite = tuple((first.axis, x.axis) for x in cuts[1:] if x.axis != first.axis)
    wants = dict.fromkeys((n for n in parts if not _is_cut(typed, n)), first)
    gives = Shard(first.dim + (new <= first.dim), first.axis, first.outer, first.pieces)
    return RuleResult(wants, gives, "", unite)


def index(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of rows that unsharded index tensors pick, along an unsharded
    dimension."""
    picks = typed.argument(1)
    assert isinstance(picks, tuple)
    pickers = [x.name for x in picks if isinstance(x, Ref)]
    wants: dict[str, Layout] = dict.fromkeys(pickers, R)
    layout = typed.only
    if isinstance(layout, PartialSum):
        return RuleResult(wants, P)
    dims = [dim for dim, x in enumerate(picks) if x is not None]
    if not isinstance(layout, Shard) or len(dims) != 1 or layout.dim == dims[0]:
        return None
    grown = len(typed.graph[pickers[0]].shape or ()) - 1
    dim = layout.dim + (grown if layout.dim > dims[0] else 0)
    return RuleResult(wants, Shard(dim, layout.axis, layout.outer, layout.pieces))


def index_select(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of the rows of one dimension that an unsharded index tensor picks."""
    along = dimension(typed.argument(1), typed.rank)
    wants: dict[str, Layout] = {typed.value(2): R}
    layout = typed.only
    if isinstance(layout, PartialSum):
        return RuleResult(wants, P)
    cut = isinstance(layout, Shard) and layout.dim != along
    return RuleResult(wants, layout) if cut else None


def gather(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of elements that are picked along one dimension. The index tensor is
    sharded like the tensor, and has the same extent along the sharded dimension."""
    along = dimension(typed.argument(1), typed.rank)
    layout, picker = typed.only, typed.value(2)
    if not isinstance(layout, Shard) or layout.dim == along:
        return None
    alike = typed.shape(0)[layout.dim] == typed.shape(2)[layout.dim]
    return RuleResult({picker: layout}, layout) if alike else None


def pad(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of padding along the last dimensions, by a constant or by the tensor's own
    elements."""
    amounts = typed.argument(1)
    assert isinstance(amounts, tuple)
    padded = {typed.rank - 1 - i // 2 for i, amount in enumerate(amounts) if amount != 0}
    layout = typed.only
    return (
        RuleResult({}, layout) if isinstance(layout, Shard) and layout.dim not in padded else None
    )


def part_sizes(typed: RuleInput) -> list[int] | None:
    """Return the lengths of the parts that a list operation gives; None where they depend on the
    batch."""
    extent = typed.shape(0)[_list_dim(typed)]
    if extent.per_sample:
        return None
    given = typed.argument(1)
    if isinstance(given, tuple):
        return (
            [x for x in given if isinstance(x, int)]
            if all(isinstance(x, int) for x in given)
            else None
        )
    if not isinstance(given, int):
        return None
    kind = typed.operation.target.removeprefix("aten.")
    size = -(-extent.fixed // given) if kind == "chunk.default" else given
    if kind == "tensor_split.sections":
        shortest, more = divmod(extent.fixed, given)
        return [shortest + (i < more) for i in range(given)]
    return [min(size, extent.fixed - start) for start in range(0, extent.fixed, size)]


def _list_dim(typed: RuleInput) -> int:
    return dimension(typed.argument(2, 0, "dim"), len(typed.shape(0)))


def _parts(typed: RuleInput) -> list[str]:
    given = typed.argument(0)
    assert isinstance(given, tuple)
    return [x.name for x in given if isinstance(x, Ref)]


def _is_cut(typed: RuleInput, name: str) -> bool:
    return isinstance(typed.layouts[name], Shard)


def _range(typed: RuleInput, along: int) -> tuple[int, Size]:
    """Return the start of a slice, and the length that export gives. The start is -1 where it is
    unknown, or where the slice has a step."""
    length = (typed.operation.shape or ())[along]
    start = typed.argument(2, 0)
    if typed.argument(4, 1) != 1 or not isinstance(start, int):
        return -1, length
    if start < 0:
        start += typed.shape(0)[along].fixed
    return start, length


def _taken(typed: RuleInput, along: int, start: int, length: int) -> RuleResult | None:
    layout = typed.only
    if isinstance(layout, PartialSum):
        return RuleResult({}, layout if isinstance(layout, PartialByRow) and along else P)
    if not isinstance(layout, Shard):
        return None
    if layout.dim != along:
        return RuleResult({}, layout)
    gives = _sub_pieces(layout, start, length) if start >= 0 else None
    return RuleResult({}, gives) if gives else None


def _sub_pieces(layout: Shard, start: int, length: int) -> Shard | None:
    """Return the layout of the range [start, start + length) if it consists of complete pieces;
    else None."""
    flat = flat_pieces(layout)
    position, inside_range = 0, []
    for piece in flat or ():
        if start <= position and position + piece <= start + length:
            inside_range.append(piece)
        position += piece
    inside = bool(inside_range) and sum(inside_range) == length
    return shard(layout.dim, layout.axis, inside_range) if inside else None
