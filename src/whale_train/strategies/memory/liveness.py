"""Liveness analysis of a forward and a backward of a part of the model, by its operations.

Weights and the optimizer's state are left out. The bytes are those of tensors that autograd saves
(`saved_tensors.py`), gradients of values, temporaries of an operation while it runs, and gradients
of weights. A peak is the sum over one moment, not over everything that ever exists.
"""

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby

from whale_train.strategies.graph.block_paths import block_of, unit_of
from whale_train.strategies.graph.operation_graph import (
    GIVEN,
    INSIDE,
    OWN,
    Operation,
    OperationGraph,
)
from whale_train.strategies.graph.saved_tensors import View, entering_values, kept, saved_by


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes that are alive at one moment.

    gradients: bytes of the gradients of weights.
    values: bytes per sample of values and their gradients.
    """

    gradients: float
    values: float


@dataclass(frozen=True)
class ActivationProfile:
    """Bytes that are alive during one forward and one backward of some operations.

    kept: bytes per sample that live from the forward to the backward.
    deferred: where weight gradients are deferred, bytes per sample that live from the backward to
        their computation.
    gradients: bytes of the gradients of all weights.
    forward: the worst moments of the forward.
    first: the worst moments of a backward that makes the weights' gradients.
    again: the worst moments of a backward that adds to existing gradients.
    sent: bytes per sample that are on the host from the forward to the backward.
    """

    kept: float
    deferred: float
    gradients: float
    forward: tuple[MemoryPoint, ...]
    first: tuple[MemoryPoint, ...]
    again: tuple[MemoryPoint, ...]
    sent: tuple[float, ...] = ()


def profile_forward_backward(
    view: View,
    operations: Sequence[str],
    weights: Mapping[str, float],
    takes: Iterable[str] = (),
    gives: Iterable[str] = (),
    in_place: Container[str] = (),
    own_gradients: Container[str] = (),
) -> ActivationProfile:
    """Return the liveness of a forward and a backward of `operations`, in their order.

    view: the values as the rank holds them.
    weights: bytes of the gradient of each parameter, by the name of its operation.
    takes, gives: names of the values that come from, and go to, other parts of the model. They live
        from forward to backward, whoever keeps them. The backward begins with the gradients of
        `gives`.
    in_place: names of the weights whose gradients are accumulated in place.
    own_gradients: names of the operations that compute their weights' gradients themselves.
    """
    graph = view.graph
    computed = [graph[name] for name in operations if graph[name].target not in GIVEN]
    saved = [list(saved_by(view, operation)) for operation in computed]
    values: dict[tuple[str, int], float] = {}
    for key, num_bytes in chain.from_iterable(saved):
        values.setdefault(key, num_bytes)
    for source in (graph.memory_of[name] for name in (*takes, *gives)):
        values.setdefault((source, OWN), view.num_bytes(source))
    given = {graph.memory_of[name] for name in gives}
    run = _Run(view, computed, saved, weights, values, given, in_place, own_gradients)
    first, again = run.backward()
    read = dict.fromkeys(name for operation in computed for name in operation.inputs)
    return ActivationProfile(
        sum(values.values()),
        run.deferred(),
        sum(weights[name] for name in read if name in weights),
        run.forward(),
        first,
        again,
    )


def profile_by_unit(
    view: View,
    operations: Sequence[str],
    weights: Mapping[str, float],
    units: Container[str],
    takes: Iterable[str] = (),
    gives: Iterable[str] = (),
    in_place: Container[str] = (),
    own_gradients: Container[str] = (),
    offloaded: Container[str] = (),
    smallest: float = 0.0,
) -> ActivationProfile:
    """Return the liveness of a forward and a backward with activation recomputation: the forward
    keeps only what enters a module of `units` (`runtime/graph/block_modules.py`), and the backward
    computes the module again.

    What modules in `offloaded` save is on the host, if it has at least `smallest` bytes per sample
    (`runtime/base/host_copies.py`). The device frees it when the next offloaded module's forward
    has ended, and has it again when the backward of the next one begins. The other arguments are
    those of `profile_forward_backward`.
    """
    graph = view.graph
    computed = [name for name in operations if graph[name].target not in GIVEN]
    crossed = {graph.memory_of[name] for name in (*takes, *gives)}
    values = {(name, OWN): view.num_bytes(name) for name in crossed}
    forward: list[MemoryPoint] = []
    blocks: list[tuple[ActivationProfile, float]] = []  # profile, bytes of other blocks' values
    sent: dict[tuple[str, int], float] = {}
    last: dict[tuple[str, int], float] = {}  # what the last offloaded module has sent
    for unit, is_sent, names in _runs(graph, computed, units, offloaded):
        inside = set(names)
        left = {graph.memory_of[x] for x in names if not inside.issuperset(graph.users[x])}
        run = profile_forward_backward(
            *(view, names, weights, (), left & inside), in_place, own_gradients
        )
        own = kept(view, names)
        enters = {(x, OWN): view.num_bytes(x) for x in entering_values(graph, names)}
        saves = enters if unit else own
        others = {**values, **last, **(enters if unit else {})}
        before = sum(num_bytes for key, num_bytes in others.items() if key not in own)
        # Nobody saves these, and the caller of a run refers to them while the run reads them.
        read = sum(x for key, x in enters.items() if key not in own and key not in others)
        forward += (MemoryPoint(0.0, before + read + m.values) for m in run.forward)
        if is_sent:
            last = {key: x for key, x in saves.items() if key not in values and x >= smallest}
            sent |= last
            saves = {key: x for key, x in saves.items() if key not in last}
        values |= saves
        blocks.append((run, before))
    done, moments = 0.0, dict[bool, list[MemoryPoint]]({True: [], False: []})
    for run, before in reversed(blocks):
        for is_first, worst in ((True, run.first), (False, run.again)):
            come = done if is_first else 0.0
            moments[is_first] += (MemoryPoint(come + m.gradients, before + m.values) for m in worst)
        done += run.gradients
    deferred = sum(run.deferred for run, _ in blocks)
    first, again = _worst(moments[True]), _worst(moments[False])
    return ActivationProfile(
        *(sum(values.values()), deferred, done, _worst(forward), first, again),
        sent=tuple(sent.values()),
    )


def _runs(
    graph: OperationGraph,
    operations: Sequence[str],
    units: Container[str],
    offloaded: Container[str],
) -> list[tuple[str, bool, list[str]]]:
    """Return the runs of consecutive operations of one unit or else one offloaded module or else
    one block: the unit ('': none), whether it is offloaded, and the operations' names."""

    def place(name: str) -> tuple[str, str, str]:
        module = graph[name].module
        unit, sent = unit_of(module, units), unit_of(module, offloaded)
        return unit, sent, "" if unit or sent else block_of(module)

    runs = groupby(operations, key=place)
    return [(unit, bool(sent), list(names)) for (unit, sent, _), names in runs]


