"""Rewrite the exported graph for one rank: insert casts, and shard sizes and parameters.

The plan's `rewrite` lists the operations of each segment, the layouts of their values and the
places of casts; this file carries it out on the same graph that the plan was resolved on. A segment
is one module that owns its parameters and runs two graphs, the model's training and evaluation
graphs.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch import distributed as dist

from whale_train.models.batch_parts.value_losses import ValueLoss
from whale_train.models.export.export import model_path, module_path
from whale_train.models.export.op_schemas import in_evaluation
from whale_train.runtime.base.answers import Answers
from whale_train.runtime.base.node_meta import BLOCK, MODULE
from whale_train.runtime.comms.batch_sums import batch_sum
from whale_train.runtime.comms.layout_collectives import ShardGroup, gather
from whale_train.runtime.graph.cast_nodes import CUTTING, CastNodes
from whale_train.runtime.graph.nested_graphs import attribute, is_graph, is_tensor, runner
from whale_train.runtime.graph.passes import run_passes
from whale_train.runtime.graph.segment import Counts, SegmentModule
from whale_train.runtime.graph.shard_ops import Laid, local_call
from whale_train.runtime.graph.shard_place import ShardContext
from whale_train.runtime.graph.written_graph import WrittenGraph
from whale_train.runtime.kernels.context_attention import (
    AttentionOptions,
    gathered_attention,
    heads_attention,
    in_a_ring,
)
from whale_train.runtime.kernels.grouped_experts import own_grouped_mm, split_grouped_mm
from whale_train.runtime.kernels.sync_batch_norm import global_batch_norm
from whale_train.runtime.kernels.vocab_parallel import (
    split_cross_entropy,
    split_embedding,
    split_top1,
)
from whale_train.runtime.kernels.weight_gradients import WeightGradients
from whale_train.runtime.loss.graph_losses import (
    ignored,
    is_mean_over_targets,
    plain_loss,
    smoothing,
)
from whale_train.strategies.context_parallel.rules import CONTEXT_ATTENTION
from whale_train.strategies.graph.block_paths import block_of
from whale_train.strategies.graph.rewrites import OVERLAPPED_ROWS
from whale_train.strategies.layouts.types import BATCH, GATHERED, HEADS
from whale_train.strategies.plan.program import PlannedCast, PlannedSegment


def write_segment_graph(
    segment: SegmentModule,
    planned: PlannedSegment,
    source: fx.GraphModule,
    canonical: dict[str, str],
    place: ShardContext,
    counts: Counts | None,
    owner: WeightGradients,
) -> None:
    """Write the graph of the plan's segment `planned` into `segment`, from the export `source`.

    `canonical` maps a tied parameter's names to the one name that the parameter is held under.
    `counts` is given for an evaluation graph, and filled when the graph runs; None writes the
    training graph. In the training graph, `owner` computes the weight gradients that operations
    take out of autograd.
    """
    writer = _Writer(planned, source, canonical, place, counts)
    graph, paths, inputs = writer.write(segment.takes, segment.gives)
    on_cpu = place.device.type == "cpu"
    run_passes(*(graph, writer.nodes, planned.rewrites, on_cpu), owner if counts is None else None)
    segment.set_graph(counts is None, graph, paths, inputs)


class _Writer:
    """Copies one segment's nodes into a new graph, and applies the segment's layouts."""

    def __init__(
        self,
        planned: PlannedSegment,
        source: fx.GraphModule,
        canonical: dict[str, str],
        place: ShardContext,
        counts: Counts | None,
    ) -> None:
        self.written, self.source, self.canonical = planned, source, canonical
        self.place, self.counts = place, counts
        self.out = WrittenGraph()
        self.graph, self.made = self.out.graph, self.out.made
        values = {node.name: node.meta.get("val") for node in source.graph.nodes}
        self.casts = CastNodes(planned.casts, self.out, place, values)
        self.counted: set[str] = set()  # mixtures whose experts' rows are counted already
        self.nodes: dict[str, fx.Node] = {}  # the node of every operation
        overlapped = [x.operations for x in planned.rewrites if x.kind == OVERLAPPED_ROWS]
        self.sent_early = {value for value, *_ in overlapped}

    def write(
        self, takes: Iterable[str], gives: Iterable[str]
    ) -> tuple[fx.GraphModule, tuple[str, ...], tuple[str, ...]]:
        """Return the graph module, the paths of the tensors it reads, and the names of the inputs
        it reads.

        Arguments of the graph module are the values `takes`, the inputs, then the tensors.
        """
        by_name = {node.name: node for node in self.source.graph.nodes}
        nodes = [by_name[name] for name in self.written.operations]
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
                self.nodes[node.name] = self.operation(node)
                self.made[node.name] = self.over_the_batch(node, self.nodes[node.name])
                if node.name in self.sent_early:
                    self.casts.begin_combine(node.name)
                self.mark(module_path(node))
                changed = self.written.changes.get(node.name)
                if changed is not None:  # an update in place: later readers read the new value
                    self.made[changed] = self.made[node.name]
                    self.casts.forget(changed)
        self.graph.output(tuple(self.casts.of("", name) for name in gives))
        self.graph.lint()
        module = fx.GraphModule(self.out.root, self.graph)
        return module, tuple(held), tuple(str(node.target) for node in inputs)

    def is_training_only(self, node: fx.Node) -> bool:
        """Return True if `node` updates a buffer and evaluation skips the update.

        No operation reads the value of such a node. An example is BatchNorm's count of batches.
        """
        changed = self.written.changes.get(node.name)
        buffer = any(x.name == changed and x.op == "get_attr" for x in node.all_input_nodes)
        return self.counts is not None and buffer and not node.users

    def mark(self, path: str) -> None:
        """Store the module at `path` and its block in the `meta` of all nodes written since the
        last call."""
        for new in reversed(self.graph.nodes):
            if BLOCK in new.meta or new.op == "placeholder":
                break
            new.meta |= {BLOCK: block_of(path), MODULE: path}

    def operation(self, node: fx.Node) -> fx.Node:
        """Write the node that does on this rank's shards what `node` does on whole tensors, and
        return it."""
        if any(is_graph(self.source, x) for x in node.all_input_nodes):
            return self.wrapped(node)

        def argument(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return self.casts.of(node.name, value.name)
            return self.place.device if isinstance(value, torch.device) else value

        args = list(fx.node.map_aggregate(node.args, argument))
        kwargs = dict(fx.node.map_aggregate(node.kwargs, argument))
        self.count_rows(node)
        becomes = self.written.becomes.get(node.name)
        target = str(node.target).removeprefix("aten.")
        if self.counts is not None:
            args, kwargs = in_evaluation(node.target, args, kwargs)
        if becomes in CONTEXT_ATTENTION:
            return self.attention(becomes, node, args, kwargs)
        if becomes is not None:
            return self.replacement(becomes, node, args)
        if is_mean_over_targets(node) and (self.place.loss_scale or self.counts is not None):
            weight = args[2] if len(args) > 2 else kwargs.get("weight")
            loss = plain_loss(node, self.place.loss_scale, self.count_of(node))
            return self.out.call(loss, [*args[:2], weight], node.name)
        kind = ValueLoss.of_operation(node.target)
        if kind is not None and self.counts is not None and self.counts_whole(node):
            self.out.call(partial(self.counts.add_values, kind), args[:2], "predicted")
        if target == "batch_norm.default" and self.place.batch_norm_group is not None:
            function = _batch_norm(self.place.batch_norm_group)
            return self.out.call(function, args[:8], node.name)
        laid = self.written.layouts.get(node.name)
        source = self.laid(node, 0)
        function, args, kwargs = local_call(node, args, kwargs, laid, source, self.place.mine)
        if self.is_drawn_alike(node):
            draw = partial(self.place.random, function)
            return self.out.call(draw, args, node.name, kwargs)
        return self.graph.call_function(function, tuple(args), kwargs)

    def counts_whole(self, node: fx.Node) -> bool:
        """Return True if this rank counts the answers of the loss `node` from its operands. Where
        they are whole on members that divide positions, only the first one does."""
        first = not self.place.shares_sequence or self.place.index == 0
        return self.laid(node, 0) is None and first

    def count_of(self, node: fx.Node) -> Callable[[Tensor, Tensor, Tensor, int], None] | None:
        """Return the function that counts the answers of the cross-entropy `node` in an evaluation,
        or None where this rank counts none."""
        laid = self.laid(node, 0)
        if self.counts is None or (laid is None and not self.counts_whole(node)):
            return None
        if laid is None or not self.place.shares_sequence:
            return self.counts.add_logits
        return partial(_add_positions, self.counts, laid, self.place.along(laid))

    def over_the_batch(self, node: fx.Node, value: fx.Node) -> fx.Node:
        """Return `value`, the new node of `node`, summed over the whole batch where the plan makes
        copies exchange the sum."""
        degree = self.written.sums.get(node.name)
        if degree is None:
            return value
        assert self.place.share is not None
        exchanged = partial(batch_sum, degree=degree, share=self.place.share)
        return self.out.call(exchanged, [value], "batch_sum")

    def count_rows(self, node: fx.Node) -> None:
        """Write a count of the rows of a mixture's experts before the mixture's first product."""
        if "grouped_mm" not in str(node.target) or self.place.loads is None:
            return
        rows, ends = node.args[0], node.kwargs.get("offs", (*node.args, None)[2])
        assert isinstance(rows, fx.Node)
        assert isinstance(ends, fx.Node)
        if ends.name not in self.counted:
            self.counted.add(ends.name)
            note = partial(self.place.loads.note, ends.name)
            self.out.call(note, [self.made[ends.name], self.made[rows.name]], "count_rows")

    def is_drawn_alike(self, node: fx.Node) -> bool:
        """Return True where all members of the group draw the same random numbers in `node`."""
        return self.written.random.get(node.name) == "shared"

    def laid(self, node: fx.Node, position: int) -> Laid | None:
        """Return the layout in which an operand of `node` arrives, or None for an operand that is
        not sharded."""
        value = node.args[position] if position < len(node.args) else None
        if not isinstance(value, fx.Node):
            return None
        cast = self.casts.casts.get((node.name, value.name))
        if cast is None:
            return self.written.layouts.get(value.name)
        if cast.kind not in CUTTING or self.is_of_own_samples(node.name, cast):
            return None
        return cast.shard

    def is_of_own_samples(self, user: str, cast: PlannedCast) -> bool:
        """Return True for a cast that leaves each member the rows of its own samples only.

        The cast starts from the rows of all members' samples. The value of `user` is not sharded,
        so `user` reads the member's rows as a whole tensor.
        """
        by_samples = cast.shard is not None and cast.shard.axis == BATCH
        return by_samples and user not in self.written.layouts

    def wrapped(self, node: fx.Node) -> fx.Node:
        """Write the call of an inner graph that runs without gradients or in another autocast mode.

        The inputs of the inner graph are not sharded.
        """
        args: list[Any] = list(node.args)
        number = next(i for i, x in enumerate(args) if is_graph(self.source, x))
        inner = attribute(self.source, str(args[number].target))
        in_training = self.counts is None
        run = runner(str(node.target), inner, args[:number], self.place.device, in_training)
        if self.is_drawn_alike(node):
            run = partial(self.place.random, run)
        return self.out.call(
            run, [self.casts.of(node.name, x.name) for x in args[number + 1 :]], node.name
        )

    def replacement(self, becomes: str, node: fx.Node, args: list[Any]) -> fx.Node:
        """Write the distributed operation `becomes` in place of `node`, and return its node."""
        if becomes.endswith("grouped_mm"):
            laid = self.laid(node, 1)
            assert laid is not None
            assert callable(node.target)
            if becomes == "own_grouped_mm":
                return self.out.call(partial(own_grouped_mm, node.target), args[:3], node.name)
            shards = self.place.along(laid)
            product = partial(split_grouped_mm, node.target, shards=shards)
            return self.out.call(product, args[:3], node.name)
        # The layout of the logits, of the embedding's table, or of the mean's input.
        laid = self.laid(node, 0)
        assert laid is not None
        shards = self.place.along(laid)
        if becomes == "split_mean":
            assert callable(node.target)
            weight = shards.size / shards.total
            part = partial(_weighted, node.target, weight)
            return self.out.call(part, args, node.name)
        if becomes == "split_embedding":
            padding = args[2] if len(args) > 2 and args[2] >= 0 else None
            lookup = partial(split_embedding, shards=shards, padding_idx=padding)
            return self.out.call(lambda weight, ids: lookup(ids, weight), args[:2], node.name)
        assert becomes == "split_cross_entropy", becomes
        logits = self.without_cast(node, args[0])
        return self.out.call(self.split_loss(node, shards), [logits, args[1]], node.name)

    def without_cast(self, node: fx.Node, logits: fx.Node) -> fx.Node:
        """Return `logits`, the argument of the cross-entropy `node`, without a cast to fp32 that
        nothing else reads: `split_cross_entropy` computes in fp32 what it reads in 16 bits, and
        needs no copy."""
        value = node.args[0]
        while isinstance(value, fx.Node) and len(value.users) == 1:
            source = value.args[0] if value.args else None
            if value.target in _TO_FP32 and isinstance(source, fx.Node):
                is_wider = source.meta["val"].dtype == torch.float64
                if is_wider or value.args[1:] != (torch.float32,):
                    break
                cast = self.made[value.name]
                (read,) = cast.all_input_nodes
                cast.replace_all_uses_with(read)
                self.graph.erase_node(cast)
                self.made[value.name] = self.nodes[value.name] = read
                return read if logits is cast else logits
            if value.target not in _RESHAPES:
                break
            value = source
        return logits

    def attention(
        self, becomes: str, node: fx.Node, args: list[Any], kwargs: dict[str, Any]
    ) -> fx.Node:
        """Write an attention over positions that the members of the group divide, and return its
        node."""
        laid = self.laid(node, 0)
        assert laid is not None
        tokens = self.place.along(laid)
        options = AttentionOptions.of(args, kwargs)
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        if becomes == GATHERED:
            divided = partial(gathered_attention, tokens=tokens, options=options)
        else:
            keys = self.laid(node, 1)
            assert keys is not None
            function = heads_attention if becomes == HEADS else in_a_ring
            of_keys = self.place.along(keys)
            divided = partial(function, tokens=tokens, of_keys=of_keys, options=options)
        return self.out.call(divided, [*args[:3], mask], node.name)

    def split_loss(self, node: fx.Node, shards: ShardGroup) -> Callable[..., Tensor]:
        """Return the cross-entropy `node` over sharded classes, a function of logits and targets.

        Logits are [N, this rank's classes] and targets [N].
        """
        ignore, smooth, counts = ignored(node), smoothing(node), self.counts
        mean = is_mean_over_targets(node)
        scale = self.place.loss_scale if mean else None
        reduction = "mean" if mean and scale is None else "sum"

        def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
            if counts is not None:
                top = split_top1(logits, target, shards, ignore, counts.predicts)
                counts.add(Answers(*top))
            factor = scale(node.name) if scale is not None else None
            return split_cross_entropy(
                logits, target, shards, ignore, smooth, reduction, scale=factor
            )

        return cross_entropy


_TO_FP32 = (torch.ops.aten.to.dtype,)
_RESHAPES = (
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.flatten.using_ints,
    torch.ops.aten._unsafe_view.default,
)


def _add_positions(
    counts: Counts,
    laid: Laid,
    shards: ShardGroup,
    logits: Tensor,
    target: Tensor,
    counted: Tensor,
    dim: int,
) -> None:
    """Add the answers of one loss call on the first of the members that divide its rows. A
    collective: the others send theirs.

    laid: the layout of the logits, whose classes are in dimension `dim`.
    shards: the members.
    """
    answers = counts.answered(logits, target, counted, dim)
    rows = laid.dim - (1 if laid.dim > dim else 0)
    values = (answers.predicted, answers.target, answers.counted, answers.probability)
    gathered = (None if x is None else gather(x, rows, laid.outer, shards) for x in values)
    predicted, targets, are_counted, probability = gathered
    assert predicted is not None
    assert targets is not None
    assert are_counted is not None
    if shards.rank == 0:
        counts.add(Answers(predicted, targets, are_counted, probability))


def _weighted(mean: Callable[..., Tensor], weight: float, *args: Any) -> Tensor:
    return mean(*args) * weight


def _batch_norm(group: dist.ProcessGroup) -> Callable[..., Tensor]:
    """Return a function of `aten.batch_norm`'s first eight arguments, with statistics of the global
    batch."""

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
