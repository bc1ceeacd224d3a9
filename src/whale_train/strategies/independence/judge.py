"""The classification of a graph: how its loss depends on a batch's samples, and where these
meet."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from whale_train.strategies.graph.operation_graph import HELD, Operation, OperationGraph, Shape
from whale_train.strategies.independence.call import Call, Refused
from whale_train.strategies.independence.rules import rule_of
from whale_train.strategies.independence.states import (
    FIXED,
    CrossSample,
    Fixed,
    PerSample,
    Reduced,
    State,
    Unknown,
    batch_dims,
)

LossKind = Literal["mean", "sum", "meets", "unknown"]


@dataclass(frozen=True)
class LossReduction:
    """Relation of the loss of a batch to the losses of its parts.

    kind: `mean`: the mean of the parts' losses, weighted by samples. `sum`: the sum of the parts'
        losses. `meets`: neither, because of `operation`. `unknown`: no rule decides `operation`.
    operation: the operation that decides `kind`; None where none does, or without a graph.
    because: completes the sentence "the operation ...".
    counts: an operation that writes into a buffer in every call, the same on every replica; else
        None.
    sums: where samples meet only in sums over the batch, the degree of each sum (see `states`).
        Replicas that exchange their parts of these sums have the loss of the batch as the mean of
        their losses.
    """

    kind: LossKind
    operation: Operation | None = None
    because: str = ""
    counts: Operation | None = None
    sums: Mapping[str, int] = field(default_factory=dict)


def states_of(graph: OperationGraph, batch_norms: Collection[str] = ()) -> dict[str, State]:
    """Return the state of every value of `graph`, by name. `batch_norms` are the paths of the
    modules whose statistics the runtime computes over the whole batch."""
    states: dict[str, State] = {}
    known = frozenset(batch_norms)
    for operation in graph:
        states[operation.name] = _state(Call(graph, operation, states, known))
    return states


def classify_loss(graph: OperationGraph, batch_norms: Collection[str] = ()) -> LossReduction:
    """Return the relation of the loss, the last value of `graph`, to the samples of a batch.

    The buffers that the forward writes are checked as well: each replica has its own, and they must
    stay equal. `batch_norms` are as in `states_of`.
    """
    states = states_of(graph, batch_norms)
    judgement = _of_loss(graph, states)
    if judgement.kind in ("mean", "sum"):
        judgement = _of_buffers(graph, states, batch_norms, judgement)
    if judgement.kind == "meets":
        return replace(judgement, sums=_sums(graph, batch_norms))
    return judgement


def _sums(graph: OperationGraph, batch_norms: Collection[str]) -> Mapping[str, int]:
    """Return the degrees of the sums over the batch that replicas must exchange for the loss to be
    the mean of the replicas' losses; an empty mapping where that is not enough.

    A sum is exchanged if an operation that is not linear in it reads it. Values computed from it
    earlier are then computed from the whole batch's sum as well.
    """
    known, sums = frozenset(batch_norms), dict[str, int]()
    states: dict[str, State] = {}
    place = {operation.name: number for number, operation in enumerate(graph)}
    written_names = {name for operation in graph for name in operation.writes}

    def settle(operation: Operation) -> None:
        name, state = operation.name, _state(Call(graph, operation, states, known))
        if name in sums and isinstance(state, Reduced):
            state = FIXED
        else:  # its inputs may have been exchanged after it was added
            sums.pop(name, None)
        states[name] = state

    for number, operation in enumerate(graph):
        settle(operation)
        while isinstance(state := states[operation.name], CrossSample | Unknown):
            pooled = [x for x in operation.inputs if _exchanged_degree(states[x]) is not None]
            name = _first_made(graph, states, min(pooled, key=lambda x: place[x], default=""))
            degree = _exchanged_degree(states[name]) if name else None
            if state.name != operation.name or degree is None or name in written_names:
                break
            sums[name] = degree
            for again in graph.operations[place[name] : number + 1]:
                settle(again)
    judgement = _of_loss(graph, states)
    if judgement.kind == "mean":
        judgement = _of_buffers(graph, states, batch_norms, judgement)
    return sums if judgement.kind == "mean" else {}


def _exchanged_degree(state: State) -> int | None:
    """Return the degree of a sum over the batch whose parts are known when they are computed; None
    for any other state. The parts of a mean over targets are not known: the runtime normalises them
    by the whole batch's targets."""
    return state.degree if isinstance(state, Reduced) and not state.targets else None


def _first_made(graph: OperationGraph, states: Mapping[str, State], name: str) -> str:
    """Return the first form of the sum over the batch `name`, before conversions: an integer count
    is added up exactly."""
    while name:
        operation, degree = graph[name], _exchanged_degree(states[name])
        made = [x for x in operation.inputs if _exchanged_degree(states[x]) == degree]
        if len(made) != 1 or _elements(graph[made[0]].shape) != _elements(operation.shape):
            break
        (name,) = made
    return name


def _elements(shape: Shape | None) -> int:
    return prod(size.fixed for size in shape or ())


def _of_loss(graph: OperationGraph, states: dict[str, State]) -> LossReduction:
    (loss,) = graph.operations[-1].inputs[:1]
    state = states[loss]
    match state:
        case Reduced(-1) | Fixed(0):
            return LossReduction("mean")
        case Reduced(0, targets=False):
            return LossReduction("sum")
        case CrossSample(name, because):
            return LossReduction("meets", graph[name], because)
        case Unknown(name):
            return LossReduction("unknown", graph[name])
        case Reduced() | Fixed():
            because = "scales the loss by another power of the batch's size than a mean or a sum"
            return LossReduction("meets", graph[loss], because)
        case _:
            return LossReduction("unknown", graph[loss])


def _of_buffers(
    graph: OperationGraph,
    states: dict[str, State],
    batch_norms: Collection[str],
    judgement: LossReduction,
) -> LossReduction:
    """Return `judgement`, updated for the buffers that the forward writes. A buffer may get
    different values on the replicas, or change with every call."""
    for operation in graph:
        if not operation.writes or operation.target == "aten.detach_.default":
            continue  # `detach_` is marked as a write, and changes no value
        state = states[operation.name]
        if operation.module in batch_norms:
            continue
        if state == FIXED:
            judgement = replace(judgement, counts=operation)
            continue
        path = graph[operation.writes[0]].path
        because = f"keeps what it is given of the batch in the buffer {path}"
        return LossReduction(
            "unknown" if isinstance(state, Unknown) else "meets", operation, because
        )
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
            if isinstance(states[name], CrossSample):
                return states[name]
        for name in operation.inputs:
            if isinstance(states[name], Unknown):
                return states[name]
    for name in operation.after:
        if isinstance(states[name], CrossSample):
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
        return CrossSample(operation.name, answer.because)
    return _checked(call, answer)


def _checked(call: Call, answer: State | None) -> State:
    """Return a rule's answer if the result's shape agrees with it, else the state of an undecided
    operation."""
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
    elif isinstance(answer, Fixed | Reduced) and follows:
        return _undecided(call)
    return answer


def _undecided(call: Call) -> State:
    """Return the state of an operation that no rule decides.

    It is unknown, unless two dimensions of the result depend on the batch: the result then has an
    element for every pair of samples, so that samples meet.
    """
    operation = call.operation
    if len(batch_dims(operation.shape or ())) > 1:
        return CrossSample(operation.name, "makes something of every two samples of the batch")
    return Unknown(operation.name)
