"""The exported graph, rewritten for one rank: casts inserted, sizes and parameters sharded.

The plan's `rewrite` says which operations make up each segment, how their values lie and where a
cast stands; here that is carried out on the very graph it was resolved on. A segment is one
module that owns its parameters and runs two graphs, the model's training and evaluation one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch import distributed as dist

from whale_train.models.profile import model_path
from whale_train.runtime.batch_norm import global_batch_norm
from whale_train.runtime.casts import (
    ShardGroup,
    enter,
    gather,
    gather_enter,
    reduce,
    reduce_scatter,
    slice_,
)
from whale_train.runtime.cross_entropy import split_cross_entropy, split_embedding, split_top1

_SIZES_ARGUMENT = ("view.default", "reshape.default", "_unsafe_view.default")


@dataclass(frozen=True)
class Place:
    """Where a rewritten graph runs: its device, the group its casts span, my index in it and
    every axis' intervals; `batch_norm_group` synchronises BatchNorm (None: per replica)."""

    device: torch.device
    group: dist.ProcessGroup
    index: int
    axes: dict[str, tuple[tuple[int, int], ...]]
    batch_norm_group: dist.ProcessGroup | None

    def along(self, axis: str) -> ShardGroup:
        sizes = tuple(stop - start for start, stop in self.axes[axis])
        return ShardGroup(self.group, sizes, self.index)


class Counts:
    """What an evaluation graph's cross-entropies saw: right answers and targets, as tensors."""

    def __init__(self) -> None:
        self.correct: list[Tensor] = []
        self.targets: list[Tensor] = []

    def add(self, correct: Tensor, targets: Tensor) -> None:
        self.correct.append(correct)
        self.targets.append(targets)

    def take(self) -> tuple[float, float]:
        """(correct, targets) since the last call."""
        counts = (float(sum(map(float, self.correct))), float(sum(map(float, self.targets))))
        self.correct.clear()
        self.targets.clear()
        return counts


class Segment(nn.Module):
    """One segment of the plan on one rank.

    Call it with the values it takes, then the model inputs it reads (`inputs` names them); it
    returns the values it gives, as a tuple. Its parameters are attributes of this one module, so
    that ZeRO 3 gathers them when it is called; the graphs get them as arguments.
    """

    def __init__(
        self, takes: tuple[str, ...], gives: tuple[str, ...], tensors: dict[str, Tensor]
    ) -> None:
        super().__init__()
        self.takes, self.gives = takes, gives
        self.tensor_names: dict[str, str] = {}  # path in the model -> attribute
        for path, tensor in tensors.items():
            name = path.replace(".", "__")
            self.tensor_names[path] = name
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self.inputs: tuple[str, ...] = ()
        # Not submodules: they own nothing, and an engine must not walk into them.
        self._graphs: dict[bool, tuple[fx.GraphModule, tuple[str, ...]]] = {}

    def set_graph(
        self, training: bool, graph: fx.GraphModule, paths: tuple[str, ...], inputs: tuple[str, ...]
    ) -> None:
        self._graphs[training] = (graph, tuple(self.tensor_names[path] for path in paths))
        self.inputs = inputs

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        graph, names = self._graphs[self.training]
        result: tuple[Tensor, ...] = graph(*values, *(getattr(self, name) for name in names))
        return result


def write_segment_graph(
    segment: Segment,
    written: dict[str, Any],
    source: fx.GraphModule,
    canonical: dict[str, str],
    place: Place,
    counts: Counts | None,
) -> None:
    """Give `segment` the graph of the plan's `written` segment, out of `source`.

    `canonical` maps a tied parameter's names to the one it is held under. `counts` is given for
    an evaluation graph and filled when it runs.
    """
    writer = _Writer(written, source, canonical, place, counts)
    graph, paths, inputs = writer.write(segment.takes, segment.gives)
    segment.set_graph(counts is None, graph, paths, inputs)


