"""What a request's data and model must agree on beyond names."""

from collections.abc import Mapping

from whale_train.config import Request
from whale_train.errors import Fault
from whale_train.strategies.graph.operation_graph import ModelProfile, OperationGraph, Ref


def check_data(
    request: Request, profile: ModelProfile, held_back: int, faults: list[Fault]
) -> None:
    """Add faults where data and model do not agree: on token and class numbers, and on held-back
    samples."""
    train = request.train
    if train.evaluate_every is not None and not held_back:
        rule, every = "needs held-back samples, and there are none", str(train.evaluate_every)
        remedy = "raise data.evaluation_fraction, or use null"
        faults.append(Fault("train.evaluate_every", every, rule, remedy))
    if not profile.parameters:
        rule, remedy = "has no parameter to train", "give it one with requires_grad"
        faults.append(Fault("model", request.names.get("model", ""), rule, remedy))
    if profile.graph is None:
        return
    bounds = {field.name: field.upper_bound for field in profile.inputs}
    for operation in profile.graph:
        if operation.target == "aten.embedding.default":
            (table, numbers), what = operation.args[:2], "rows"
        elif operation.target in _CROSS_ENTROPIES:
            (table, numbers), what = operation.args[:2], "classes"
        else:
            continue
        assert isinstance(table, Ref)
        assert isinstance(numbers, Ref)
        name, bound = _largest(profile.graph, numbers.name, bounds)
        holder = profile.graph[table.name]
        shape = holder.shape or ()
        # Rows come first; classes second, but for logits without a batch.
        count = shape[0 if what == "rows" else min(1, len(shape) - 1)].fixed if shape else bound
        if bound > count:
            owner = holder.path or "the model"
            rule = f"has {name} up to {bound - 1}, and {owner} has {count} {what}"
            remedy = f"use a model with at least {bound} {what}, or other data"
            faults.append(Fault("data", request.names.get("data", ""), rule, remedy))


def _largest(graph: OperationGraph, name: str, bounds: Mapping[str, int]) -> tuple[str, int]:
    """Return where the integers `name` come from, and their exclusive upper bound (0: unknown).

    Followed back through what only moves them (shifts, pads, flattens), to an input or to the
    positions of a sequence.
    """
    offset = 0
    while True:
        operation = graph[name]
        if operation.target == "input":
            bound = bounds.get(name, 0)
            return name, bound + offset if bound else 0
        if operation.target.startswith("aten.arange."):
            stop = operation.args[0 if operation.target == "aten.arange.default" else 1]
            return "positions", stop + offset if isinstance(stop, int) else 0
        if len(operation.inputs) != 1:
            return name, 0
        if operation.target == "aten.add.Tensor":
            shift = operation.args[1]
            if not isinstance(shift, int):
                return name, 0
            offset += shift
        elif operation.target not in _MOVES:
            return name, 0
        name = operation.inputs[0]


_MOVES = (
    *("aten.slice.Tensor", "aten.pad.default", "aten.constant_pad_nd.default", "aten.select.int"),
    *(
        "aten.view.default",
        "aten.reshape.default",
        "aten.flatten.using_ints",
        "aten.expand.default",
    ),
    *(
        "aten.unsqueeze.default",
        "aten.squeeze.dim",
        "aten.contiguous.default",
        "aten.clone.default",
    ),
    *("aten.to.dtype", "aten.to.device", "aten.to.dtype_layout", "aten._to_copy.default"),
    *("aten.detach.default", "aten.alias.default", "aten.lift_fresh_copy.default"),
)
_CROSS_ENTROPIES = ("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default")
