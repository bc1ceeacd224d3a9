"""Layout rules of a group whose members divide the positions of a sequence.

Weights are whole, so these rules differ from those of `layouts/rules` where the latter prefer to
shard by a weight: lookups and products begin the division of positions, keys and values meet whole
rows of queries, and a loss is a partial sum over positions. All other operations follow the common
rules.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from whale_train.strategies.graph.operation_graph import Operation, Shape
from whale_train.strategies.layouts.propagation import RULES
from whale_train.strategies.layouts.rules.matmul import addmm, baddbmm, einsum, linear, matmul
from whale_train.strategies.layouts.types import (
    ENTERED,
    GATHERED,
    HEADS,
    RING,
    Layout,
    P,
    R,
    RuleInput,
    RuleResult,
    Shard,
)

CONTEXT = "context"  # the name of the axis of positions, before their number
CONTEXT_ATTENTION = (GATHERED, HEADS, RING)
ATTENTION = "aten.scaled_dot_product_attention.default"
_OPERANDS = {linear: (0, 1), addmm: (1, 2), matmul: (0, 1), baddbmm: (1, 2)}
_LOSSES = ("aten.cross_entropy_loss.default", "aten.nll_loss.default", "aten.nll_loss_nd.default")


@dataclass(frozen=True)
class ContextRules:
    """The rules of a group of `members`.

    owner: the prefix of the names of axes ('' for the only stage).
    attention: returns the way in which an attention is divided: GATHERED, HEADS or RING.
    """

    members: int
    owner: str
    attention: Callable[[Operation], str]

    def by_position(self, shape: Shape | None) -> Shard | None:
        """Return the layout that divides a value [batch, positions, width] by positions; None for a
        value of another shape, or with fewer positions than members."""
        if shape is None or len(shape) != 3 or not shape[0].per_sample:
            return None
        return self.cut(shape, 1)

    def cut(self, shape: Shape, dim: int) -> Shard | None:
        """Return the layout that divides dimension `dim` of a value of `shape`; None where it
        depends on the batch, or is shorter than the number of members."""
        size = shape[dim]
        if size.per_sample or size.fixed < max(self.members, 2):
            return None
        return Shard(dim, f"{self.owner}{CONTEXT}.{size.fixed}", 1, (size.fixed,))

    def result(self, typed: RuleInput) -> RuleResult | None:
        """Return the rule's result for an operation; None where no rule applies."""
        target = typed.operation.target
        rule = RULES.get(target)
        if target == "aten.embedding.default":
            return self._lookup(typed)
        if target == ATTENTION:
            return self._attention(typed)
        if target in _LOSSES:
            return _loss(typed)
        if rule in _OPERANDS:
            return self._product(typed, *_OPERANDS[rule])
        if rule is einsum:
            return _rows_of_first(typed, _names_of_einsum(typed))
        if all(layout == R for layout in typed.layouts.values()):
            return RuleResult({}, R)
        return rule(typed) if rule else None

    def _lookup(self, typed: RuleInput) -> RuleResult | None:
        """Derive the layouts of a lookup: the numbers of rows are divided by their last
        dimension."""
        ids = typed.value(1)
        shape, layout = typed.graph[ids].shape or (), typed.layouts[ids]
        if typed.argument(3) or typed.layout(0) != R:
            return None
        if layout == R and shape:
            seeded = self.cut(shape, len(shape) - 1)
            return RuleResult({ids: seeded}, seeded) if seeded else RuleResult({}, R)
        return RuleResult({}, layout) if isinstance(layout, Shard) else None

    def _product(self, typed: RuleInput, first: int, second: int) -> RuleResult | None:
        """Derive the layouts of a product, which divides the positions of its first operand where
        that is a whole value [batch, positions, width]."""
        left, right = typed.value(first), typed.value(second)
        begun: dict[str, Layout] = {}
        if all(layout == R for layout in typed.layouts.values()):
            cut = self.by_position(typed.graph[left].shape)
            if cut is None or left == right:
                return RuleResult({}, R)
            begun = {left: cut}
        result = _rows_of_first(replace(typed, layouts={**typed.layouts, **begun}), (left, right))
        return replace(result, wants={**begun, **result.wants}) if result else None

    def _attention(self, typed: RuleInput) -> RuleResult | None:
        """Derive the layouts of scaled dot-product attention whose queries are divided by
        positions."""
        query, key, value = (typed.value(i) for i in range(3))
        if all(layout == R for layout in typed.layouts.values()):
            return RuleResult({}, R)
        rank, cut = typed.rank, typed.layouts[query]
        if not isinstance(cut, Shard) or cut.dim != rank - 2 or len(cut.pieces) != 1:
            return None
        how, wants = self.attention(typed.operation), dict[str, Layout]()
        for name in (key, value):
            shape = typed.graph[name].shape or ()
            other = self.cut(shape, len(shape) - 2) if how != GATHERED else None
            if how != GATHERED and other is None:
                return None
            wants[name] = other or ENTERED
        mask = typed.value(3, "attn_mask")
        if mask:
            shape = typed.graph[mask].shape or ()
            rows = len(shape) > 1 and shape[-2] == typed.shape(0)[-2] and how == GATHERED
            wants[mask] = Shard(len(shape) - 2, cut.axis, 1, cut.pieces) if rows else ENTERED
        return RuleResult(wants, cut, how)


