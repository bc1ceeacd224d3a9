"""Layouts are types, collectives are casts: how each value of the graph lies over a group.

A value is replicated (R), a partial sum (P) or sharded (S). A rule per operation family says,
from the layouts that come in, which layouts the operation wants and which one comes out. Where a
value does not have the layout wanted, a cast is inserted; each cast is one collective with its
adjoint (`runtime/casts.py`). An operation without a rule is given whole tensors: an unknown
model is slower, never wrong. After GSPMD (arXiv 2105.04663) and TAP (arXiv 2302.00247), on the
graph of `torch.export`.

This file owns the types, the rules and their propagation; it knows neither torch nor devices.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

from whale_train.strategies.operations import (
    Argument,
    Operation,
    OperationGraph,
    Ref,
    Shape,
    Size,
)


@dataclass(frozen=True)
class Replicated:
    """R: every rank has the whole value."""


@dataclass(frozen=True)
class Entered:
    """R whose gradient is a partial sum: what a sharded operation wants of a whole input."""


@dataclass(frozen=True)
class PartialSum:
    """P: the value is the sum of what the ranks have."""


@dataclass(frozen=True)
class Shard:
    """S: dimension `dim` is cut along `axis`, whose intervals the plan holds.

    `outer` counts the factors of the dimension before the one that is cut: a fused QKV weight
    seen as [3, heads, head_dim] and cut by heads has outer=3.
    """

    dim: int
    axis: str
    outer: int = 1


Layout = Replicated | Entered | PartialSum | Shard
R, ENTERED, P = Replicated(), Entered(), PartialSum()

BATCH = "batch"  # the axis along which replicas share the samples


@dataclass(frozen=True)
class Cast:
    """A change of layout of `value` on its way into `user`; `kind` names the collective."""

    user: str
    value: str
    kind: str
    source: Layout
    target: Layout


@dataclass(frozen=True)
class Typing:
    """What a rule answers: the layouts it wants its inputs in, and the one that comes out.

    `becomes` names the distributed operation that takes its place, where there is one.
    """

    wants: Mapping[str, Layout]
    gives: Layout
    becomes: str = ""


@dataclass(frozen=True)
class Assignment:
    """The whole region typed: each value's layout, the casts, and what was replaced. `gathered`
    are the operations given whole tensors for want of a rule (samples brought together for the
    region, such as labels, are the bridge into it and not counted)."""

    layouts: dict[str, Layout]
    casts: tuple[Cast, ...]
    becomes: dict[str, str]
    gathered: tuple[str, ...]


@dataclass(frozen=True)
class Typed:
    """An operation with what a rule may look at: its inputs' layouts and everyone's shapes."""

    operation: Operation
    layouts: Mapping[str, Layout]
    graph: OperationGraph

    def value(self, position: int) -> str:
        """The name of the value given as positional argument `position` ('' for none)."""
        args = self.operation.args
        argument = args[position] if position < len(args) else None
        return argument.name if isinstance(argument, Ref) else ""

    def layout(self, position: int) -> Layout:
        return self.layouts[self.value(position)] if self.value(position) else R

    def shape(self, position: int) -> Shape:
        return self.graph[self.value(position)].shape or ()

    def argument(self, position: int, default: Argument = None) -> Argument:
        args = self.operation.args
        return args[position] if position < len(args) else default

    @property
    def rank(self) -> int:
        return len(self.operation.shape or ())


Rule = Callable[[Typed], Typing | None]


def assign(
    graph: OperationGraph,
    region: Iterable[str],
    given: Mapping[str, Layout],
    wanted: Mapping[str, Layout] | None = None,
) -> Assignment:
    """Type the operations of `region` (in graph order).

    `given` are the layouts of parameters that are sharded and of values that come from outside;
    any other parameter, buffer or constant is R. Values named in `wanted` are cast to that layout
    for whoever takes them from the region (the cast's user is '').
    """
    layouts: dict[str, Layout] = dict(given)
    casts: list[Cast] = []
    becomes: dict[str, str] = {}
    gathered: list[str] = []
    chosen = set(region)
    for operation in graph:
        if operation.name not in chosen or operation.name in layouts:
            continue
        known = {name: layouts.get(name, R) for name in operation.inputs}
        if all(layout == R for layout in known.values()):
            layouts[operation.name] = R
            continue
        rule = RULES.get(operation.target)
        typing = rule(Typed(operation, known, graph)) if rule else None
        if typing is None:  # whole tensors: slower, never wrong
            typing = Typing(dict.fromkeys(known, R), R)
            if any(x != Shard(0, BATCH) and x != R for x in known.values()):
                gathered.append(operation.name)
        for name, layout in known.items():
            target = typing.wants.get(name, layout)
            if target != layout:
                casts.append(Cast(operation.name, name, cast_kind(layout, target), layout, target))
        layouts[operation.name] = typing.gives
        if typing.becomes:
            becomes[operation.name] = typing.becomes
    for name, target in (wanted or {}).items():
        if layouts[name] != target:
            casts.append(Cast("", name, cast_kind(layouts[name], target), layouts[name], target))
    return Assignment(layouts, tuple(casts), becomes, tuple(gathered))


def cast_kind(source: Layout, target: Layout) -> str:
    """The collective that turns one layout into another (design §7's table)."""
    match source, target:
        case Replicated(), Entered():
            return "enter"
        case PartialSum(), Replicated():
            return "reduce"
        case Shard(), Replicated():
            return "gather"
        case Replicated(), Shard():
            return "slice"
        case Shard(), Entered():
            return "gather_enter"
        case PartialSum(), Shard():
            return "reduce_scatter"
    raise AssertionError(f"no cast from {source} to {target}")


# --- Rules: one per operation family -------------------------------------------------------------


def linear(typed: Typed) -> Typing | None:
    """x [.., in] times weight [out, in]: a weight cut by rows gives a result cut by columns
    (Whale's SP1); what x is replicated over then receives a partial gradient."""
    weight = typed.layout(1)
    if not isinstance(weight, Shard) or weight.dim != 0:
        return None
    wants: dict[str, Layout] = {typed.value(0): ENTERED}
    if typed.value(2):
        wants[typed.value(2)] = Shard(0, weight.axis, weight.outer)
    return Typing(wants, Shard(typed.rank - 1, weight.axis, weight.outer))


def addmm(typed: Typed) -> Typing | None:
    """bias + x times weight [in, out] (Hugging Face's Conv1D): cut by columns."""
    weight = typed.layout(2)
    if not isinstance(weight, Shard) or weight.dim != 1:
        return None
    bias = Shard(len(typed.shape(0)) - 1, weight.axis, weight.outer)
    wants: dict[str, Layout] = {typed.value(0): bias, typed.value(1): ENTERED}
    return Typing(wants, Shard(typed.rank - 1, weight.axis, weight.outer))


def matmul(typed: Typed) -> Typing | None:
    """x [.., in] times a matrix [in, out] cut by columns."""
    weight = typed.layout(1)
    if not isinstance(weight, Shard) or len(typed.shape(1)) != 2 or weight.dim != 1:
        return None
    wants: dict[str, Layout] = {typed.value(0): ENTERED}
    return Typing(wants, Shard(typed.rank - 1, weight.axis, weight.outer))


def embedding(typed: Typed) -> Typing | None:
    """Rows of a table cut by rows: each rank looks up its own, the rest are zeros of a sum. Not
    where the gradient is scaled by how often a row is read."""
    weight = typed.layout(0)
    if not isinstance(weight, Shard) or weight.dim != 0 or weight.outer != 1 or typed.argument(3):
        return None
    return Typing({typed.value(1): R}, P, becomes="split_embedding")


def pointwise(typed: Typed) -> Typing | None:
    """One element at a time: every tensor of the result's shape must be cut alike; a tensor that
    does not have the cut dimension (or has another extent there: 1, or `type_as`'s model) enters
    whole."""
    shapes = {name: typed.graph[name].shape or () for name in typed.layouts}
    shards = {
        (shapes[name][layout.dim], layout.dim - len(shapes[name]), layout.axis, layout.outer)
        for name, layout in typed.layouts.items()
        if isinstance(layout, Shard)
    }
    if len(shards) != 1 or any(isinstance(x, PartialSum) for x in typed.layouts.values()):
        return None
    ((extent, from_end, axis, outer),) = shards

    def has_cut(shape: Shape) -> bool:
        return len(shape) >= -from_end and shape[from_end] == extent

    if not has_cut(typed.operation.shape or ()):
        return None
    wants: dict[str, Layout] = {}
    for name, layout in typed.layouts.items():
        if not isinstance(layout, Shard) and typed.graph[name].shape is not None:
            cut = Shard(len(shapes[name]) + from_end, axis, outer)
            wants[name] = cut if has_cut(shapes[name]) else ENTERED
    return Typing(wants, Shard(typed.rank + from_end, axis, outer))


def reshape(typed: Typed) -> Typing | None:
    """A view keeps the cut where the cut dimension comes out whole, whatever its neighbours do."""
    layout = typed.layout(0)
    if not isinstance(layout, Shard):
        return None
    source, target = typed.shape(0), typed.operation.shape or ()
    before = _product(source[: layout.dim])
    for dim, size in enumerate(target):
        if size == source[layout.dim] and _product(target[:dim]) == before:
            return Typing({}, Shard(dim, layout.axis, layout.outer))
    return None


def transpose(typed: Typed) -> Typing | None:
    """Two dimensions change places, and the cut with them. `aten.t` names none: it swaps 0, 1."""
    layout = typed.layout(0)
    if not isinstance(layout, Shard):
        return None
    first = _dim(typed.argument(1, 0), typed.rank)
    second = _dim(typed.argument(2, 1), typed.rank)
    swapped = {first: second, second: first}.get(layout.dim, layout.dim)
    return Typing({}, Shard(swapped, layout.axis, layout.outer))


def permute(typed: Typed) -> Typing | None:
    """The dimensions in another order."""
    layout, order = typed.layout(0), typed.argument(1)
    if not isinstance(layout, Shard) or not isinstance(order, tuple):
        return None
    places = [_dim(x, typed.rank) for x in order]
    return Typing({}, Shard(places.index(layout.dim), layout.axis, layout.outer))


def narrow(typed: Typed) -> Typing | None:
    """A range of one dimension: along any other than the cut one, or all of the cut one."""
    layout = typed.layout(0)
    if not isinstance(layout, Shard):
        return None
    whole = typed.shape(0)[layout.dim] == (typed.operation.shape or ())[layout.dim]
    along = _dim(typed.argument(1, 0), len(typed.shape(0)))
    return Typing({}, layout) if along != layout.dim or whole else None


def select(typed: Typed) -> Typing | None:
    """One index of a dimension, which goes away."""
    layout = typed.layout(0)
    if not isinstance(layout, Shard):
        return None
    along = _dim(typed.argument(1), len(typed.shape(0)))
    if along == layout.dim:
        return None
    dim = layout.dim - (along < layout.dim)
    return Typing({}, Shard(dim, layout.axis, layout.outer))


def unsqueeze(typed: Typed) -> Typing | None:
    """A new dimension of one."""
    layout = typed.layout(0)
    if not isinstance(layout, Shard):
        return None
    dim = layout.dim + (_dim(typed.argument(1), typed.rank) <= layout.dim)
    return Typing({}, Shard(dim, layout.axis, layout.outer))


def cross_entropy(typed: Typed) -> Typing | None:
    """Logits [rows, classes] cut by classes: the distributed softmax cross-entropy, without
    class weights, as a mean. Anything else is gathered."""
    layout = typed.layout(0)
    given = {**dict(zip(("weight", "reduction"), typed.operation.args[2:4], strict=False))}
    given.update(typed.operation.kwargs)
    plain = given.get("weight") is None and given.get("reduction", 1) == 1
    rows = len(typed.shape(0)) == 2 and "float" not in typed.graph[typed.value(1)].dtype
    if not (isinstance(layout, Shard) and layout.dim == 1 and layout.outer == 1 and plain and rows):
        return None
    return Typing({typed.value(1): R}, R, becomes="split_cross_entropy")


def _dim(argument: Argument, rank: int) -> int:
    assert isinstance(argument, int), argument
    return argument % rank


def _product(sizes: Iterable[Size]) -> tuple[int, int]:
    """A product of sizes as (coefficient, power of the batch), which is how views compare."""
    listed = list(sizes)
    power = sum(1 for size in listed if size.per_sample)
    return prod(size.per_sample or size.fixed for size in listed), power


def _family(rule: Rule, *targets: str) -> dict[str, Rule]:
    return {f"aten.{target}": rule for target in targets}


# fmt: off
RULES: dict[str, Rule] = {
    **_family(linear, "linear.default"),
    **_family(addmm, "addmm.default"),
    **_family(matmul, "matmul.default", "mm.default"),
    **_family(embedding, "embedding.default"),
    **_family(
        pointwise,
        "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "neg.default", "tanh.default",
        "to.dtype", "to.dtype_layout", "_to_copy.default", "type_as.default", "float.default",
        "contiguous.default", "clone.default", "alias.default", "clamp.default", "relu.default",
    ),
    **_family(reshape, "view.default", "reshape.default", "_unsafe_view.default",
              "flatten.using_ints", "unflatten.int"),
    **_family(transpose, "transpose.int", "t.default"),
    **_family(permute, "permute.default"),
    **_family(narrow, "slice.Tensor"),
    **_family(select, "select.int"),
    **_family(unsqueeze, "unsqueeze.default"),
    **_family(cross_entropy, "cross_entropy_loss.default"),
}
# fmt: on
