"""The judgement over a whole graph: what a loss is of its batch's samples, and where they meet."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from whale_train.strategies.graph.operation_graph import HELD, Operation, OperationGraph
from whale_train.strategies.independence.call import Call, Refused
from whale_train.strategies.independence.rules import rule_of
from whale_train.strategies.independence.states import (
    FIXED,
    Fixed,
    Meets,
    PerSample,
    Pooled,
    State,
    Unknown,
    batch_dims,
)

LossKind = Literal["mean", "sum", "meets", "unknown"]


@dataclass(frozen=True)
class Judgement:
    """What the loss of a batch is, given the losses of its parts.

    `mean`: their mean, weighted by samples; `sum`: their sum; `meets`: neither, because of what
    `operation` does; `unknown`: nobody has said what `operation` does with samples (None: there is
    no graph to look at). `because` completes "the operation ...". `counts` writes into a buffer
    in every call, the same on every copy.
    """

    kind: LossKind
    operation: Operation | None = None
    because: str = ""
    counts: Operation | None = None


def states_of(graph: OperationGraph, batch_norms: Collection[str] = ()) -> dict[str, State]:
    """Return the state of every value of `graph`. `batch_norms` are the paths of the modules whose
    statistics the runtime takes over the whole batch."""
    states: dict[str, State] = {}
    known = frozenset(batch_norms)
    for operation in graph:
        states[operation.name] = _state(Call(graph, operation, states, known))
    return states


def judge(graph: OperationGraph, batch_norms: Collection[str] = ()) -> Judgement:
    """Return what the loss, the last value of `graph`, is of the samples of a batch.

    A buffer that the forward writes is looked at as well: copies keep one each, which must stay
    equal.
    """
    states = states_of(graph, batch_norms)
    found = _of_loss(graph, states)
    if found.kind in ("mean", "sum"):
        return _of_buffers(graph, states, batch_norms, found)
    return found


def _of_loss(graph: OperationGraph, states: dict[str, State]) -> Judgement:
    (loss,) = graph.operations[-1].inputs[:1]
    state = states[loss]
    match state:
        case Pooled(-1) | Fixed(0):
            return Judgement("mean")
        case Pooled(0, targets=False):
            return Judgement("sum")
        case Meets(name, because):
            return Judgement("meets", graph[name], because)
        case Unknown(name):
            return Judgement("unknown", graph[name])
        case Pooled() | Fixed():
            because = "scales the loss by another power of the batch's size than a mean or a sum"
            return Judgement("meets", graph[loss], because)
        case _:
            return Judgement("unknown", graph[loss])


def _of_buffers(
    graph: OperationGraph,
    states: dict[str, State],
    batch_norms: Collection[str],
    judgement: Judgement,
) -> Judgement:
    """Return `judgement` with the buffers looked at: one may be given something else on every
    copy, or change with every call."""
    for operation in graph:
        if not operation.writes or operation.target == "aten.detach_.default":
            continue  # `detach_` is said to write, and changes no value
        state = states[operation.name]
        if operation.module in batch_norms:
            continue
        if state == FIXED:
            judgement = replace(judgement, counts=operation)
            continue
        path = graph[operation.writes[0]].path
        because = f"keeps what it is given of the batch in the buffer {path}"
        return Judgement("unknown" if isinstance(state, Unknown) else "meets", operation, because)
    return judgement


def _state(call: Call) -> State:
    operation, states = call.operation, call.states
    if operation.target == "input":
        return PerSample(0)
    if operation.target in (*HELD, "graph", "output"):
        return FIXED
    shapes_alone = ("_like", "sym_size", "new_")
    if not any(mark in operation.target for mark in shapes_alone):
        for name in operation.inputs:
            if isinstance(states[name], Meets):
                return states[name]
        for name in operation.inputs:
            if isinstance(states[name], Unknown):
                return states[name]
    for name in operation.after:
        if isinstance(states[name], Meets):
            return states[name]
    if any(states[name] != FIXED for name in operation.after):
        return Unknown(operation.name)  # samples were written under another name
    follows = batch_dims(operation.shape or ())
    constant = all(states[name] == FIXED for name in operation.inputs)
    if constant and not follows and not operation.random:
        return FIXED
    rule = rule_of(operation.target)
    answer = rule(call) if rule is not None else None
    if isinstance(answer, Refused):
        return Meets(operation.name, answer.because)
    return _checked(call, answer)


def _checked(call: Call, answer: State | None) -> State:
    """Return a rule's answer where the result's shape bears it out."""
    shape = call.operation.shape
    if answer is None:
        return _undecided(call)
    if shape is None:
        return answer
    follows = batch_dims(shape)
    if isinstance(answer, PerSample):
        size = shape[answer.dim] if answer.dim < len(shape) else None
        if size is None or follows != [answer.dim] or size.fixed or size.per_sample % answer.before:
            return _undecided(call)
    elif isinstance(answer, Fixed | Pooled) and follows:
        return _undecided(call)
    return answer


def _undecided(call: Call) -> State:
    """Two dimensions that follow the batch hold something of every two samples."""
    operation = call.operation
    if len(batch_dims(operation.shape or ())) > 1:
        return Meets(operation.name, "makes something of every two samples of the batch")
    return Unknown(operation.name)
