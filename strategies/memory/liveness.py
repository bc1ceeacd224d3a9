"""Bytes that are alive while a part of the model runs forward and backward, by its operations.

These are bytes beside the weights and the optimizer's state: the values autograd keeps
(`saved_tensors.py`), the gradients on their way back, what an operation has at hand only while it
runs, and the gradients of weights, which come as values go. So a peak is not the sum of everything
that ever exists, but that of one moment.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from whale_train.strategies.graph.operation_graph import (
    HELD,
    INSIDE,
    LOOKUP,
    OWN,
    PRODUCTS,
    Operation,
    OperationGraph,
    block_of,
    is_repeated,
)
from whale_train.strategies.graph.saved_tensors import View, kept, memory_of, saved_by


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes that are alive at one time.

    gradients: bytes of the gradients of weights.
    values: bytes of a sample's values and of their gradients.
    """

    gradients: float
    values: float


@dataclass(frozen=True)
class ActivationProfile:
    """Bytes that one forward and backward of some operations hold.

    kept: bytes of a sample from the forward to the backward.
    deferred: where weight gradients are deferred, bytes of a sample from the backward to their
        computation.
    gradients: bytes of the gradients of all weights.
    forward: the worst moments of the forward.
    first: the worst moments of a backward that makes the weights' gradients.
    again: the worst moments of a backward that adds to existing gradients.
    """

    kept: float
    deferred: float
    gradients: float
    forward: tuple[MemoryPoint, ...]
    first: tuple[MemoryPoint, ...]
    again: tuple[MemoryPoint, ...]


def profile_forward_backward(
    view: View,
    operations: Sequence[str],
    weights: Mapping[str, float],
    takes: Iterable[str] = (),
    gives: Iterable[str] = (),
    in_place: Container[str] = (),
) -> ActivationProfile:
    """Return the moments of a forward and a backward of `operations`, in their order.

    view: the values as the rank holds them.
    weights: bytes of the gradient of each parameter, by the name of its operation.
    takes, gives: values that come from other parts of the model, and that go to them. They stay
        from forward to backward, whoever keeps them, and the backward begins with the gradients of
        `gives`.
    in_place: names of the weights whose gradients are added to where they are made.
    """
    graph = view.graph
    computed = [graph[name] for name in operations if graph[name].target not in _GIVEN]
    values = kept(view, (operation.name for operation in computed))
    for source in (memory_of(graph, name) for name in (*takes, *gives)):
        values.setdefault((source, OWN), view.num_bytes(source))
    run = _Run(view, weights, values, {memory_of(graph, name) for name in gives}, in_place)
    read = dict.fromkeys(name for operation in computed for name in operation.inputs)
    return ActivationProfile(
        sum(values.values()),
        run.deferred(computed),
        sum(weights[name] for name in read if name in weights),
        run.forward(computed),
        run.backward(computed, is_first=True),
        run.backward(computed, is_first=False),
    )


def profile_with_recompute(
    view: View,
    operations: Sequence[str],
    weights: Mapping[str, float],
    takes: Iterable[str] = (),
    gives: Iterable[str] = (),
    in_place: Container[str] = (),
) -> ActivationProfile:
    """Return the moments of a forward and a backward where repeated blocks are computed again in
    the backward. The forward keeps only what enters such a block
    (`runtime/graph/block_modules.py`).

    The arguments are those of `profile_forward_backward`.
    """
    graph = view.graph
    computed = [name for name in operations if graph[name].target not in _GIVEN]
    crossed = {memory_of(graph, name) for name in (*takes, *gives)}
    values = {(name, OWN): view.num_bytes(name) for name in crossed}
    forward: list[MemoryPoint] = []
    blocks: list[tuple[ActivationProfile, float]] = []  # with the bytes that are kept beside it
    for block, names in _runs(graph, computed):
        inside = set(names)
        read = {memory_of(graph, x) for name in names for x in graph[name].inputs}
        left = {memory_of(graph, x) for x in names if not inside.issuperset(graph.users[x])}
        run = profile_forward_backward(view, names, weights, (), left & inside, in_place)
        before = sum(values.values())
        own = kept(view, names)
        if is_repeated(block):
            enters = [x for x in read - inside if graph[x].target not in _GIVEN]
            values |= {(x, OWN): view.num_bytes(x) for x in enters}
            known = sum(num_bytes for key, num_bytes in own.items() if key in values)
            before = sum(values.values()) - known  # values that enter stay, and are not kept twice
            forward += (MemoryPoint(0.0, before + m.values) for m in run.forward)
        else:
            forward += (MemoryPoint(0.0, before + m.values) for m in run.forward)
            values |= own
        blocks.append((run, before))
    done, moments = 0.0, dict[bool, list[MemoryPoint]]({True: [], False: []})
    for run, before in reversed(blocks):
        for is_first, worst in ((True, run.first), (False, run.again)):
            come = done if is_first else 0.0
            moments[is_first] += (MemoryPoint(come + m.gradients, before + m.values) for m in worst)
        done += run.gradients
    deferred = sum(run.deferred for run, _ in blocks)
    first, again = _worst(moments[True]), _worst(moments[False])
    return ActivationProfile(sum(values.values()), deferred, done, _worst(forward), first, again)


