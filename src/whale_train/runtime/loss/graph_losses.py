"""Rewrite losses that are means over targets inside a graph.

A micro-batch or a replica holds only some of a step's targets. The mean over all targets is the sum
over the targets at hand times a scale that the caller knows. `targets_graph` extracts the part of a
model's graph that counts the targets, so that a whole step's targets can be known before its first
micro-batch.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from whale_train.models.export.export import model_path, size_of
from whale_train.models.export.op_schemas import changed_value
from whale_train.strategies.graph.operation_graph import Size

LossWeight = Callable[[str], Tensor | float]

# Overloads of the losses, and the values of their reduction argument.
_CROSS_ENTROPY = "cross_entropy_loss.default"
_NEGATIVE_LOG = ("nll_loss.default", "nll_loss_nd.default", "nll_loss2d.default")
_MEAN, _SUM = 1, 2


def is_mean_over_targets(node: fx.Node) -> bool:
    """Return True for a cross-entropy or negative log-likelihood whose reduction is a mean."""
    kind = str(node.target).removeprefix("aten.")
    known = kind == _CROSS_ENTROPY or kind in _NEGATIVE_LOG
    return known and _option(node, 3, "reduction", _MEAN) == _MEAN


def ignored(node: fx.Node) -> int:
    """Return the ignore index of the loss `node`: targets with this value do not count."""
    index = _option(node, 4, "ignore_index", -100)
    assert isinstance(index, int)
    return index


def smoothing(node: fx.Node) -> float:
    """Return the label smoothing of a cross-entropy."""
    return float(_option(node, 5, "label_smoothing", 0.0))


def _option(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def plain_loss(
    node: fx.Node,
    scale: LossWeight | None,
    count: Callable[[Tensor, Tensor, Tensor, int], None] | None,
) -> Callable[..., Tensor]:
    """Return the loss `node` as a function of unsharded logits, targets and class weights.

    Logits are [N, classes, ..] or [classes], and targets [N, ..] class numbers or probabilities of
    the shape of the logits. With `scale`, the result is the sum over targets times
    `scale(node.name)`; without, it is the mean. If targets are class numbers, `count` is called
    with the logits, the targets, the mask of targets that count, and the dimension of the classes.
    """
    kind = str(node.target).removeprefix("aten.")
    ignore, smooth = ignored(node), smoothing(node) if kind == _CROSS_ENTROPY else 0.0

    def loss(logits: Tensor, target: Tensor, weight: Tensor | None = None, *rest: Any) -> Tensor:
        if count is not None and not target.is_floating_point():
            dim = min(logits.dim() - 1, 1)
            count(logits, target, target != ignore, dim)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))  # as under autocast
        reduction = "sum" if scale else "mean"
        if kind == _CROSS_ENTROPY:
            total = functional.cross_entropy(
                wide, target, weight, ignore_index=ignore, reduction=reduction,
                label_smoothing=smooth,
            )  # fmt: skip
        else:
            total = functional.nll_loss(
                wide, target, weight, ignore_index=ignore, reduction=reduction
            )
        return _scaled(total, scale(node.name)) if scale else total

    return loss


def _scaled(total: Tensor, scale: Tensor | float) -> Tensor:
    """Return a sum over targets times its scale, in the dtype of the sum.

    Another stage may receive the loss in that dtype, and a scale of fp64 would widen it.
    """
    return (total * scale).to(total.dtype)


def divisor(target: Tensor, weight: Tensor | None, ignore: int) -> Tensor:
    """Return the divisor of a mean over the classes `target`, an fp64 scalar.

    It is the number of targets that are not `ignore`, or the sum of their class weights.
    """
    counted = target != ignore
    if weight is None:
        return counted.sum(dtype=torch.float64)
    weights = weight[target.clamp(0, len(weight) - 1)]
    return (weights * counted).sum(dtype=torch.float64)


def targets_graph(
    source: fx.GraphModule,
    device: torch.device | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> fx.GraphModule | None:
    """Return the part of `source` that computes every loss's divisor from the model's inputs alone.

    The losses are those that are means over targets. The graph returns a tuple of fp64 scalars, one
    for each name in its `meta["losses"]`. Its placeholders are named after the inputs that it is
    called with, in order. It runs on `device` (default: the CPU). `tensors` are the tensors that
    training does not change and that the graph may read, by path in the model.

    The result is None when a target that is a class, or a class weight, depends on a parameter. If
    targets are probabilities, rows are counted, however the probabilities are computed.

    Raises KeyError for a tensor that the graph reads, and that neither `tensors` nor `source` has
    values of.
    """
    place = device or torch.device("cpu")
    trained = {
        name for name, p in source.named_parameters(remove_duplicate=False) if p.requires_grad
    }
    losses = [n for n in source.graph.nodes if n.op == "call_function" and is_mean_over_targets(n)]
    by_rows = {n for n in losses if n.args[1].meta["val"].is_floating_point()}
    wanted = [x for n in losses if n not in by_rows for x in _targets_of(n)]
    samples = _of_samples(source) if by_rows else None
    needed = _needed(source, [*wanted, *([samples] if samples else [])])
    if any(n.op == "get_attr" and str(n.target) in trained for n in needed):
        return None
    graph, root = fx.Graph(), nn.Module()
    copies: dict[fx.Node, fx.Node] = {}

    def argument(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return copies[value]
        return place if isinstance(value, torch.device) else value

    for node in source.graph.nodes:
        if node not in needed:
            continue
        if node.op == "placeholder":
            copies[node] = graph.placeholder(str(node.target))
        elif node.op == "get_attr":
            path = model_path(str(node.target))
            name = path.replace(".", "__")
            root.register_buffer(
                name,
                _constant(source, str(node.target), path, tensors, place.type == "meta").to(place),
            )
            copies[node] = graph.get_attr(name)
        else:
            args = fx.node.map_aggregate(node.args, argument)
            kwargs = fx.node.map_aggregate(node.kwargs, argument)
            copies[node] = graph.call_function(node.target, tuple(args), dict(kwargs))
    counts = []
    for node in losses:
        if node in by_rows:  # the count does not depend on the probabilities
            assert samples is not None
            counts.append(graph.call_function(_rows, (copies[samples], _row_sizes(node))))
            continue
        weight = _option(node, 2, "weight", None)
        given = (copies[node.args[1]], argument(weight), ignored(node))
        counts.append(graph.call_function(divisor, given))
    graph.output(tuple(counts))
    graph.lint()
    module = fx.GraphModule(root, graph)
    module.meta["losses"] = tuple(node.name for node in losses)
    return module


def _targets_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a loss's number of targets depends on: targets and class weights."""
    given = (node.args[1], _option(node, 2, "weight", None))
    return [x for x in given if isinstance(x, fx.Node)]