def _names_of_einsum(typed: RuleInput) -> tuple[str, str]:
    first, second = (list(typed.shapes) * 2)[:2]
    return first, second


def _rows_of_first(typed: RuleInput, operands: tuple[str, str]) -> RuleResult | None:
    """Derive the layouts of a product by the common rule. Where both operands are divided, and the
    first along a dimension that the result keeps, the second is gathered: rows of queries meet all
    keys."""
    left, right = operands
    rule, cut = RULES[typed.operation.target], typed.layouts[left]
    contracted = isinstance(cut, Shard) and cut.dim == len(typed.graph[left].shape or ()) - 1
    both = left != right and isinstance(cut, Shard) and isinstance(typed.layouts[right], Shard)
    same_batch = both and _is_batch(typed, left, right)
    if not both or contracted or same_batch:
        return rule(typed)
    result = rule(replace(typed, layouts={**typed.layouts, right: R}))
    return replace(result, wants={right: ENTERED, **result.wants}) if result else None


def _is_batch(typed: RuleInput, left: str, right: str) -> bool:
    """Return True if both operands are divided along the same leading dimension of a batch of
    products."""
    first, second = typed.layouts[left], typed.layouts[right]
    assert isinstance(first, Shard)
    assert isinstance(second, Shard)
    ranks = [len(typed.graph[name].shape or ()) for name in (left, right)]
    return ranks[0] == ranks[1] > 2 and first.dim == second.dim < ranks[0] - 2


def _loss(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a loss of logits [rows, classes, ..] whose rows or further dimensions
    are divided: the targets are divided alike, and a mean or sum is a partial sum. The runtime
    makes a mean over all targets of it (`runtime/loss/graph_losses.py`)."""
    layout, target = typed.only, typed.value(1)
    if all(x == R for x in typed.layouts.values()):
        return RuleResult({}, R)
    if not isinstance(layout, Shard):
        return None
    rank = len(typed.shape(0))
    if rank < 2 or layout.dim == 1:
        return None
    by_class = len(typed.graph[target].shape or ()) < rank
    dim = layout.dim - (1 if by_class and layout.dim > 1 else 0)
    cut = Shard(dim, layout.axis, layout.outer, layout.pieces)
    wants: dict[str, Layout] = {target: cut}
    if weight := typed.value(2, "weight"):
        wants[weight] = ENTERED
    keeps_rows = typed.argument(3, 1, "reduction") == 0
    return RuleResult(wants, cut if keeps_rows else P)
