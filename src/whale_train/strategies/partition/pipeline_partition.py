"""The cut of the exported graph into the stages of a pipeline.

Operations that depend on a parameter, or on random numbers, run on exactly one stage. Others
(masks, positions, rotary angles) are recomputed wherever they are read, instead of being sent.
Values cross from any stage to any later one, skip edges included. The cut is optimal: dynamic
programming over the boundaries between blocks of modules finds the cut whose slowest stage is
fastest.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from math import inf

from whale_train.errors import Fault, closest
from whale_train.strategies.graph.block_paths import block_of
from whale_train.strategies.graph.forward_state import updates_beside
from whale_train.strategies.graph.operation_graph import (
    WEIGHTS,
    ModelProfile,
    OperationGraph,
    value_bytes,
)
from whale_train.strategies.graph.saved_tensors import View, saved_by


@dataclass(frozen=True)
class Slice:
    """The part of the graph that one stage runs. Bytes and FLOP are per sample.

    operations: in order, the stage's own operations, the parameters, buffers and inputs they read,
        and the operations that the stage recomputes.
    takes: names of the values that come from earlier stages.
    gives: names of the values that go to later stages; the last stage gives the loss.
    parameters: canonical paths of the trained weights.
    frozen: canonical paths of the frozen weights.
    modules: paths of the blocks of the stage's own operations, in order.
    flops: FLOP of the forward.
    activation_bytes: bytes that the forward keeps for the backward.
    entering_bytes: bytes that enter the slice's blocks, which are kept under recomputation.
    block_bytes: bytes of the largest block; under recomputation, one block at a time is alive.
    """

    operations: tuple[str, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    parameters: tuple[str, ...]
    frozen: tuple[str, ...]
    modules: tuple[str, ...]
    flops: float
    activation_bytes: float
    entering_bytes: float
    block_bytes: float

    @property
    def weights(self) -> tuple[str, ...]:
        """Return the paths of all weights, trained and frozen."""
        return (*self.parameters, *self.frozen)


@dataclass(frozen=True)
class Sequenced:
    """The operations that depend on a parameter or on random numbers, in the order they run, and
    the places between them where a stage may end.

    operations: names of the operations.
    places: positions in `operations`; the first is 0, the last the number of operations.
    flops: FLOP of a sample's forward in the operations before each place.
    weights: number of operations before each place that read a parameter.
    bytes_crossing: bytes of a sample's values that are alive across each place.
    blocks: path of the module whose operations begin at each place; '' at the last.
    """

    operations: tuple[str, ...]
    places: tuple[int, ...]
    flops: tuple[float, ...]
    weights: tuple[int, ...]
    bytes_crossing: tuple[float, ...]
    blocks: tuple[str, ...]


def sequenced(graph: OperationGraph) -> Sequenced:
    """Return the operations of `graph` that a pipeline assigns to stages, and the places where it
    may be cut."""
    operations = _owned(graph)
    position = {name: i for i, name in enumerate(operations)}
    blocks = [block_of(graph[name].module) for name in operations]
    places = [0]
    places += [i for i in range(1, len(operations)) if blocks[i] != blocks[i - 1]]
    # A tuple of tensors is not sent: the stage that makes it also unpacks it.
    places = [i for i in places if graph[operations[i]].target != _GETITEM] if places else [0]
    places.append(len(operations))
    # Differences of the live bytes: a value lives from its maker to its last user.
    alive = [0.0] * (len(operations) + 1)
    for name, start in position.items():
        users = [position[user] for user in graph.users[name] if user in position]
        size = value_bytes(graph[name])
        if users and size:
            alive[start + 1] += size
            alive[max(users) + 1 if max(users) + 1 <= len(operations) else len(operations)] -= size
    crossing, total = [], 0.0
    for change in alive:
        total += change
        crossing.append(total)
    before, weights = [0.0], [0]
    for name in operations:
        before.append(before[-1] + graph[name].flops)
        reads = any(graph[x].target == "parameter" for x in graph[name].inputs)
        weights.append(weights[-1] + reads)
    return Sequenced(
        tuple(operations),
        tuple(places),
        tuple(before[i] for i in places),
        tuple(weights[i] for i in places),
        tuple(crossing[i] for i in places),
        tuple(blocks[i] if i < len(operations) else "" for i in places),
    )


_GETITEM = "<built-in function getitem>"


def _owned(graph: OperationGraph) -> list[str]:
    """Return the names of the operations that must run exactly once: all that depend on a
    parameter, or on random numbers."""
    roots = {op.name for op in graph if op.target == "parameter" or op.random}
    parameters = {op.name for op in graph if op.target == "parameter"}
    depends = graph.descendants(roots) - parameters
    return [op.name for op in graph if op.name in depends and op.target != "output"]


def balanced(
    order: Sequenced,
    stage_time: Callable[[int, int, int], float],
    count: int,
    fixed: Mapping[int, int],
) -> tuple[int, ...] | None:
    """Return the places (indices into `order.places`) where stages begin and the last one ends;
    None when no cut gives every stage something to run.

    order: operations and places.
    stage_time: time of a stage for the operations between two places, as `stage_time(stage, first,
        last)`, in any common unit; infinite where the stage must not hold them.
    count: number of stages.
    fixed: stage that must hold an operation, by position in `order.operations`.

    The cut minimises the time of the slowest stage, then the bytes that cross. Takes O(stages x
    places^2), twice: the slowest stage's time is found first, since it decides which prefix of a
    cut is best in bytes.
    """
    places = len(order.places) - 1
    wanted = sorted(fixed.items())
    positions = [position for position, _ in wanted]

    def allowed(stage: int, first: int, last: int) -> bool:
        low = bisect_right(positions, order.places[first] - 1)
        high = bisect_right(positions, order.places[last] - 1)
        return all(owner == stage for _, owner in wanted[low:high])

    def time(stage: int, first: int, last: int) -> float:
        return inf if wanted and not allowed(stage, first, last) else stage_time(stage, first, last)

    slowest = _slowest_stage(time, places, count)
    return None if slowest == inf else _least_crossing(order, time, count, slowest)


def _slowest_stage(stage_time: Callable[[int, int, int], float], places: int, count: int) -> float:
    """Return the minimum, over all cuts, of the slowest stage's time; infinite where no cut gives
    every stage something to run."""
    best = [0.0, *([inf] * places)]  # time of the slowest stage so far, by the place of its end
    for stage in range(count):
        slowest = [inf] * (places + 1)
        for last in _ends(stage, places, count):
            for first in range(last - 1, stage - 1, -1):
                time = stage_time(stage, first, last)
                if slowest[last] < time < inf:
                    break  # an earlier beginning only makes this stage slower
                slowest[last] = min(slowest[last], max(best[first], time))
        best = slowest
    return best[places]


def _least_crossing(
    order: Sequenced, stage_time: Callable[[int, int, int], float], count: int, limit: float
) -> tuple[int, ...]:
    """Return the places of the cut that sends the fewest bytes between stages, out of the cuts in
    which no stage takes longer than `limit`. Such a cut must exist."""
    places = len(order.places) - 1
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, (0,)), *([None] * places)]
    for stage in range(count):
        cheapest: list[tuple[float, tuple[int, ...]] | None] = [None] * (places + 1)
        for last in _ends(stage, places, count):
            for first in range(last - 1, stage - 1, -1):
                time, before = stage_time(stage, first, last), best[first]
                if limit < time < inf:
                    break
                if before is None or time == inf:
                    continue
                crossing = before[0] + order.bytes_crossing[first]
                chosen = cheapest[last]
                if chosen is None or crossing < chosen[0]:
                    cheapest[last] = (crossing, (*before[1], last))
        best = cheapest
    cut = best[places]
    assert cut is not None
    return cut[1]


def _ends(stage: int, places: int, count: int) -> Iterable[int]:
    """Return the places where stage number `stage` of `count` may end, such that every stage before
    and after it runs something."""
    return (places,) if stage == count - 1 else range(stage + 1, places + 1 - (count - stage - 1))


def stage_of_modules(
    order: Sequenced,
    graph: OperationGraph,
    asked: Sequence[tuple[str, tuple[str, ...] | None]],
    faults: list[Fault],
) -> dict[int, int]:
    """Return the stage that the strategy assigns to an operation, by position in
    `order.operations`.

    `asked` holds, per stage, the path of its node and its module patterns (None: the balanced cut
    decides). Adds to `faults` patterns that match nothing or another stage's operations, and stages
    out of order.
    """
    fixed: dict[int, int] = {}
    for stage, (path, patterns) in enumerate(asked):
        for pattern in patterns or ():
            matched = [
                i
                for i, name in enumerate(order.operations)
                if is_inside(graph[name].module, pattern)
            ]
            if not matched:
                known = sorted({block.split(".")[0] for block in order.blocks if block})
                near = closest(pattern, {block for block in order.blocks if block} | {*known})
                rule, remedy = "names no module that computes", f"a path below {', '.join(known)}"
                remedy = f"did you mean {near}? Else use {remedy}" if near else f"use {remedy}"
                faults.append(Fault(f"{path}.modules", pattern, rule, remedy))
            for i in matched:
                if fixed.get(i, stage) != stage:
                    other = asked[fixed[i]][0]
                    rule = f"is part of {other}.modules as well"
                    faults.append(Fault(f"{path}.modules", pattern, rule, "name it in one stage"))
                    break
                fixed[i] = stage
    highest = -1
    for position in sorted(fixed):
        stage = fixed[position]
        if stage < highest:
            path, patterns = asked[highest]
            rule = f"runs before what {asked[stage][0]} holds"
            named = ", ".join(patterns or ())
            faults.append(Fault(f"{path}.modules", named, rule, "list stages in forward order"))
            break
        highest = stage
    return fixed


def is_inside(module: str, pattern: str) -> bool:
    """Return True if `module`, or a module around it, matches `pattern` (a path or glob)."""
    parts = module.split(".")
    return any(fnmatchcase(".".join(parts[: i + 1]), pattern) for i in range(len(parts)))


def sliced(profile: ModelProfile, order: Sequenced, ends: Sequence[int]) -> tuple[Slice, ...]:
    """Return the slices of the stages between consecutive `ends` (positions in
    `order.operations`)."""
    graph = profile.graph
    assert graph is not None
    canonical = {name: p.path for name, p in profile.weight_by_path.items()}
    loss = graph.operations[-1].inputs[0]
    owner = {
        name: stage
        for stage, (first, last) in enumerate(pairwise(ends))
        for name in order.operations[first:last]
    }
    parts = _parts(graph, owner, len(ends) - 1)
    crossing = {name for _, takes in parts for name in takes}
    own_bytes = _kept_bytes(profile, order)
    slices = []
    for stage, (inside, takes) in enumerate(parts):
        own = order.operations[ends[stage] : ends[stage + 1]]
        inside_bytes = {
            place: 0.0 for place in order.places if ends[stage] <= place < ends[stage + 1]
        }
        for position in range(ends[stage], ends[stage + 1]):
            place = order.places[bisect_right(order.places, position) - 1]
            inside_bytes[place] += own_bytes[position]
        entering = dict(zip(order.places, order.bytes_crossing, strict=True))
        gives = [op.name for op in graph if owner.get(op.name) == stage and op.name in crossing]
        if stage == len(parts) - 1:
            gives.append(loss)
        held = {canonical[graph[n].path] for n in inside if graph[n].target in WEIGHTS}
        slices.append(
            Slice(
                operations=tuple(op.name for op in graph if op.name in inside),
                takes=tuple(op.name for op in graph if op.name in takes),
                gives=tuple(gives),
                parameters=tuple(p.path for p in profile.parameters if p.path in held),
                frozen=tuple(p.path for p in profile.frozen if p.path in held),
                modules=modules_of(graph, own),
                flops=sum(graph[name].flops for name in own),
                activation_bytes=sum(inside_bytes.values()),
                entering_bytes=sum(entering[place] for place in inside_bytes),
                block_bytes=max(inside_bytes.values(), default=0.0),
            )
        )
    return tuple(slices)


def modules_of(graph: OperationGraph, operations: Iterable[str]) -> tuple[str, ...]:
    """Return the paths of the blocks that `operations` belong to, in order."""
    return tuple(dict.fromkeys(block_of(graph[name].module) for name in operations))


def _kept_bytes(profile: ModelProfile, order: Sequenced) -> list[float]:
    """Return the bytes per sample that autograd saves first at each operation. Without measured
    saved tensors, the model's activation bytes are divided among operations in proportion to the
    size of their values."""
    graph = profile.graph
    assert graph is not None
    if not any(operation.saved for operation in graph):
        sizes = [value_bytes(graph[name]) for name in order.operations]
        total = sum(sizes) or 1.0
        return [profile.activation_bytes * size / total for size in sizes]
    first: dict[tuple[str, int], int] = {}
    saved_bytes = [0.0] * len(order.operations)
    for position, name in enumerate(order.operations):
        for key, num_bytes in saved_by(View(graph), graph[name]):
            if first.setdefault(key, position) == position:
                saved_bytes[position] += num_bytes
    return saved_bytes


def _parts(
    graph: OperationGraph, owner: Mapping[str, int], stages: int
) -> list[tuple[set[str], set[str]]]:
    """Return, for each stage, the names that it runs and the names that it takes from earlier
    stages.

    A write into a buffer runs where the buffer is read or, where no stage reads it, on the stage of
    the buffer's module.
    """
    plain = [_needed(graph, owner, stage, ()) for stage in range(stages)]
    beside = [updates_beside(graph, inside) for inside, _ in plain]
    placed = set().union(*beside)
    home = {graph[name].module: stage for name, stage in owner.items()}
    for name in graph.updates:
        if name not in placed:
            beside[home.get(graph[name].module, 0)].add(name)
    return [_needed(graph, owner, stage, beside[stage]) for stage in range(stages)]


def _needed(
    graph: OperationGraph, owner: Mapping[str, int], stage: int, writes: Iterable[str]
) -> tuple[set[str], set[str]]:
    """Return the names that a stage runs, `writes` into buffers included, and the names that it
    takes from earlier stages."""
    inside: set[str] = set()
    takes: set[str] = set()
    stack = [name for name, own in owner.items() if own == stage]
    stack += writes
    while stack:
        name = stack.pop()
        if name in inside or name in takes:
            continue
        operation = graph[name]
        # Only tensors can be sent: other values are recomputed from the tensors they come from.
        if owner.get(name, stage) != stage and operation.shape is not None:
            takes.add(name)
            continue
        inside.add(name)
        stack.extend(operation.inputs)
        stack.extend(n for n in operation.after if owner.get(n, stage) == stage)
    return inside, takes