def _of_samples(source: fx.GraphModule) -> fx.Node:
    """Return the placeholder of an input that has one row per sample."""
    inputs = (node for node in source.graph.nodes if node.op == "placeholder")
    batched = (node for node in inputs if node.meta["val"].dim())
    by_sample = (x for x in batched if size_of(x.meta["val"].shape[0]) == Size(0, 1))
    first: fx.Node = next(by_sample)
    return first


def _row_sizes(node: fx.Node) -> tuple[tuple[int, int], ...]:
    """Return the extents of a loss's probabilities without the dimension of the classes.

    Each extent is a pair: fixed elements, and elements per sample.
    """
    target = node.args[1]
    assert isinstance(target, fx.Node)
    shape = target.meta["val"].shape
    classes = min(len(shape) - 1, 1)
    sizes = [size_of(extent) for dim, extent in enumerate(shape) if dim != classes]
    return tuple((size.fixed, size.per_sample) for size in sizes if size is not None)


def _rows(batch: Tensor, sizes: tuple[tuple[int, int], ...]) -> Tensor:
    """Return the number of rows, an fp64 scalar, of probabilities for `batch` [samples, ..].

    `sizes` are the extents of the rows, a result of `_row_sizes`.
    """
    rows = prod(fixed + per_sample * len(batch) for fixed, per_sample in sizes)
    return torch.tensor(float(rows), dtype=torch.float64, device=batch.device)


def _constant(
    source: fx.GraphModule,
    target: str,
    path: str,
    tensors: Mapping[str, Tensor] | None,
    without_values: bool,
) -> Tensor:
    """Return the tensor at `path` from `tensors`, or from `source`, where its name is `target`.

    Raises KeyError if neither has it with values; `without_values` accepts meta tensors.
    """
    if tensors and path in tensors:
        return tensors[path].detach()
    value: Any = source
    for part in target.split("."):
        value = getattr(value, part)
    if not isinstance(value, Tensor) or (value.device.type == "meta" and not without_values):
        raise KeyError(path)
    return value.detach()


def _needed(source: fx.GraphModule, targets: list[fx.Node]) -> set[fx.Node]:
    """Return every node that `targets` are computed from, with the nodes that write into any of
    these."""
    needed: set[fx.Node] = set()
    while targets:
        stack = list(targets)
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack.extend(node.all_input_nodes)
        targets = [n for n in source.graph.nodes if n not in needed and _writes_into(n, needed)]
    return needed


def _writes_into(node: fx.Node, values: set[fx.Node]) -> bool:
    """Return True where `node` changes the memory of one of `values`, perhaps through a view."""
    changed = changed_value(node)
    while changed is not None:
        if changed in values:
            return True
        views = str(changed.target).removeprefix("aten.").split(".")[0] in _VIEWS
        first = changed.args[0] if changed.args else None
        changed = first if views and isinstance(first, fx.Node) else None
    return False


_VIEWS = ("slice", "select", "view", "transpose", "unsqueeze", "squeeze", "expand", "permute", "t")
