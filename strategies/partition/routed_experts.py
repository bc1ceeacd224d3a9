"""The experts of a mixture beside copies of the rest: what runs where a row's expert is.

Every member of a shard group runs the model for samples of its own, and holds some of the experts.
A mixture sorts the rows of its tokens by expert, so those for one member's experts lie next to each
other: they are sent there (`DISPATCH`), multiplied, and sent back (`COMBINE`), with the numbers of
rows that the router made, which are exchanged before (`EXCHANGE`). What lies between the products
of a mixture is done to rows where they are. After GShard (arXiv 2006.16668) and Whale's M6.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from whale_train.strategies.graph.operation_graph import (
    LOWERED,
    Operation,
    OperationGraph,
    Size,
    kind_of,
)
from whale_train.strategies.layouts.propagation import (
    RULES,
    Assignment,
    Cast,
    Fineness,
    Layout,
    Shard,
    assign,
    written_value,
)
from whale_train.strategies.layouts.rules.matmul import grouped_mm
from whale_train.strategies.layouts.types import COMBINE, DISPATCH, EXCHANGE, Routed, Typed
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
    """Spread the experts among `parameters` (their operations in `region`, by canonical path) over
    `members`; None where none of them are experts. `gives` are the values of `region` that others
    want; stacks of as many experts are cut along one axis, named after `axis`. Raises
    SplitRefused."""
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
            casts.append(Cast(user, name, DISPATCH, Routed(ends), Shard(0, cut_along)))
        casts += [Cast(user, ends, EXCHANGE, Routed(ends), given[ends]) for user in products]
        casts += _leaving(graph, hull, chosen, gives, ends, cut_along)
        inside |= hull
    held = {name for name, path in parameters.items() if path in weights and name in chosen}
    given |= {name: weights[parameters[name]] for name in held}
    stacks = {name for name, path in seen.items() if path in weights and name in chosen}
    _refuse_other_readers(graph, stacks, chosen, inside)
    typed = assign(graph, inside | stacks, given)
    _refuse_unrouted(graph, typed, inside)
    layouts = {name: typed.layouts[name] for name in stacks}
    # As many rows as the router sends: what a view says of them follows from the tensor.
    layouts |= {n: replace(x, outer=Size(0, 1)) for n, x in _rows_of(typed, inside)}
    assignment = Assignment(layouts, tuple(casts), typed.becomes, (), typed.random)
    axes = {shard.axis: sum(shard.pieces) for shard in weights.values()}
    sizes = range(1, min(axes.values()) + 1)
    patterns = dict.fromkeys(weights, "experts")
    return SplitParts(frozenset(inside), Sharded(assignment, weights, axes, patterns, sizes))


def mixtures_of(graph: OperationGraph) -> dict[str, int]:
    """Return how many experts the mixtures of a graph have, by the values that say where experts'
    rows end, in the order of their first products."""
    found: dict[str, int] = {}
    for operation in graph:
        if RULES.get(operation.target) is grouped_mm:
            ends = Typed(operation, {}, graph).value(2, "offs")
            (experts,) = graph[ends].shape or (Size(0),)
            found.setdefault(ends, experts.fixed)
    return found


def under_rows(graph: OperationGraph, block: Sequence[Operation], value: str) -> tuple[str, ...]:
    """Return the operations of a `block` that run while the rows `value` come back from their
    experts (runtime/graph/delay_combines.py): products, and what is made of them, that neither lead
    to the rows nor are made of them. None where the block changes values in place."""
    if any(written_value(operation) for operation in block):
        return ()
    leads, made = {value}, {value}
    for operation in reversed(block):
        if operation.name in leads:
            leads.update(operation.inputs)
    worked: dict[str, None] = {}
    for operation in block:
        if not made.isdisjoint(operation.inputs):
            made.add(operation.name)
        elif operation.name not in leads and (
            kind_of(operation) in LOWERED or not worked.keys().isdisjoint(operation.inputs)
        ):
            worked[operation.name] = None
    return tuple(worked)


def router_biases_of(graph: OperationGraph, mixtures: Mapping[str, int]) -> dict[str, str]:
    """Return the paths of the buffers that routers choose experts by, by mixture: of each the one
    that has a number for every expert, that decides where experts' rows end, and that the model
    leaves as it is."""
    found: dict[str, str] = {}
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
            found[ends] = graph[biases[0]].path
        before |= decides
    return found


def _rows_of(typed: Assignment, inside: set[str]) -> Iterator[tuple[str, Shard]]:
    """Yield the layouts of the values `inside` that are rows, with their names."""
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
    """Return the layouts of the weights that are stacks of experts, by path: along one axis for all
    stacks of as many."""
    found = {}
    for path, weight in find_weights(graph, region, parameters, Fineness(members)).items():
        for each in weight.candidates:
            if each.pattern == "experts":
                cut = each.layout
                found[path] = Shard(cut.dim, f"{axis}.{sum(cut.pieces)}", cut.outer, cut.pieces)
    return found


def _mixtures(
    graph: OperationGraph,
    region: Sequence[str],
    seen: Mapping[str, str],
    weights: Mapping[str, Shard],
) -> dict[str, dict[str, str]]:
    """Return the products with experts of each mixture, known by the value that says where experts'
    rows end: their weights' paths, by operation."""
    found: dict[str, dict[str, str]] = {}
    for name in region:
        operation = graph[name]
        if RULES.get(operation.target) is grouped_mm:
            typed = Typed(operation, {}, graph)
            path = seen.get(typed.value(1), "")
            if path in weights:
                found.setdefault(typed.value(2, "offs"), {})[name] = path
    return found


