"""The experts of a mixture beside a replicated rest (expert parallelism): operations that run on
the member that holds a row's expert.

Every member of a shard group runs the model on samples of its own, and holds some of the experts. A
mixture sorts the rows of its tokens by expert, so the rows for one member's experts are adjacent.
They are dispatched (`DISPATCH`), multiplied, and combined again (`COMBINE`). The row counts of the
router are exchanged before (`EXCHANGE`). Operations between the products of a mixture run on the
dispatched rows. After GShard (arXiv 2006.16668) and Whale's M6.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from whale_train.strategies.graph.operation_graph import (
    OperationGraph,
    Size,
)
from whale_train.strategies.layouts.propagation import (
    RULES,
    Assignment,
    Cast,
    Layout,
    MinUnits,
    Shard,
    assign,
)
from whale_train.strategies.layouts.rules.matmul import grouped_mm
from whale_train.strategies.layouts.types import (
    COMBINE,
    DISPATCH,
    EXCHANGE,
    DispatchedRows,
    RuleInput,
)
from whale_train.strategies.partition.split_parts import SplitParts, SplitRefused, seen_weights
from whale_train.strategies.tensor_parallel.candidates import find_weights
from whale_train.strategies.tensor_parallel.choose import Sharded


def route_experts(
    graph: OperationGraph,
    region: Sequence[str],
    gives: Sequence[str],
    parameters: Mapping[str, str],
    members: int,
    axis: str,
) -> SplitParts | None:
    """Return the experts of `region` spread over a shard group; None where no weight is a stack of
    experts.

    graph: the graph of the model.
    region: names of the operations of a stage.
    gives: names of the values that other stages take.
    parameters: canonical paths of the weights that may be experts, by their operation in `region`.
    members: size of the shard group.
    axis: prefix of the names of axes; stacks with equally many experts are cut along one axis.

    Raises SplitRefused where the experts cannot be told apart from the rest.
    """
    chosen = set(region)
    weights = _experts(graph, chosen, parameters, members, axis)
    if not weights:
        return None
    seen = seen_weights(graph, parameters)
    inside, given = set[str](), dict[str, Layout]()
    casts: list[Cast] = []
    for ends, products in _mixtures(graph, region, seen, weights).items():
        (cut_along,) = {weights[path].axis for path in products.values()}
        hull = graph.descendants(set(products)) & graph.ancestors(set(products)) | set(products)
        given[ends] = Shard(0, cut_along, 1, _pieces(weights, products))
        for user, name in _entering(graph, hull, products, ends):
            given[name] = Shard(0, cut_along)
            casts.append(Cast(user, name, DISPATCH, DispatchedRows(ends), Shard(0, cut_along)))
        casts += [
            Cast(user, ends, EXCHANGE, DispatchedRows(ends), given[ends]) for user in products
        ]
        casts += _leaving(graph, hull, chosen, gives, ends, cut_along)
        inside |= hull
    held = {name for name, path in parameters.items() if path in weights and name in chosen}
    given |= {name: weights[parameters[name]] for name in held}
    stacks = {name for name, path in seen.items() if path in weights and name in chosen}
    _refuse_other_readers(graph, stacks, chosen, inside)
    typed = assign(graph, inside | stacks, given)
    _refuse_unrouted(graph, typed, inside)
    layouts = {name: typed.layouts[name] for name in stacks}
    # The router decides the number of rows, so a view takes its number from the tensor.
    layouts |= {n: replace(x, outer=Size(0, 1)) for n, x in _rows_of(typed, inside)}
    assignment = Assignment(layouts, tuple(casts), typed.becomes, (), typed.random)
    axes = {shard.axis: sum(shard.pieces) for shard in weights.values()}
    sizes = range(1, min(axes.values()) + 1)
    patterns = dict.fromkeys(weights, "experts")
    return SplitParts(frozenset(inside), Sharded(assignment, weights, axes, patterns, sizes))


def mixtures_of(graph: OperationGraph) -> dict[str, int]:
    """Return the number of experts of each mixture of a graph, in the order of the mixtures' first
    products. A mixture is named by the value that holds the end offsets of its experts' rows."""
    counts: dict[str, int] = {}
    for operation in graph:
        if RULES.get(operation.target) is grouped_mm:
            ends = RuleInput(operation, {}, graph).value(2, "offs")
            (experts,) = graph[ends].shape or (Size(0),)
            counts.setdefault(ends, experts.fixed)
    return counts