class _Writer:
    """Copies one segment's nodes into a new graph, changing what its layouts ask for."""

    def __init__(
        self,
        written: dict[str, Any],
        source: fx.GraphModule,
        canonical: dict[str, str],
        place: Place,
        counts: Counts | None,
    ) -> None:
        self.written, self.source, self.canonical = written, source, canonical
        self.place, self.counts = place, counts
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.made: dict[str, fx.Node] = {}
        self.casts = {(c["user"], c["value"]): c for c in written["casts"]}
        self.cast_nodes: dict[tuple[str, str], fx.Node] = {}

    def write(
        self, takes: Iterable[str], gives: Iterable[str]
    ) -> tuple[fx.GraphModule, tuple[str, ...], tuple[str, ...]]:
        """The graph module, the paths of the tensors it reads, and the inputs it reads; its
        arguments are takes, inputs, tensors."""
        chosen = set(self.written["operations"])
        nodes = [node for node in self.source.graph.nodes if node.name in chosen]
        for name in takes:
            self.made[name] = self.graph.placeholder(name)
        inputs = [node for node in nodes if node.op == "placeholder"]
        for node in inputs:
            self.made[node.name] = self.graph.placeholder(f"input_{node.name}")
        held: dict[str, fx.Node] = {}
        for node in nodes:
            if node.op == "get_attr":
                path = model_path(str(node.target))
                path = self.canonical.get(path, path)
                if path not in held:
                    held[path] = self.graph.placeholder(f"tensor_{node.name}")
                self.made[node.name] = held[path]
        for node in nodes:
            if node.op == "call_function" and not self.is_training_only(node):
                self.made[node.name] = self.operation(node)
        self.graph.output(tuple(self.cast("", name) for name in gives))
        self.graph.lint()
        module = fx.GraphModule(self.root, self.graph)
        return module, tuple(held), tuple(str(node.target) for node in inputs)

    def is_training_only(self, node: fx.Node) -> bool:
        """An update of a buffer nobody reads: BatchNorm counting its batches."""
        return self.counts is not None and not node.users

    def operation(self, node: fx.Node) -> fx.Node:
        def argument(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return self.cast(node.name, value.name)
            return self.place.device if isinstance(value, torch.device) else value

        args = list(fx.node.map_aggregate(node.args, argument))
        kwargs = fx.node.map_aggregate(node.kwargs, argument)
        becomes = self.written["becomes"].get(node.name)
        target = str(node.target).removeprefix("aten.")
        if self.counts is not None:
            args = in_evaluation(target, args)
        if becomes is not None:
            return self.call(node, self.replacement(becomes, node, args), args[:2])
        if target == "batch_norm.default" and self.place.batch_norm_group is not None:
            function = _batch_norm(self.place.batch_norm_group)
            return self.call(node, function, args[:8])
        self.set_local_sizes(node, target, args)
        assert callable(node.target)
        return self.graph.call_function(node.target, tuple(args), dict(kwargs))

    def set_local_sizes(self, node: fx.Node, target: str, args: list[Any]) -> None:
        """A view names its extents: where the result is sharded, the extent is this rank's."""
        layout = self.written["layouts"].get(node.name)
        if layout is None:
            return
        extent = self.place.along(layout["axis"]).size * layout["outer"]
        if target in _SIZES_ARGUMENT:
            args[1] = [extent if i == layout["dim"] else x for i, x in enumerate(args[1])]
        elif target == "unflatten.int":
            first = args[1] % (node.args[0].meta["val"].dim())  # type: ignore[union-attr]
            inside = layout["dim"] - first
            args[2] = [extent if i == inside else x for i, x in enumerate(args[2])]

    def cast(self, user: str, value: str) -> fx.Node:
        """`value` in the layout `user` wants; equal casts of a value are made once."""
        cast = self.casts.get((user, value))
        if cast is None:
            return self.made[value]
        key = (value, cast["kind"])
        if key not in self.cast_nodes:
            function = self.collective(cast)
            self.cast_nodes[key] = self.call(None, function, [self.made[value]], cast["kind"])
        return self.cast_nodes[key]

    def collective(self, cast: dict[str, Any]) -> Callable[..., Tensor]:
        kind, dim, outer = cast["kind"], cast["dim"], cast["outer"]
        if kind in ("enter", "reduce"):
            simple = {"enter": enter, "reduce": reduce}[kind]
            return lambda x: simple(x, self.place.group)
        shards = self.place.along(cast["axis"])
        if kind in ("gather_enter", "reduce_scatter"):
            joining = {"gather_enter": gather_enter, "reduce_scatter": reduce_scatter}[kind]
            return lambda x: joining(x, dim, shards)
        cutting = {"gather": gather, "slice": slice_}[kind]
        return lambda x: cutting(x, dim, outer, shards)

    def replacement(self, becomes: str, node: fx.Node, args: list[Any]) -> Callable[..., Tensor]:
        """The distributed operation in place of `node`, its remaining arguments bound."""
        sharded = node.args[0]  # the logits, or the embedding's table
        assert isinstance(sharded, fx.Node)
        shards = self.place.along(self.written["layouts"][sharded.name]["axis"])
        if becomes == "split_embedding":
            padding = args[2] if len(args) > 2 and args[2] >= 0 else None
            return lambda weight, ids: split_embedding(ids, weight, shards, padding)
        ignore = args[4] if len(args) > 4 else node.kwargs.get("ignore_index", -100)
        smoothing = args[5] if len(args) > 5 else node.kwargs.get("label_smoothing", 0.0)
        assert isinstance(ignore, int)
        assert isinstance(smoothing, float)
        counts = self.counts

        def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
            if counts is not None:
                counts.add(*split_top1(logits, target, shards, ignore))
            return split_cross_entropy(logits, target, shards, ignore, smoothing)

        return cross_entropy

    def call(
        self, node: fx.Node | None, function: Callable[..., Tensor], args: list[Any], name: str = ""
    ) -> fx.Node:
        """A node that calls `function`: graphs can only name what a module holds."""
        name = f"{name or (node.name if node else '')}_{len(self.graph.nodes)}"
        self.root.add_module(name, _Function(function))
        return self.graph.call_module(name, tuple(args))


def in_evaluation(target: str, args: list[Any]) -> list[Any]:
    """The arguments a training graph's operation has in evaluation mode: `module.eval()` reaches
    these operations and no others of torch.nn."""
    position, off = _OFF_IN_EVALUATION.get(target, (len(args), None))
    return [off if i == position else x for i, x in enumerate(args)]


# Which argument evaluation turns off, and what off is.
_OFF_IN_EVALUATION: dict[str, tuple[int, Any]] = {
    "dropout.default": (2, False),
    "feature_dropout.default": (2, False),
    "alpha_dropout.default": (2, False),
    "feature_alpha_dropout.default": (2, False),
    "rrelu.default": (3, False),
    "batch_norm.default": (5, False),
    "scaled_dot_product_attention.default": (4, 0.0),
}


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Tensor:
        return self.function(*args)


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
