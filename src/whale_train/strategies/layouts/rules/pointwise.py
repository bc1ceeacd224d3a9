"""Rules for elementwise operations, which pass shards and partial sums through."""

from whale_train.strategies.graph.operation_graph import WEIGHTS, Shape
from whale_train.strategies.layouts.types import (
    ENTERED,
    Layout,
    P,
    PartialByRow,
    PartialSum,
    R,
    Replicated,
    RuleInput,
    RuleResult,
    Shard,
    product,
)

# Operations that may run before a partial sum is reduced instead of after, by their effect on it.
_SUMS = ("add.Tensor", "add_.Tensor", "sub.Tensor", "sub_.Tensor")
_SCALES = ("mul.Tensor", "mul_.Tensor", "div.Tensor", "div_.Tensor", "mul.Scalar", "div.Scalar")
_COPIES = (
    "neg.default", "contiguous.default", "clone.default", "alias.default", "detach.default",
    "lift_fresh_copy.default",
)  # fmt: skip
_CASTS = ("to.dtype", "to.dtype_layout", "to.device", "_to_copy.default", "float.default")
# Further operations that map zeros to zeros.
_KEEPS_ZERO = (
    "silu.default", "gelu.default", "relu.default", "tanh.default", "abs.default",
    "dropout.default", "leaky_relu.default", "sin.default", "square.default",
)  # fmt: skip


def pointwise(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of an elementwise operation.

    Every tensor of the result's shape is sharded alike. A tensor that lacks the sharded dimension
    (or has extent 1 there) enters unsharded. A partial sum is passed on where that is exact;
    otherwise it is reduced first.
    """
    if typed.operation.target == "aten.type_as.default":  # the second argument gives only its dtype
        return _like_first(typed)
    if any(isinstance(x, Shard) for x in typed.layouts.values()):
        return _cut(typed)
    if any(isinstance(x, PartialSum) for x in typed.layouts.values()):
        return _owned(typed) or _partial(typed)
    return None


def _cut(typed: RuleInput) -> RuleResult | None:
    shapes = typed.shapes
    cuts = {
        (layout.dim - len(shapes[name]), shapes[name][layout.dim], layout.outer, layout.pieces)
        for name, layout in typed.layouts.items()
        if isinstance(layout, Shard)
    }
    if len(cuts) != 1:
        return None
    ((from_end, extent, outer, pieces),) = cuts
    axes = [x.axis for x in typed.layouts.values() if isinstance(x, Shard)]

    def has_cut(shape: Shape) -> bool:
        return len(shape) >= -from_end and shape[from_end] == extent

    if not has_cut(typed.operation.shape or ()):
        return None
    wants: dict[str, Layout] = {}
    for name, layout in typed.layouts.items():
        if not isinstance(layout, Shard) and name in shapes:
            cut = Shard(len(shapes[name]) + from_end, axes[0], outer, pieces)
            wants[name] = cut if has_cut(shapes[name]) else ENTERED
    unite = tuple((axes[0], axis) for axis in axes[1:] if axis != axes[0])
    return RuleResult(wants, Shard(typed.rank + from_end, axes[0], outer, pieces), unite=unite)


def _partial(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of sums of partial sums, and of operations that scale or copy one. A
    parameter that is added (a bias) is added once, on one rank."""
    kind = typed.operation.target.removeprefix("aten.")
    sums = {name for name, x in typed.layouts.items() if isinstance(x, PartialSum)}
    others = [name for name in typed.shapes if name not in sums]
    passes = RuleResult(dict.fromkeys(others, ENTERED), P)
    if kind in _COPIES or (kind in _CASTS and _same_dtype(typed)) or _is_idle_dropout(typed):
        return RuleResult({}, P)
    if kind in _SUMS and _grows(typed, sums):
        return None
    if kind in _SUMS and len(typed.shapes) == len(typed.operation.args):
        if not others:
            return passes
        if all(typed.graph[name].target in WEIGHTS for name in others):
            return RuleResult(dict.fromkeys(others, P), P)
    if kind in _SCALES and sums == {typed.value(0)} and typed.value(1) != typed.value(0):
        small = all(_fewer(typed, name, typed.value(0)) for name in others)
        return passes if small and not _grows(typed, sums) else None
    if kind.startswith("mul") and sums == {typed.value(1)} and typed.value(0) != typed.value(1):
        small = all(_fewer(typed, name, typed.value(1)) for name in others)
        return passes if small and not _grows(typed, sums) else None
    return None


def _owned(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of an operation that maps zeros to zeros, so that rows which are zero on
    all ranks but one stay zero there."""
    kind = typed.operation.target.removeprefix("aten.")
    layouts = {x for x in typed.layouts.values() if not isinstance(x, Replicated)}
    (layout,) = layouts if len(layouts) == 1 else (R,)
    if not isinstance(layout, PartialByRow):
        return None
    unsharded = [name for name, x in typed.layouts.items() if x == R and name in typed.shapes]
    divides = kind.startswith("div") and len(typed.shapes) > 1  # zeros by zeros, perhaps
    kinds = (*_KEEPS_ZERO, *_COPIES, *_CASTS, *_SCALES)
    if kind in kinds and typed.layout(0) == layout and not divides:
        return RuleResult(dict.fromkeys(unsharded, ENTERED), layout)
    return None


def _like_first(typed: RuleInput) -> RuleResult | None:
    layout = typed.layout(0)
    return RuleResult({}, layout if not isinstance(layout, PartialSum) else P)


def _same_dtype(typed: RuleInput) -> bool:
    return typed.operation.dtype == typed.graph[typed.value(0)].dtype


def _is_idle_dropout(typed: RuleInput) -> bool:
    return typed.operation.target == "aten.dropout.default" and typed.argument(1) == 0.0


def _grows(typed: RuleInput, names: set[str]) -> bool:
    """Return True if the result is larger than each of its partial sums."""
    result = product(typed.operation.shape or ())
    return all(product(typed.graph[name].shape or ()) != result for name in names)


def _fewer(typed: RuleInput, name: str, than: str) -> bool:
    """Return True if `name` needs no gradient, or has at most half the elements of `than`. Reducing
    the gradient of `name` later is then cheaper than reducing `than` at once."""
    if name not in typed.gradients:
        return True
    coefficient, power = product(typed.graph[name].shape or ())
    other, other_power = product(typed.graph[than].shape or ())
    return power < other_power or (power == other_power and 2 * coefficient <= other)