def _pieces(weights: Mapping[str, Shard], products: Mapping[str, str]) -> tuple[int, ...]:
    return weights[next(iter(products.values()))].pieces


def _entering(
    graph: OperationGraph, hull: set[str], products: Mapping[str, str], ends: str
) -> Iterator[tuple[str, str]]:
    """Yield the readers in `hull` of rows from outside of it, with their names. Raises
    SplitRefused for a value that holds samples in another way."""
    rows = {graph[Typed(graph[x], {}, graph).value(0)].shape[:1] for x in products}  # type: ignore[index]
    for user in (op for op in graph if op.name in hull):
        for name in user.inputs:
            if name in hull or name == ends:
                continue
            if not any(graph[x].target == "input" for x in graph.ancestors({name})):
                continue  # a weight, a number: no sample has a part in it
            shape = graph[name].shape or ()
            if shape[:1] not in rows:
                raise SplitRefused(f"{user.name} reads {name}, which has no row for each token")
            yield user.name, name


def _leaving(
    graph: OperationGraph, hull: set[str], region: set[str], gives: Sequence[str], ends: str,
    axis: str,
) -> Iterator[Cast]:  # fmt: skip
    """Yield the casts of rows that leave `hull`, by reader ('' for whoever wants them outside)."""
    for operation in graph:
        if operation.name in hull:
            outside = [u for u in graph.users[operation.name] if u in region and u not in hull]
            for user in (*outside, *([""] if operation.name in gives else [])):
                yield Cast(user, operation.name, COMBINE, Shard(0, axis), Routed(ends))


def _refuse_other_readers(
    graph: OperationGraph, stacks: set[str], region: set[str], inside: set[str]
) -> None:
    """Raise SplitRefused where a stack of experts is read by more than products: nobody else has
    all of it."""
    for name in sorted(stacks):
        for user in graph.users[name]:
            if user in region and user not in inside and user not in stacks:
                what = f"{user} ({graph[user].target})"
                raise SplitRefused(f"{what} reads all of {graph[name].path or name}")


def _refuse_unrouted(graph: OperationGraph, typed: Assignment, inside: set[str]) -> None:
    """Raise SplitRefused where an operation on rows has no rule that keeps them apart."""
    for name in sorted(inside):
        layout = typed.layouts[name]
        if graph[name].shape and not (isinstance(layout, Shard) and layout.dim == 0):
            raise SplitRefused(f"nobody knows that {name} ({graph[name].target}) is row by row")
    for cast in typed.casts:
        raise SplitRefused(f"{cast.user} reads {cast.value} of all rows at once")
