"""Write the casts between layouts as nodes of one rank's graph.

The plan gives the place of each cast, and its two layouts. A cast is one or two collectives of
`comms/layout_collectives.py`, or an exchange of experts' rows (`comms/expert_rows.py`).
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import SymInt, Tensor, fx

from whale_train.models.export.export import size_of
from whale_train.runtime.comms.expert_rows import (
    combine,
    combine_begin,
    combine_end,
    dispatch,
    exchange,
)
from whale_train.runtime.comms.layout_collectives import (
    ShardGroup,
    all_gather_reduce_scatter,
    copy_to_parallel_region,
    gather,
    keep_first_gradient,
    reduce,
    reduce_scatter,
    replicate_to_partial,
    reshard,
    slice_,
    slice_of_copy,
)
from whale_train.runtime.graph.shard_ops import Laid
from whale_train.runtime.graph.shard_place import ShardContext
from whale_train.runtime.graph.written_graph import WrittenGraph
from whale_train.strategies.layouts.types import BATCH, COMBINE, DISPATCH, EXCHANGE
from whale_train.strategies.plan.program import PlannedCast


class CastNodes:
    """The casts of a segment, written into `out` when an operation first needs them.

    Equal casts of one value share their nodes. `values` maps the names of the exported graph's
    values to their examples (tensors or symbolic numbers).
    """

    def __init__(
        self,
        casts: Iterable[PlannedCast],
        out: WrittenGraph,
        place: ShardContext,
        values: Mapping[str, Any],
    ) -> None:
        self.casts = {(cast.user, cast.value): cast for cast in casts}
        self._out, self._place, self._values = out, place, values
        self._nodes: dict[tuple[Any, ...], fx.Node] = {}

    def of(self, user: str, value: str) -> fx.Node | int:
        """Return the node of `value` in the layout that `user` reads.

        A number that depends on the batch size and has a cast is returned as an int: its value on
        this rank.
        """
        cast = self.casts.get((user, value))
        node = self._out.made[value]
        if cast is None:
            return node
        if isinstance(self._values[value], SymInt):
            return self._number(cast)
        if cast.kind in (DISPATCH, COMBINE):
            return self._rows_elsewhere(cast, node)
        if cast.kind == EXCHANGE:
            return self._exchanged(cast, "ends")
        if cast.kind == "reshard":
            return self._resharded(cast, node)
        key: tuple[Any, ...] = (value,)
        for kind, laid in _steps(cast):
            key = (*key, kind, laid)
            if key not in self._nodes:
                function = self._collective(kind, laid, value)
                self._nodes[key] = self._out.call(function, [node], kind)
            node = self._nodes[key]
        return node

    def _resharded(self, cast: PlannedCast, node: fx.Node) -> fx.Node:
        """Return `node` sharded along another dimension; equal reshards of one value share a
        node."""
        assert cast.source is not None
        assert cast.shard is not None
        key = (cast.value, cast.kind, cast.source, cast.shard)
        if key not in self._nodes:
            have, want = cast.source, cast.shard
            function = partial(
                reshard,
                from_dim=have.dim,
                from_outer=have.outer,
                source=self._shards(have, cast.value),
                dim=want.dim,
                outer=want.outer,
                shards=self._shards(want, cast.value),
            )
            self._nodes[key] = self._out.call(function, [node], cast.kind)
        return self._nodes[key]

    def _shards(self, laid: Laid, value: str) -> ShardGroup:
        """Return the extent of each member's shard of `value`, in the dimension that `laid`
        cuts."""
        rows = 1
        if laid.axis == BATCH:
            size = size_of(self._values[value].shape[laid.dim])
            assert size is not None
            rows = size.per_sample
        return self._place.along(laid, rows)

    def _number(self, cast: PlannedCast) -> int:
        """Return the value of a number that depends on the batch size, for this rank's samples or
        for the gathered samples."""
        size = size_of(self._values[cast.value])
        assert size is not None, cast  # the plan refuses any other number
        assert cast.shard is not None
        samples = self._place.along(cast.shard)
        return size.at(samples.total if cast.kind == "gather" else samples.size)

    def _rows_elsewhere(self, cast: PlannedCast, rows: fx.Node) -> fx.Node:
        """Return `rows` on the ranks of their experts, or back on the ranks that they came from.

        One node serves all users of a value.
        """
        key: tuple[Any, ...] = (cast.value, cast.kind)
        if key not in self._nodes:
            begun = self._nodes.get((*key, "begun"))
            if begun is not None:
                self._nodes[key] = self._out.call(combine_end, [begun], cast.kind)
                return self._nodes[key]
            function = dispatch if cast.kind == DISPATCH else combine
            where = self._exchanged(cast)
            self._nodes[key] = self._out.call(function, [rows, where], cast.kind)
        return self._nodes[key]

    def begin_combine(self, value: str) -> None:
        """Write the start of the return of the rows `value` from their experts."""
        casts = self.casts.values()
        cast = next(x for x in casts if x.value == value and x.kind == COMBINE)
        args = [self._out.made[value], self._exchanged(cast)]
        self._nodes[value, COMBINE, "begun"] = self._out.call(combine_begin, args, COMBINE)

    def _exchanged(self, cast: PlannedCast, attribute: str = "") -> fx.Node:
        """Return the node of the exchange that sends a cast's rows, or of its attribute
        `attribute`."""
        key: tuple[Any, ...] = (cast.ends, EXCHANGE)
        if key not in self._nodes:
            assert cast.shard is not None
            meet = partial(exchange, experts=self._place.along(cast.shard))
            self._nodes[key] = self._out.call(
                meet, [self._out.made[cast.ends], self._out.made[cast.value]], EXCHANGE
            )
        if attribute and (*key, attribute) not in self._nodes:
            args = (self._nodes[key], attribute)
            self._nodes[*key, attribute] = self._out.graph.call_function(getattr, args)
        return self._nodes[*key, attribute] if attribute else self._nodes[key]

    def forget(self, value: str) -> None:
        """Drop the cached casts of `value`, which an operation has changed in place."""
        for key in [key for key in self._nodes if key[0] == value]:
            del self._nodes[key]

    def _collective(self, kind: str, laid: Laid | None, value: str) -> Callable[..., Tensor]:
        """Return the collective `kind` of a cast of `value`, as a function of the value alone."""
        if laid is None:
            return partial(_WITHOUT_CUT[kind], group=self._place.group)
        dim, outer, shards = laid.dim, laid.outer, self._shards(laid, value)
        cutting: dict[str, Callable[..., Tensor]] = {
            "gather": gather,
            "slice": slice_,
            "repeated_slice": slice_of_copy,
            "gather_enter": all_gather_reduce_scatter,
            "reduce_scatter": reduce_scatter,
        }
        return partial(cutting[kind], dim=dim, outer=outer, shards=shards)


# Casts that are two collectives. Other casts of the value may share the first collective.
_TWO_STEPS = {
    "reduce_enter": ("reduce", "enter"),
    "reduce_slice": ("reduce", "slice"),
    "gather_once": ("gather", "once"),
    "repeated_once": ("repeated", "once"),
}
_WITHOUT_CUT: Mapping[str, Callable[..., Tensor]] = {
    "enter": copy_to_parallel_region,
    "reduce": reduce,
    "once": replicate_to_partial,
    "repeated": keep_first_gradient,
}
CUTTING = ("slice", "reduce_scatter", "reduce_slice", "repeated_slice", "reshard", DISPATCH)


def _steps(cast: PlannedCast) -> list[tuple[str, Laid | None]]:
    """Return the collectives of a cast, each with the shard that it makes or gathers (None: no
    shard)."""
    return [
        (step, cast.shard if step not in _WITHOUT_CUT else None)
        for step in _TWO_STEPS.get(cast.kind, (cast.kind,))
    ]