def _runs(graph: OperationGraph, operations: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the runs of consecutive operations of one block, each after the path of the block."""
    grouped = groupby(operations, key=lambda name: block_of(graph[name].module))
    return [(block, list(names)) for block, names in grouped]


_GIVEN = (*HELD, "input", "output", "graph")
# Operations that hand their gradient on as it is, to every value they add.
_HANDS_ON = ("aten.add.Tensor", "aten.add_.Tensor")


@dataclass
class _Backward:
    """Progress of a backward.

    values: bytes of the values still kept.
    gradients: bytes of the gradients of values, by the operation in whose memory the value lies.
    made: names of the weights whose gradients are made.
    weights: bytes of the gradients of weights that are made.
    """

    values: float
    gradients: dict[str, float] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    weights: float = 0.0


@dataclass(frozen=True)
class _Run:
    """A forward and backward of operations, whose moments its methods give.

    view: the values as the rank holds them.
    weights, in_place: as in `profile_forward_backward`.
    values: bytes that autograd keeps, as `kept` gives them, with the values that are taken and
        given.
    gives: the operations in whose memory the values lie that go to other parts of the model.
    """

    view: View
    weights: Mapping[str, float]
    values: Mapping[tuple[str, int], float]
    gives: Collection[str]
    in_place: Container[str]

    def sources(self, operation: Operation) -> list[str]:
        """Return the operations in whose memory an operation's inputs lie, but for weights and
        inputs without a gradient."""
        graph = self.view.graph
        read = (x for x in operation.inputs if x in graph.trained)
        return [memory_of(graph, x) for x in read if graph[x].target != "parameter"]

    def forward(self, operations: Sequence[Operation]) -> tuple[MemoryPoint, ...]:
        """Return the worst moment of the forward. An operation's moment has the values kept by
        then, and those it reads and makes that nobody keeps."""
        own = {operation.name for operation in operations}
        known = {key for key in self.values if key[0] not in own}  # entered, or made before
        worst, so_far = 0.0, sum(self.values[key] for key in known)
        made: set[str] = set()
        for operation in operations:
            for key, num_bytes in saved_by(self.view, operation):
                if key not in known:
                    known.add(key)
                    so_far += num_bytes
            near = {memory_of(self.view.graph, x) for x in (operation.name, *operation.inputs)}
            unsaved = (x for x in near if x in own and (x, OWN) not in known)
            at_hand = sum(self.view.num_bytes(x) for x in unsaved)
            for cast, num_bytes in self._put_together(operation):
                # Parts come into one buffer, and are put together in another.
                buffers = (cast not in made) + ((cast, OWN) not in known)
                at_hand += buffers * num_bytes
                made.add(cast)
            worst = max(worst, so_far + at_hand)
        return (MemoryPoint(0.0, worst),)

    def _put_together(self, operation: Operation) -> Iterator[tuple[str, float]]:
        """Yield the values that an operation reads gathered or cut, under their names in
        `saved_by`, and their bytes."""
        for name in operation.inputs if self.view.read_as else ():
            if (operation.name, name) in self.view.read_as:
                part = self.view.read_as[operation.name, name]
                yield f"{name} as {part}", self.view.read_bytes(operation, name)

    def deferred(self, operations: Sequence[Operation]) -> float:
        """Return the bytes that deferred weight gradients need: the inputs of products and lookups,
        and the gradients of their results."""
        held: dict[tuple[str, int], float] = {}
        for operation in operations:
            if operation.target in (*PRODUCTS, LOOKUP) and any(
                x in self.weights for x in operation.inputs
            ):
                held |= {(x, 0): self.view.num_bytes(x) for x in self.sources(operation)}
                held[operation.name, 1] = self.view.num_bytes(operation.name)
        return sum(held.values())

    def backward(self, operations: Sequence[Operation], is_first: bool) -> tuple[MemoryPoint, ...]:
        """Return the worst moments of the backward, from the last operation to the first.

        An operation's moment has its own gradient and those it makes. A tensor is freed after the
        backward of the operation that was the first to have it kept. `is_first` says that the
        weights' gradients are made, not added to.
        """
        trained = self.view.graph.trained
        given = {x: self.view.num_bytes(x) for x in self.gives if x in trained}
        state = _Backward(sum(self.values.values()), given)
        lets_go: dict[str, float] = {}
        known: set[tuple[str, int]] = {(x, OWN) for x in self.gives}
        for operation in operations:
            for key, num_bytes in saved_by(self.view, operation):
                if key not in known:
                    known.add(key)
                    lets_go[operation.name] = lets_go.get(operation.name, 0.0) + num_bytes
        moments = []
        for operation in reversed(operations):
            if operation.name in trained and operation.memory == OWN:
                moments.append(self._step(operation, state, is_first))
            state.values -= lets_go.get(operation.name, 0.0)
        return _worst(moments)

    def _step(self, operation: Operation, state: _Backward, is_first: bool) -> MemoryPoint:
        """Return the moment of one operation's backward.

        The operation has its own gradient until the gradients of its inputs are made. Its
        intermediate values have a gradient as well. A gradient that is added to is made anew, if
        not in place. One that is put together of parts exists twice.
        """
        own = state.gradients.pop(operation.name, 0.0)
        within = sum(x for place, x in operation.saved if place == INSIDE)
        at_hand = within * self.view.inside(operation)
        if _is_written_over(self.view, operation):
            at_hand = -at_hand
        sources, hands_on = self.sources(operation), operation.target in _HANDS_ON
        for source in dict.fromkeys(sources):
            size = self.view.num_bytes(source)
            if hands_on and source not in state.gradients and size == own:
                state.gradients[source], own, hands_on = own, 0.0, False
                continue
            if source in state.gradients:
                at_hand += size
            if sources.count(source) > 1:
                at_hand += size
            state.gradients[source] = size
        # The gradients of gathered or cut inputs, until they are cut or summed.
        at_hand += sum(num_bytes for _, num_bytes in self._put_together(operation))
        added = 0.0
        for name in operation.inputs:
            if name in self.weights:
                if is_first and name not in state.made:
                    state.made.add(name)
                    state.weights += self.weights[name]
                elif name not in self.in_place:
                    added += self.weights[name]
        alive = state.values + sum(state.gradients.values()) + own + at_hand
        return MemoryPoint(state.weights + added, alive)


def _is_written_over(view: View, operation: Operation) -> bool:
    """Return whether an operation writes its gradient over the values that its forward kept, as a
    cross-entropy does whose classes are split (`runtime/kernels/vocab_parallel.py`)."""
    is_loss = operation.target == "aten.cross_entropy_loss.default"
    return is_loss and min(view.part_of(x) for x in operation.inputs) < 1


def _worst(moments: Iterable[MemoryPoint]) -> tuple[MemoryPoint, ...]:
    """Return the moments on the Pareto front: no other needs as many bytes of gradients *and* of
    values."""
    front: list[MemoryPoint] = []
    for moment in sorted(moments, key=lambda m: (m.gradients, m.values), reverse=True):
        if not front or moment.values > front[-1].values:
            front.append(moment)
    return tuple(front)