# Operations that pass their gradient on unchanged, to every value they add.
_HANDS_ON = ("aten.add.Tensor", "aten.add_.Tensor")


@dataclass
class _Backward:
    """The state of a backward in progress.

    values: bytes of the saved tensors that are still alive.
    gradients: bytes of the gradients of values, by the operation that owns the value's storage.
    made: names of the weights whose gradients exist.
    weights: bytes of the gradients of weights that exist.
    """

    values: float
    gradients: dict[str, float] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    weights: float = 0.0


@dataclass(frozen=True)
class _Run:
    """A forward and a backward of operations.

    view: the values as the rank holds them.
    operations: the operations that run, in their order.
    saved: the tensors that autograd saves for each operation, as returned by `saved_by`.
    weights, in_place, own_gradients: as in `profile_forward_backward`.
    values: bytes that autograd keeps, as returned by `kept`, with the values that are taken and
        given.
    gives: the operations that own the storage of values for other parts of the model.
    """

    view: View
    operations: Sequence[Operation]
    saved: Sequence[Sequence[tuple[tuple[str, int], float]]]
    weights: Mapping[str, float]
    values: Mapping[tuple[str, int], float]
    gives: Collection[str]
    in_place: Container[str]
    own_gradients: Container[str]

    @cached_property
    def put_together(self) -> list[list[tuple[str, float]]]:
        """Return, for each operation, the values that it reads gathered or sliced: their names in
        `saved_by`, and their bytes."""
        read_as = self.view.read_as
        if not read_as:
            return [[] for _ in self.operations]
        return [
            [
                (f"{x} as {read_as[operation.name, x]}", self.view.read_bytes(operation, x))
                for x in operation.inputs
                if (operation.name, x) in read_as
            ]
            for operation in self.operations
        ]

    def forward(self) -> tuple[MemoryPoint, ...]:
        """Return the worst moment of the forward. At each operation, the tensors saved so far are
        alive, and the operation's inputs and output that nothing saves."""
        own = {operation.name for operation in self.operations}
        known = {key for key in self.values if key[0] not in own}  # entered, or made before
        worst, so_far = 0.0, sum(self.values[key] for key in known)
        memory_of, size = self.view.graph.memory_of, self.view.num_bytes
        made: set[str] = set()
        for operation, saved, read in zip(
            self.operations, self.saved, self.put_together, strict=True
        ):
            for key, num_bytes in saved:
                if key not in known:
                    known.add(key)
                    so_far += num_bytes
            touched = {memory_of[x] for x in (operation.name, *operation.inputs)}
            at_hand = sum(size(x) for x in touched if x in own and (x, OWN) not in known)
            if not _is_written_over(self.view, operation):
                at_hand += sum(self.view.widened_bytes(operation, x) for x in operation.inputs)
            for cast, num_bytes in read:
                # Shards are received in one buffer, and joined in another.
                buffers = (cast not in made) + ((cast, OWN) not in known)
                at_hand += buffers * num_bytes
                made.add(cast)
            worst = max(worst, so_far + at_hand)
        return (MemoryPoint(0.0, worst),)

    def deferred(self) -> float:
        """Return the bytes per sample that deferred weight gradients need: the inputs of products
        and lookups, and the gradients of their results."""
        graph, size = self.view.graph, self.view.num_bytes
        held: dict[tuple[str, int], float] = {}
        for operation in self.operations:
            if operation.name not in self.own_gradients:
                continue
            if any(x in self.weights for x in operation.inputs):
                held |= {(x, 0): size(x) for x in graph.gradients_of[operation.name]}
                held[operation.name, 1] = size(operation.name)
        return sum(held.values())

    def backward(self) -> tuple[tuple[MemoryPoint, ...], tuple[MemoryPoint, ...]]:
        """Return the worst moments of a backward that makes the weights' gradients, and of one that
        adds to existing gradients.

        The backward runs from the last operation to the first. At each operation, its own gradient
        is alive and the gradients that it makes. A saved tensor is freed after the backward of the
        operation that saved it first.
        """
        trained, size = self.view.graph.trained, self.view.num_bytes
        given = {x: size(x) for x in self.gives if x in trained}
        state = _Backward(sum(self.values.values()), given)
        known: set[tuple[str, int]] = {(x, OWN) for x in self.gives}
        lets_go: list[float] = []
        for saved in self.saved:
            freed = 0.0
            for key, num_bytes in saved:
                if key not in known:
                    known.add(key)
                    freed += num_bytes
            lets_go.append(freed)
        first: list[tuple[float, float]] = []
        again: list[tuple[float, float]] = []
        for number in range(len(self.operations) - 1, -1, -1):
            operation = self.operations[number]
            if operation.name in trained and operation.memory == OWN:
                alive = self._alive(number, state)
                added_first, added_again = self._added(operation, state)
                first.append((state.weights + added_first, alive))
                again.append((added_again, alive))
            state.values -= lets_go[number]
        return _worst_of(first), _worst_of(again)

    def _alive(self, number: int, state: _Backward) -> float:
        """Return the bytes of values and their gradients that are alive in one operation's
        backward.

        The gradient of the operation's result lives until the gradients of its inputs are made.
        Intermediate values of the operation have gradients too. A gradient that sums several parts
        exists twice.
        """
        operation, view = self.operations[number], self.view
        gradients = state.gradients
        own = gradients.pop(operation.name, 0.0)
        within = sum(x for place, x in operation.saved if place == INSIDE)
        at_hand = within * view.inside(operation) if within else 0.0
        if _is_written_over(view, operation):
            at_hand = -at_hand
        sources = view.graph.gradients_of[operation.name]
        hands_on = operation.target in _HANDS_ON
        for source in dict.fromkeys(sources):
            size = view.num_bytes(source)
            if hands_on and source not in gradients and size == own:
                gradients[source], own, hands_on = own, 0.0, False
                continue
            if source in gradients:
                at_hand += size
            if wide := view.widened_bytes(operation, source):
                at_hand += wide - size  # before it is cast to 16 bits
            if sources.count(source) > 1:
                at_hand += size
            gradients[source] = size
        # The gradients of gathered or sliced inputs, until they are sliced or reduced.
        at_hand += sum(num_bytes for _, num_bytes in self.put_together[number])
        return state.values + sum(gradients.values()) + own + at_hand

    def _added(self, operation: Operation, state: _Backward) -> tuple[float, float]:
        """Return the bytes of weight gradients that one operation's backward makes in order to add
        them to existing ones: for the first backward of a step, and for a later one. A gradient
        that is not accumulated in place is made in a tensor of its own first."""
        added_first = added_again = 0.0
        for name in operation.inputs:
            if name in self.weights:
                added = 0.0 if name in self.in_place else self.weights[name]
                added_again += added
                if name in state.made:
                    added_first += added
                else:
                    state.made.add(name)
                    state.weights += self.weights[name]
        return added_first, added_again


def _is_written_over(view: View, operation: Operation) -> bool:
    """Return True if an operation writes its gradient over the tensors that its forward saved, as a
    cross-entropy over split classes does (`runtime/kernels/vocab_parallel.py`). Where members
    divide positions, each has all classes."""
    if operation.target != "aten.cross_entropy_loss.default" or view.divides_positions:
        return False
    return min(view.part_of(x) for x in operation.inputs) < 1


def _worst(moments: Iterable[MemoryPoint]) -> tuple[MemoryPoint, ...]:
    """Return the moments on the Pareto front: no other needs as many bytes of gradients *and* of
    values."""
    return _worst_of([(moment.gradients, moment.values) for moment in moments])


def _worst_of(moments: list[tuple[float, float]]) -> tuple[MemoryPoint, ...]:
    """Return the Pareto front of moments, given as pairs of bytes of gradients and of values."""
    front: list[MemoryPoint] = []
    for gradients, values in sorted(moments, reverse=True):
        if not front or values > front[-1].values:
            front.append(MemoryPoint(gradients, values))
    return tuple(front)
