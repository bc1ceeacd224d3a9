"""Cutting the exported graph where a split head meets the copied rest of the model.

The graph becomes segments that run in order, each belonging to one TaskGraph: what the head's
weight feeds before the backbone (a tied embedding), the backbone, and everything from the head to
the loss. Values cross from one segment to the next; what depends on no parameter is computed
again where it is needed instead of being sent. Owns the partition; `propagation.py` types the
pieces.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from whale_train.strategies.graph.forward_state import torn_buffer, updates_beside
from whale_train.strategies.graph.operation_graph import ModelProfile, OperationGraph, Size
from whale_train.strategies.layouts.propagation import (
    BATCH,
    ENTERED,
    RULES,
    Assignment,
    Layout,
    R,
    Replicated,
    Shard,
    assign,
    reshape,
)
from whale_train.strategies.partition.output_head import Head

CLASSES = "classes"  # the axis along which the head is cut


@dataclass(frozen=True)
class Segment:
    """Operations that one TaskGraph runs in one go. `takes` come from earlier segments, `gives`
    go to later ones (the last segment gives the loss); `assignment` types them over the
    TaskGraph's shard group (None where every rank simply has its own samples). Of `sums` over the
    batch, with their degrees, copies tell each other their parts."""

    task_graph: int
    operations: tuple[str, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    assignment: Assignment | None
    sums: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadCut:
    """Backbone (TaskGraph 0) and head (TaskGraph 1) over the same devices.

    `operation` makes the logits; `shards` maps the canonical path of each of the head's parameters
    to its layout.
    """

    operation: str
    segments: tuple[Segment, ...]
    shards: dict[str, Shard]
    backbone_parameters: tuple[str, ...]
    backbone_flops: float
    head_flops: float


class CutRefused(Exception):
    """The head cannot be separated from the rest; the text is the reason."""


def cut_head(profile: ModelProfile, head: Head) -> HeadCut:
    """Cut `profile.graph` at `head`. Raises `CutRefused` with the reason where it cannot."""
    graph = profile.graph
    assert graph is not None
    canonical = {name: p.path for name, p in profile.parameter_by_path.items()}
    loss = graph.operations[-1].inputs[0]
    after = graph.descendants({head.operation})
    if loss not in after:
        raise CutRefused("the loss does not come from it")
    parameters = {op.name for op in graph if op.target == "parameter"}
    weights = {name for name in parameters if canonical[graph[name].path] == head.weight}
    depends = graph.descendants(parameters) - parameters
    tied = _tied_lookups(graph, weights, after, depends)

    last, crossing = _head_segment(graph, loss, depends - after)
    if tied.intersection(crossing):
        raise CutRefused("the embedding it is tied to is read after the backbone as well")
    if not crossing:
        raise CutRefused("nothing before it has a parameter to copy")
    features = tuple(crossing)
    middle, taken = _upstream_of(graph, features, tied)
    middle |= graph.ancestors(set(graph.updates) - last)
    first = _upstream_of(graph, tuple(taken), set())[0] if taken else set()
    if torn := torn_buffer(graph, (first, middle, last)):
        raise CutRefused(f"the forward changes the buffer {torn}, which the backbone reads as well")
    _refuse_shared_parameters(
        *(
            {canonical[graph[name].path] for name in side & parameters}
            for side in (middle, first | last)
        )
    )
    for name in (*features, *taken):
        shape = graph[name].shape
        if not shape or shape[0] != Size(0, 1):
            raise CutRefused(f"the value {name} that crosses to it has no batch dimension first")

    shards = {head.weight: Shard(head.dim, CLASSES)}
    inputs: dict[str, Layout] = {
        op.name: Shard(0, BATCH) for op in graph if op.target == "input" and op.shape
    }
    while True:  # a parameter that every user wants sharded (a bias) is held sharded
        given: dict[str, Layout] = dict(inputs)
        given |= {n: shards[p] for n in parameters if (p := canonical[graph[n].path]) in shards}
        given |= {name: Shard(0, BATCH) for name in features}
        typed_last = assign(graph, last, given, {loss: R})
        typed_first = assign(graph, first, given, {name: Shard(0, BATCH) for name in taken})
        found = _parameters_to_shard(graph, typed_last, parameters, canonical)
        if not found.keys() - shards.keys():
            break
        shards |= found
    _refuse_entered_parameters(graph, (typed_first, typed_last), parameters)

    segments = [Segment(0, _ordered(graph, middle), tuple(taken), features, None)]
    if taken:
        ordered = _ordered(graph, first)
        segments.insert(0, Segment(1, ordered, (), tuple(taken), typed_first))
    segments.append(Segment(1, _ordered(graph, last), features, (loss,), typed_last))
    held = {canonical[graph[name].path] for name in middle & parameters}
    return HeadCut(
        head.operation,
        tuple(segments),
        shards,
        tuple(p.path for p in profile.parameters if p.path in held),
        sum(graph[name].flops for name in middle),
        sum(graph[name].flops for name in first | last),
    )


def _tied_lookups(
    graph: OperationGraph, weights: set[str], after: set[str], depends: set[str]
) -> set[str]:
    """Embedding lookups of the head's own weight that must run before the backbone."""
    tied = set()
    for weight in weights:
        for user in graph.users[weight]:
            if user in after or _is_copy_into(graph, after, user):
                continue
            operation = graph[user]
            indices = operation.inputs[1] if len(operation.inputs) > 1 else ""
            if operation.target != "aten.embedding.default" or indices in depends:
                reader = operation.module or "the model itself"
                raise CutRefused(f"its weight is also read by {reader} ({user})")
            tied.add(user)
    return tied


