"""The exported graph, rewritten for one rank: casts inserted, sizes and parameters sharded.

The plan's `rewrite` says which operations make up each segment, how their values lie and where a
cast stands; here that is carried out on the very graph it was resolved on. A segment is one
module that owns its parameters and runs two graphs, the model's training and evaluation one.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import SymInt, Tensor, fx, nn
from torch import distributed as dist

from whale_train.models.export.export import model_path, module_path, size_of
from whale_train.models.export.op_schemas import in_evaluation
from whale_train.runtime.comms.batch_sums import BatchShare, batch_sum
from whale_train.runtime.comms.expert_rows import combine, dispatch, exchange
from whale_train.runtime.comms.layout_collectives import (
    ShardGroup,
    enter,
    gather,
    gather_enter,
    once,
    reduce,
    reduce_scatter,
    repeated,
    reshard,
    slice_,
)
from whale_train.runtime.graph.block_modules import BLOCK, MODULE
from whale_train.runtime.graph.delay_combines import delay_combines
from whale_train.runtime.graph.nested_graphs import attribute, is_graph, is_tensor, runner
from whale_train.runtime.graph.segment import Counts, SegmentModule
from whale_train.runtime.graph.shard_ops import Laid, local_call
from whale_train.runtime.graph.shard_rng import SharedRandom
from whale_train.runtime.kernels.grouped_attention import group_keys
from whale_train.runtime.kernels.grouped_experts import own_grouped_mm, split_grouped_mm
from whale_train.runtime.kernels.rms_norm import join_rms_norms
from whale_train.runtime.kernels.sync_batch_norm import global_batch_norm
from whale_train.runtime.kernels.vocab_parallel import (
    split_cross_entropy,
    split_embedding,
    split_top1,
)
from whale_train.runtime.loss.graph_losses import (
    LossWeight,
    ignored,
    is_mean_over_targets,
    plain_loss,
    smoothing,
    written_value,
)
from whale_train.runtime.train.expert_loads import ExpertLoads
from whale_train.strategies.graph.operation_graph import block_of
from whale_train.strategies.layouts.types import BATCH, COMBINE, DISPATCH, EXCHANGE
from whale_train.strategies.plan.program import PlannedCast, PlannedSegment


@dataclass(frozen=True)
class ShardPlace:
    """Where a rewritten graph runs: its device, the group its casts span, my index in it and
    every axis' intervals, in units; `batch_norm_group` synchronises BatchNorm (None: per replica).

    `loss_scale` gives, by the name of its operation, what a loss that is a mean over targets is
    multiplied by as a sum; without it, it stays the mean over the targets at hand. `seed`, the
    same on all members of the group and on no others, is for what they draw alike. `share` is my
    part of the batch, where copies exchange sums over it. `loads` counts the rows of experts.
    """

    device: torch.device
    group: dist.ProcessGroup
    index: int
    axes: Mapping[str, tuple[tuple[int, int], ...]]
    batch_norm_group: dist.ProcessGroup | None
    loss_scale: LossWeight | None = None
    seed: int = 0
    share: BatchShare | None = None
    loads: ExpertLoads | None = None

    @cached_property
    def random(self) -> SharedRandom:
        """The state of what all members draw alike; one for all segments at this place."""
        return SharedRandom(self.seed, self.device)

    def pieces(self, laid: Laid) -> tuple[tuple[int, ...], ...]:
        """Return every piece's extents by member, of one repetition of a cut dimension."""
        intervals = self.axes[laid.axis]
        units = intervals[-1][1]
        return tuple(
            tuple(stop * e // units - start * e // units for start, stop in intervals)
            for e in laid.pieces or (units,)
        )

    def mine(self, laid: Laid) -> tuple[int, ...]:
        """Return my part of each piece."""
        return tuple(sizes[self.index] for sizes in self.pieces(laid))

    def along(self, laid: Laid, rows: int = 1) -> ShardGroup:
        """Return who holds how much of a dimension that is cut so; of one that is cut by samples,
        so many `rows` for each."""
        pieces = self.pieces(laid)
        if rows > 1:
            pieces = tuple(tuple(rows * size for size in sizes) for sizes in pieces)
        sizes = tuple(sum(each) for each in zip(*pieces, strict=True))
        return ShardGroup(self.group, sizes, self.index, pieces if len(pieces) > 1 else ())


def write_segment_graph(
    segment: SegmentModule,
    written: PlannedSegment,
    source: fx.GraphModule,
    canonical: dict[str, str],
    place: ShardPlace,
    counts: Counts | None,
) -> None:
    """Give `segment` the graph of the plan's `written` segment, out of `source`.

    `canonical` maps a tied parameter's names to the one it is held under. `counts` is given for
    an evaluation graph and filled when it runs.
    """
    writer = _Writer(written, source, canonical, place, counts)
    graph, paths, inputs = writer.write(segment.takes, segment.gives)
    join_rms_norms(graph)
    delay_combines(graph)
    if place.device.type != "cpu":
        group_keys(graph)
    segment.set_graph(counts is None, graph, paths, inputs)


class _Writer:
    """Copies one segment's nodes into a new graph, changing what its layouts ask for."""

    def __init__(
        self,
        written: PlannedSegment,
        source: fx.GraphModule,
        canonical: dict[str, str],
        place: ShardPlace,
        counts: Counts | None,
    ) -> None:
        self.written, self.source, self.canonical = written, source, canonical
        self.place, self.counts = place, counts
        self.values = {node.name: node.meta.get("val") for node in source.graph.nodes}
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.made: dict[str, fx.Node] = {}
        self.casts = {(cast.user, cast.value): cast for cast in written.casts}
        self.cast_nodes: dict[tuple[Any, ...], fx.Node] = {}
        self.counted: set[str] = set()  # mixtures whose experts' rows are

    def write(
        self, takes: Iterable[str], gives: Iterable[str]
    ) -> tuple[fx.GraphModule, tuple[str, ...], tuple[str, ...]]:
        """Return the graph module, the paths of the tensors it reads, and the inputs it reads; its
        arguments are takes, inputs, tensors."""
        chosen = set(self.written.operations)
        nodes = [node for node in self.source.graph.nodes if node.name in chosen]
        for name in takes:
            self.made[name] = self.graph.placeholder(name)
        inputs = [node for node in nodes if node.op == "placeholder"]
        for node in inputs:
            self.made[node.name] = self.graph.placeholder(f"input_{node.name}")
        held: dict[str, fx.Node] = {}
        for node in nodes:
            if node.op == "get_attr" and is_tensor(self.source, node):
                path = model_path(str(node.target))
                path = self.canonical.get(path, path)
                if path not in held:
                    held[path] = self.graph.placeholder(f"tensor_{node.name}")
                self.made[node.name] = held[path]
        for node in nodes:
            if node.op == "call_function" and not self.is_training_only(node):
                self.made[node.name] = self.over_the_batch(node, self.operation(node))
                self.mark(module_path(node))
                changed = written_value(node)
                if changed is not None:  # whoever reads it from here on reads the new value
                    self.made[changed.name] = self.made[node.name]
                    self.forget(changed.name)
        self.graph.output(tuple(self.cast("", name) for name in gives))
        self.graph.lint()
        module = fx.GraphModule(self.root, self.graph)
        return module, tuple(held), tuple(str(node.target) for node in inputs)

    def is_training_only(self, node: fx.Node) -> bool:
        """Return whether `node` updates a buffer that nobody reads: BatchNorm counting its
        batches."""
        changed = written_value(node)
        buffer = changed is not None and changed.op == "get_attr"
        return self.counts is not None and buffer and not node.users

    def mark(self, path: str) -> None:
        """Say of what was written since the last time to which module it belongs, and block."""
        for new in reversed(self.graph.nodes):
            if BLOCK in new.meta or new.op == "placeholder":
                break
            new.meta |= {BLOCK: block_of(path), MODULE: path}

    def operation(self, node: fx.Node) -> fx.Node:
        if any(is_graph(self.source, x) for x in node.all_input_nodes):
            return self.wrapped(node)

        def argument(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return self.cast(node.name, value.name)
            return self.place.device if isinstance(value, torch.device) else value

        args = list(fx.node.map_aggregate(node.args, argument))
        kwargs = dict(fx.node.map_aggregate(node.kwargs, argument))
        self.count_rows(node)
        becomes = self.written.becomes.get(node.name)
        target = str(node.target).removeprefix("aten.")
        if self.counts is not None:
            args, kwargs = in_evaluation(node.target, args, kwargs)
        if becomes is not None:
            return self.replacement(becomes, node, args)
        if is_mean_over_targets(node) and (self.place.loss_scale or self.counts is not None):
            weight = args[2] if len(args) > 2 else kwargs.get("weight")
            count = self.counts.add if self.counts is not None else None
            loss = plain_loss(node, self.place.loss_scale, count)
            return self.call(node, loss, [*args[:2], weight])
        if target == "batch_norm.default" and self.place.batch_norm_group is not None:
            function = _batch_norm(self.place.batch_norm_group)
            return self.call(node, function, args[:8])
        laid = self.written.layouts.get(node.name)
        source = self.laid(node, 0)
        function, args, kwargs = local_call(node, args, kwargs, laid, source, self.place.mine)
        if self.is_drawn_alike(node):
            draw = partial(self.place.random, function)
            return self.call(node, draw, args, kwargs=kwargs)
        return self.graph.call_function(function, tuple(args), kwargs)

    def over_the_batch(self, node: fx.Node, made: fx.Node) -> fx.Node:
        """Return a value as it is of the whole batch, if copies are to exchange it."""
        degree = self.written.sums.get(node.name)
        if degree is None:
            return made
        assert self.place.share is not None
        exchanged = partial(batch_sum, degree=degree, mine=self.place.share)
        return self.call(None, exchanged, [made], "batch_sum")

    def count_rows(self, node: fx.Node) -> None:
        """Count the rows of a mixture's experts before the first of its products."""
        if "grouped_mm" not in str(node.target) or self.place.loads is None:
            return
        rows, ends = node.args[0], node.kwargs.get("offs", (*node.args, None)[2])
        assert isinstance(rows, fx.Node)
        assert isinstance(ends, fx.Node)
        if ends.name not in self.counted:
            self.counted.add(ends.name)
            note = partial(self.place.loads.note, ends.name)
            self.call(None, note, [self.made[ends.name], self.made[rows.name]], "count_rows")

    def is_drawn_alike(self, node: fx.Node) -> bool:
        """Return whether all members draw the same random numbers in a call."""
        return self.written.random.get(node.name) == "shared"

    def laid(self, node: fx.Node, position: int) -> Laid | None:
        """Return how an operand of `node` is cut when it gets there (None: it is not)."""
        value = node.args[position] if position < len(node.args) else None
        if not isinstance(value, fx.Node):
            return None
        cast = self.casts.get((node.name, value.name))
        if cast is None:
            return self.written.layouts.get(value.name)
        if cast.kind not in _CUTTING or self.is_of_own_samples(node.name, cast):
            return None
        return cast.shard

    def is_of_own_samples(self, user: str, cast: PlannedCast) -> bool:
        """Return whether a cast brings rows of all members' samples to where a member has its own:
        all that there are, then."""
        by_samples = cast.shard is not None and cast.shard.axis == BATCH
        return by_samples and user not in self.written.layouts

    def wrapped(self, node: fx.Node) -> fx.Node:
        """Return a graph inside the graph, run under another mode: without gradients, or not under
        autocast. What it is given is whole."""
        args: list[Any] = list(node.args)
        number = next(i for i, x in enumerate(args) if is_graph(self.source, x))
        inner = attribute(self.source, str(args[number].target))
        in_training = self.counts is None
        run = runner(str(node.target), inner, args[:number], self.place.device, in_training)
        if self.is_drawn_alike(node):
            run = partial(self.place.random, run)
        return self.call(node, run, [self.cast(node.name, x.name) for x in args[number + 1 :]])

    def cast(self, user: str, value: str) -> fx.Node | int:
        """`value` in the layout `user` wants; equal casts of a value are made once."""
        cast = self.casts.get((user, value))
        if cast is None:
            return self.made[value]
        node = self.made[value]
        if isinstance(self.values[value], SymInt):
            return self.number(cast)
        if cast.kind in (DISPATCH, COMBINE):
            return self.rows_elsewhere(cast, node)
        if cast.kind == EXCHANGE:
            return self.exchanged(cast, "ends")
        if cast.kind == "reshard":
            return self.resharded(cast, node)
        key: tuple[Any, ...] = (value,)
        for kind, laid in _steps(cast):
            key = (*key, kind, laid)
            if key not in self.cast_nodes:
                function = self.collective(kind, laid, value)
                self.cast_nodes[key] = self.call(None, function, [node], kind)
            node = self.cast_nodes[key]
        return node

    def resharded(self, cast: PlannedCast, node: fx.Node) -> fx.Node:
        """`node` cut along another dimension; once a value and cut."""
        assert cast.source is not None
        assert cast.shard is not None
        key = (cast.value, cast.kind, cast.source, cast.shard)
        if key not in self.cast_nodes:
            have, want = cast.source, cast.shard
            function = partial(
                reshard,
                from_dim=have.dim,
                from_outer=have.outer,
                source=self.shards(have, cast.value),
                dim=want.dim,
                outer=want.outer,
                shards=self.shards(want, cast.value),
            )
            self.cast_nodes[key] = self.call(None, function, [node], cast.kind)
        return self.cast_nodes[key]

    def shards(self, laid: Laid, value: str) -> ShardGroup:
        """Return who holds how much of the dimension of a value that is cut so."""
        rows = 1
        if laid.axis == BATCH:
            size = size_of(self.values[value].shape[laid.dim])
            assert size is not None
            rows = size.per_sample
        return self.place.along(laid, rows)

    def number(self, cast: PlannedCast) -> int:
        """Return a number that follows the batch: the own samples', or all that are gathered."""
        size = size_of(self.values[cast.value])
        assert size is not None, cast  # the plan refuses others
        assert cast.shard is not None
        samples = self.place.along(cast.shard)
        return size.at(samples.total if cast.kind == "gather" else samples.size)

    def rows_elsewhere(self, cast: PlannedCast, rows: fx.Node) -> fx.Node:
        """`rows` where their experts are, or back where they came from; once a value."""
        key = (cast.value, cast.kind)
        if key not in self.cast_nodes:
            function = dispatch if cast.kind == DISPATCH else combine
            where = self.exchanged(cast)
            self.cast_nodes[key] = self.call(None, function, [rows, where], cast.kind)
        return self.cast_nodes[key]

    def exchanged(self, cast: PlannedCast, attribute: str = "") -> fx.Node:
        """Return the exchange that a cast's rows go by, or an `attribute` of it."""
        key: tuple[Any, ...] = (cast.ends, EXCHANGE)
        if key not in self.cast_nodes:
            assert cast.shard is not None
            meet = partial(exchange, experts=self.place.along(cast.shard))
            self.cast_nodes[key] = self.call(
                None, meet, [self.made[cast.ends], self.made[cast.value]], EXCHANGE
            )
        if attribute and (*key, attribute) not in self.cast_nodes:
            args = (self.cast_nodes[key], attribute)
            self.cast_nodes[*key, attribute] = self.graph.call_function(getattr, args)
        return self.cast_nodes[*key, attribute] if attribute else self.cast_nodes[key]

    def forget(self, value: str) -> None:
        """Casts of a value that has been changed in place are of the old one."""
        for key in [key for key in self.cast_nodes if key[0] == value]:
            del self.cast_nodes[key]

    def collective(self, kind: str, laid: Laid | None, value: str) -> Callable[..., Tensor]:
        if laid is None:
            return partial(_WITHOUT_CUT[kind], group=self.place.group)
        dim, outer, shards = laid.dim, laid.outer, self.shards(laid, value)
        cutting: dict[str, Callable[..., Tensor]] = {
            "gather": gather,
            "slice": slice_,
            "gather_enter": gather_enter,
            "reduce_scatter": reduce_scatter,
        }
        return partial(cutting[kind], dim=dim, outer=outer, shards=shards)

    def replacement(self, becomes: str, node: fx.Node, args: list[Any]) -> fx.Node:
        """Return the distributed operation in place of `node`."""
        if becomes.endswith("grouped_mm"):
            laid = self.laid(node, 1)
            assert laid is not None
            assert callable(node.target)
            if becomes == "own_grouped_mm":
                return self.call(node, partial(own_grouped_mm, node.target), args[:3])
            shards = self.place.along(laid)
            product = partial(split_grouped_mm, node.target, shards=shards)
            return self.call(node, product, args[:3])
        laid = self.laid(node, 0)  # of the logits, of the embedding's table, of what is averaged
        assert laid is not None
        shards = self.place.along(laid)
        if becomes == "split_mean":
            assert callable(node.target)
            weight = shards.size / shards.total
            part = partial(_weighted, node.target, weight)
            return self.call(node, part, args)
        if becomes == "split_embedding":
            padding = args[2] if len(args) > 2 and args[2] >= 0 else None
            lookup = partial(split_embedding, shards=shards, padding_idx=padding)
            return self.call(node, lambda weight, ids: lookup(ids, weight), args[:2])
        assert becomes == "split_cross_entropy", becomes
        return self.call(node, self.split_loss(node, shards), args[:2])

    def split_loss(self, node: fx.Node, shards: ShardGroup) -> Callable[..., Tensor]:
        ignore, smooth, counts = ignored(node), smoothing(node), self.counts
        mean = is_mean_over_targets(node)
        scale = self.place.loss_scale if mean else None
        reduction = "mean" if mean and scale is None else "sum"

        def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
            if counts is not None:
                counts.add(*split_top1(logits, target, shards, ignore))
            factor = scale(node.name) if scale is not None else None
            return split_cross_entropy(
                logits, target, shards, ignore, smooth, reduction, scale=factor
            )

        return cross_entropy

    def call(
        self,
        node: fx.Node | None,
        function: Callable[..., Any],
        args: list[Any],
        name: str = "",
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:
        """Return a node that calls `function`: graphs can only name what a module holds."""
        name = f"{name or (node.name if node else '')}_{len(self.graph.nodes)}"
        self.root.add_module(name, _Function(function))
        return self.graph.call_module(name, tuple(args), kwargs or {})


# Casts that are two collectives, of which the first may be shared with others of the value.
_TWO_STEPS = {
    "reduce_enter": ("reduce", "enter"),
    "reduce_slice": ("reduce", "slice"),
    "gather_once": ("gather", "once"),
    "repeated_slice": ("repeated", "slice"),
    "repeated_once": ("repeated", "once"),
}
_WITHOUT_CUT: Mapping[str, Callable[..., Tensor]] = {
    "enter": enter, "reduce": reduce, "once": once, "repeated": repeated,
}  # fmt: skip
_CUTTING = ("slice", "reduce_scatter", "reduce_slice", "repeated_slice", "reshard", DISPATCH)


def _steps(cast: PlannedCast) -> list[tuple[str, Laid | None]]:
    """Return the collectives of a cast, each with the cut that it makes or undoes."""
    return [
        (step, cast.shard if step not in _WITHOUT_CUT else None)
        for step in _TWO_STEPS.get(cast.kind, (cast.kind,))
    ]


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _weighted(mean: Callable[..., Tensor], weight: float, *args: Any) -> Tensor:
    return mean(*args) * weight


def _batch_norm(group: dist.ProcessGroup) -> Callable[..., Tensor]:
    """aten.batch_norm's first eight arguments, over the global batch."""

    def batch_norm(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
    ) -> Tensor:
        return global_batch_norm(
            x, weight, bias, running_mean, running_var, training, momentum, eps, group
        )

    return batch_norm