def router_biases_of(graph: OperationGraph, mixtures: Mapping[str, int]) -> dict[str, str]:
    """Return the path of the buffer by which a mixture's router chooses experts, by mixture.

    The buffer holds one number for every expert, affects the row offsets of this mixture and of no
    earlier one, and is never written by the model. A mixture with no such buffer, or several, is
    left out.
    """
    paths: dict[str, str] = {}
    moved = {name for operation in graph for name in operation.writes}
    before = set[str]()
    for ends, experts in mixtures.items():
        decides = graph.ancestors({ends})
        biases = [
            name
            for name in decides - before
            if graph[name].target == "buffer" and graph[name].shape == (Size(experts, 0),)
            if moved.isdisjoint((name, graph[name].path))
        ]
        if len(biases) == 1:
            paths[ends] = graph[biases[0]].path
        before |= decides
    return paths


def _rows_of(typed: Assignment, inside: set[str]) -> Iterator[tuple[str, Shard]]:
    """Yield the names and layouts of the values `inside` that are sharded by rows."""
    for name in inside:
        layout = typed.layouts[name]
        if isinstance(layout, Shard):
            yield name, layout


def _experts(
    graph: OperationGraph,
    region: set[str],
    parameters: Mapping[str, str],
    members: int,
    axis: str,
) -> dict[str, Shard]:
    """Return the layouts of the weights that are stacks of experts, by path. All stacks with
    equally many experts are cut along one axis."""
    layouts = {}
    for path, weight in find_weights(graph, region, parameters, MinUnits(members)).items():
        for candidate in weight.candidates:
            if candidate.pattern == "experts":
                cut = candidate.layout
                layouts[path] = Shard(cut.dim, f"{axis}.{sum(cut.pieces)}", cut.outer, cut.pieces)
    return layouts


def _mixtures(
    graph: OperationGraph,
    region: Sequence[str],
    seen: Mapping[str, str],
    weights: Mapping[str, Shard],
) -> dict[str, dict[str, str]]:
    """Return the products with experts of each mixture: the path of the weight, by operation. A
    mixture is named by the value that holds the end offsets of its experts' rows."""
    products: dict[str, dict[str, str]] = {}
    for name in region:
        operation = graph[name]
        if RULES.get(operation.target) is grouped_mm:
            typed = RuleInput(operation, {}, graph)
            path = seen.get(typed.value(1), "")
            if path in weights:
                products.setdefault(typed.value(2, "offs"), {})[name] = path
    return products


def _pieces(weights: Mapping[str, Shard], products: Mapping[str, str]) -> tuple[int, ...]:
    """Return the pieces of the experts' axis in the first product of a mixture."""
    return weights[next(iter(products.values()))].pieces


def _entering(
    graph: OperationGraph, hull: set[str], products: Mapping[str, str], ends: str
) -> Iterator[tuple[str, str]]:
    """Yield the pairs (reader in `hull`, value) of rows that come from outside `hull`. Raises
    SplitRefused for a value that depends on samples but has no row for each token."""
    rows = {graph[RuleInput(graph[x], {}, graph).value(0)].shape[:1] for x in products}  # type: ignore[index]
    for user in (op for op in graph if op.name in hull):
        for name in user.inputs:
            if name in hull or name == ends:
                continue
            if not any(graph[x].target == "input" for x in graph.ancestors({name})):
                continue  # a weight or a number, which depends on no sample
            shape = graph[name].shape or ()
            if shape[:1] not in rows:
                raise SplitRefused(f"{user.name} reads {name}, which has no row for each token")
            yield user.name, name


def _leaving(
    graph: OperationGraph, hull: set[str], region: set[str], gives: Sequence[str], ends: str,
    axis: str,
) -> Iterator[Cast]:  # fmt: skip
    """Yield the casts of rows that leave `hull`, by reader ('' for another stage)."""
    for operation in graph:
        if operation.name in hull:
            outside = [u for u in graph.users[operation.name] if u in region and u not in hull]
            for user in (*outside, *([""] if operation.name in gives else [])):
                yield Cast(user, operation.name, COMBINE, Shard(0, axis), DispatchedRows(ends))


def _refuse_other_readers(
    graph: OperationGraph, stacks: set[str], region: set[str], inside: set[str]
) -> None:
    """Raise SplitRefused where an operation outside the experts' products reads a stack of experts:
    no member holds all of it."""
    for name in sorted(stacks):
        for user in graph.users[name]:
            if user in region and user not in inside and user not in stacks:
                reader = f"{user} ({graph[user].target})"
                raise SplitRefused(f"{reader} reads all of {graph[name].path or name}")


def _refuse_unrouted(graph: OperationGraph, typed: Assignment, inside: set[str]) -> None:
    """Raise SplitRefused for an operation on rows without a rule that it works row by row."""
    for name in sorted(inside):
        layout = typed.layouts[name]
        if graph[name].shape and not (isinstance(layout, Shard) and layout.dim == 0):
            raise SplitRefused(f"nobody knows that {name} ({graph[name].target}) is row by row")
    for cast in typed.casts:
        raise SplitRefused(f"{cast.user} reads {cast.value} of all rows at once")