def _is_copy_into(graph: OperationGraph, after: set[str], name: str) -> bool:
    """Return whether `name` is a parameter seen otherwise that only the head's segment reads."""
    return _is_parameter_only(graph, name) and all(
        user in after or _is_copy_into(graph, after, user) for user in graph.users[name]
    )


def _head_segment(
    graph: OperationGraph, loss: str, elsewhere: set[str]
) -> tuple[set[str], list[str]]:
    """Return what runs from the head to the loss, with the writes into buffers that are read
    there; and the values made `elsewhere` that it takes, in order."""
    names = {loss}
    while True:
        inside, crossing = _upstream(graph, names, elsewhere)
        beside = updates_beside(graph, inside)
        if beside <= names:
            return inside, crossing
        names |= beside


def _upstream(
    graph: OperationGraph, of: set[str], elsewhere: set[str]
) -> tuple[set[str], list[str]]:
    """Return what `of` are computed from, up to the values made `elsewhere`; and those values in
    order."""
    inside, crossing, stack = set[str](), set[str](), list(of)
    while stack:
        name = stack.pop()
        if name in inside or name in crossing:
            continue
        if name in elsewhere and _can_cross(graph, name):
            crossing.add(name)
            continue
        inside.add(name)
        stack.extend((*graph[name].inputs, *graph[name].after))
    return inside, [op.name for op in graph if op.name in crossing]


def _can_cross(graph: OperationGraph, name: str) -> bool:
    """Return whether a value may cross between segments: not a scalar and not a transpose of a
    parameter, which hold no sample's data; nor a view that merges the batch with another dimension:
    what it views crosses instead."""
    operation = graph[name]
    if not operation.shape or _is_parameter_only(graph, name):
        return False
    return operation.shape[0] == Size(0, 1) or RULES.get(operation.target) is not reshape


def _is_parameter_only(graph: OperationGraph, name: str) -> bool:
    """Return whether `name` is a parameter seen otherwise (transposed, cast): no sample has a part
    in it."""
    return not any(graph[ancestor].target == "input" for ancestor in graph.ancestors({name}))


def _upstream_of(
    graph: OperationGraph, names: tuple[str, ...], stop: set[str]
) -> tuple[set[str], list[str]]:
    """Return all that `names` are computed from, stopping at the values in `stop`, which are
    returned."""
    inside, reached, stack = set[str](), set[str](), list(names)
    while stack:
        name = stack.pop()
        if name in stop:
            reached.add(name)
        elif name not in inside:
            inside.add(name)
            stack.extend((*graph[name].inputs, *graph[name].after))
    return inside, [op.name for op in graph if op.name in reached]


def _parameters_to_shard(
    graph: OperationGraph, typed: Assignment, parameters: set[str], canonical: Mapping[str, str]
) -> dict[str, Shard]:
    """Return the parameters that all their users want cut the same way, by canonical path."""
    wanted: dict[str, set[Layout]] = {}
    for cast in typed.casts:
        if cast.value in parameters:
            wanted.setdefault(cast.value, set()).add(cast.target)
    found = {}
    for name, targets in wanted.items():
        target = next(iter(targets))
        if len(targets) == 1 and isinstance(target, Shard):
            found[canonical[graph[name].path]] = target
    return found


def _refuse_shared_parameters(backbone: set[str], head: set[str]) -> None:
    if shared := sorted(backbone & head):
        raise CutRefused(f"the backbone reads its parameter {shared[0]} as well")


def _refuse_entered_parameters(
    graph: OperationGraph, typed: tuple[Assignment, ...], parameters: set[str]
) -> None:
    """Refuse a parameter left whole beside the shards: it would need its gradient summed over them,
    which the head's engines do not."""
    for assignment in typed:
        for name, layout in assignment.layouts.items():
            if name in parameters and isinstance(layout, Replicated):
                path = graph[name].path
                raise CutRefused(f"its parameter {path} cannot be cut along the classes")
        for cast in assignment.casts:
            if cast.value in parameters:
                path = graph[cast.value].path
                raise CutRefused(f"its parameter {path} has no cut that fits all its uses")
    assert all(cast.target != ENTERED or cast.value for t in typed for cast in t.casts)


def _ordered(graph: OperationGraph, names: set[str]) -> tuple[str, ...]:
    return tuple(op.name for op in graph if op.name in names)
