"""Whether a loss is a mean over samples, so that a batch can be shared.

Replicas and micro-batches compute the losses of their own samples, and the weighted sum of these
is the loss of the batch; unless the samples of a batch meet: in a matrix of all against all
(contrastive losses), or in a statistic of the batch that is not simply averaged into the loss (a
product of two means, as routers' balancing losses have). BatchNorm is known and synchronised.
"""

from whale_train.errors import Fault
from whale_train.strategies.findings import Findings
from whale_train.strategies.layouts import differentiable
from whale_train.strategies.operations import ModelProfile, Operation, OperationGraph, Ref


def refuse_shared_batch(findings: Findings, faults: list[Fault]) -> None:
    """A fault where a model's samples meet, for a plan in which they are handed out."""
    profile = findings.profile
    graph = profile.graph
    if graph is None:
        return
    met = findings.once("where samples meet", lambda: where_samples_meet(graph))
    if met is not None:
        where = met.module or "its own forward"
        rule = (
            f"lets the samples of a batch meet in {where} ({met.name}), so that its loss is no "
            "mean over samples, which copies and micro-batches could share"
        )
        remedy = "use strategy=single, strategy=split, or a pipeline of one micro-batch"
        faults.append(Fault("model", profile.name, rule, remedy))


def refuse_learned_targets(
    profile: ModelProfile, key: str, value: str, remedy: str, faults: list[Fault]
) -> None:
    """Faults for means over targets that parameters have a part in, for a plan whose steps have
    several pieces: `key` is what cuts them, `remedy` the way out."""
    assert profile.graph is not None
    trained = {p.path for p in profile.parameters}
    for operation in profile.graph:
        if operation.target in _MEANS_OVER_TARGETS:
            made = profile.graph.ancestors(set(operation.inputs[1:]))
            if not trained.isdisjoint(profile.graph[name].path for name in made):
                rule = f"counts targets before it runs, and those of {operation.name} are computed"
                faults.append(Fault(key, value, f"{rule} from parameters", remedy))


_MEANS_OVER_TARGETS = (
    "aten.cross_entropy_loss.default",
    *(f"aten.{name}.default" for name in ("nll_loss", "nll_loss_nd", "nll_loss2d")),
)


def where_samples_meet(graph: OperationGraph) -> Operation | None:
    """The first operation in which samples of a batch meet on the way to the loss, if any does."""
    loss = set(graph.operations[-1].inputs[:1])
    wanted = graph.ancestors(loss)
    learned = differentiable(graph)
    depends = graph.descendants({op.name for op in graph if op.target == "parameter"})
    pooled: set[str] = set()  # what is made of all samples, and has none of its own any more
    for operation in graph:
        if operation.name not in wanted & depends or operation.target == "parameter":
            continue
        follows = sum(size.per_sample > 0 for size in operation.shape or ())
        if follows > 1 and operation.name in learned:
            return operation
        inputs = [name for name in operation.inputs if name in depends]
        from_pooled = [name for name in inputs if name in pooled]
        # What is given back to samples (x - mean) is not averaged into the loss any more.
        averaged = not from_pooled or (not follows and _is_linear(operation, from_pooled))
        if operation.name in learned and not averaged:
            return operation
        met = from_pooled or any(_has_samples(graph[name]) for name in inputs)
        if follows == 0 and met and "float" in operation.dtype:
            pooled.add(operation.name)
    return None


def _has_samples(operation: Operation) -> bool:
    return operation.shape is not None and any(size.per_sample for size in operation.shape)


def _is_linear(operation: Operation, pooled: list[str]) -> bool:
    """Whether it is linear in the one or several pooled values it reads together."""
    kind = operation.target.removeprefix("aten.").partition(".")[0].rstrip("_")
    if kind in _LINEAR:
        return True
    return len(pooled) == 1 and kind in ("mul", "div") and _is_first(operation, pooled[0], kind)


def _is_first(operation: Operation, name: str, kind: str) -> bool:
    """Whether it is a product of `name` with something else, or its quotient by something."""
    if kind == "mul":
        return operation.args.count(Ref(name)) == 1
    first = operation.args[0] if operation.args else None
    return isinstance(first, Ref) and first.name == name


# fmt: off
_LINEAR = frozenset((
    "add", "sub", "sum", "mean", "view", "reshape", "to", "_to_copy", "alias", "clone",
    "contiguous", "squeeze", "unsqueeze", "stack", "cat", "neg", "detach", "select", "slice",
    "float", "type_as", "expand",
))
# fmt: on
