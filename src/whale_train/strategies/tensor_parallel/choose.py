"""The pattern of every weight: replicate, column, row, vocabulary or experts.

Owns the question and the answer; `viterbi.py` searches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from whale_train.errors import Fault, PlanError
from whale_train.strategies.grammar.nodes import PATTERNS
from whale_train.strategies.graph.operation_graph import OperationGraph
from whale_train.strategies.layouts.propagation import (
    Assignment,
    Cast,
    Layout,
    MinUnits,
    R,
    Shard,
)
from whale_train.strategies.tensor_parallel.region import Region, matches
from whale_train.strategies.tensor_parallel.state import State
from whale_train.strategies.tensor_parallel.viterbi import cheapest


@dataclass(frozen=True)
class Sharded:
    """A region with sharded weights, and the layouts of its values.

    assignment: the layouts of the values, and the casts.
    weights: layouts of the sharded parameters, by canonical path, and of the buffers that are
        sharded with them (a batch norm's statistics).
    axes: the units of every axis, to be divided among the group's members.
    patterns: the name of each weight's pattern.
    groups: the group sizes for which these results hold.
    """

    assignment: Assignment
    weights: dict[str, Shard]
    axes: dict[str, int]
    patterns: dict[str, str]
    groups: range

    @property
    def whole(self) -> tuple[str, ...]:
        """Return the paths of the modules with replicated weights."""
        left = (path for path, pattern in self.patterns.items() if pattern == "replicate")
        return tuple(dict.fromkeys(path.rpartition(".")[0] for path in left))


def choose_patterns(
    graph: OperationGraph,
    region: Sequence[str],
    *,
    parameters: Mapping[str, str],
    held: Mapping[str, int],
    group_size: int,
    given: Mapping[str, Layout],
    wanted: Mapping[str, Layout],
    by_hand: Sequence[tuple[str, str]] = (),
    aliases: Mapping[str, Sequence[str]] = MappingProxyType({}),
    dim: str = "auto",
    key: str = "strategy.graph.split",
) -> Sharded:
    """Return the layouts of the operations `region` of `graph` over a group of `group_size` ranks.

    parameters: canonical paths by the names of the region's parameter operations (a tied parameter
        has one path).
    held: elements of the parameters, by canonical path.
    given: the layouts of values from outside.
    wanted: the layouts that values have to leave the region with.
    by_hand: pairs of a glob over parameter or module paths, and a pattern. The first pair counts
        whose glob matches a weight and whose pattern the weight can have.
    aliases: further paths of tied weights, by canonical path.
    dim: limits the choice. `auto`: no limit. `tensor`: no experts. `vocabulary`: tables and output
        classes only. `experts`: experts only. `sequence`: as `tensor`, and values between the
        products (norms, dropout, residuals) are sharded by tokens.
    key: the key of the request under which faults are reported.

    Raises PlanError for a pattern that a weight cannot have.
    """
    chosen = set(region)
    asked = Region(
        graph,
        tuple(op for op in graph if op.name in chosen),
        {name: path for name, path in parameters.items() if name in chosen},
        held,
        MinUnits(group_size),
        given,
        wanted,
        dim,
    )
    return _answer(asked, cheapest(asked, _by_hand(asked, by_hand, aliases, key)))


def _by_hand(
    region: Region,
    by_hand: Sequence[tuple[str, str]],
    aliases: Mapping[str, Sequence[str]],
    key: str,
) -> dict[str, str]:
    """Return the pattern of every weight that the request gives one, by path. Raises PlanError for
    a pattern that no matching weight can have."""
    fixed: dict[str, str] = {}
    faults = []
    paths = sorted(set(region.parameters.values()))
    for glob, pattern in by_hand:
        matched = [p for p in paths if matches((p, *aliases.get(p, ())), glob)]
        able = {p: had for p in matched if (had := _had(region, p, pattern))}
        for path, had in able.items():
            fixed.setdefault(path, had)
        if pattern not in PATTERNS:
            rule, remedy = "is not a pattern", f"use one of: {', '.join(PATTERNS)}"
            faults.append(Fault(f"{key}.patterns.{glob}", pattern, rule, remedy))
        elif matched and not able:
            rule = f"cannot be had for {matched[0]}"
            options = dict.fromkeys(
                c.pattern for p in matched if p in region.weights
                for c in region.weights[p].candidates
            )  # fmt: skip
            remedy = f"use {' or '.join((*options, 'replicate'))}"
            faults.append(Fault(f"{key}.patterns.{glob}", pattern, rule, remedy))
    if faults:
        raise PlanError(faults)
    return fixed


def _had(region: Region, path: str, pattern: str) -> str:
    """Return the name that the requested pattern has among a weight's candidates; '' where the
    weight cannot have it. The columns of a product that a cross-entropy reads are its
    vocabulary."""
    if pattern == "replicate":
        return pattern
    weight = region.weights.get(path)
    if weight is None:
        return ""
    names = {candidate.pattern for candidate in weight.candidates}
    if pattern in names or (pattern == "row" and weight.follows):
        return pattern
    of_classes = pattern == "column" and "vocabulary" in names and path not in region.tables
    return "vocabulary" if of_classes else ""


def _answer(region: Region, best: State) -> Sharded:
    """Return the layouts of the best state, read off its records."""
    records = []
    record = best.record
    while record is not None:
        records.append(record)
        record = record.before
    records.reverse()
    axes = best.axes
    weights: dict[str, Shard] = {}
    patterns: dict[str, str] = {}
    layouts: dict[str, Layout] = {**region.given}
    casts: list[Cast] = []
    for entry in records:
        for path, pattern, layout in entry.decisions:
            laid = axes.laid(layout)
            if isinstance(laid, Shard):
                weights[path] = laid
            if pattern:
                patterns[path] = pattern
        if entry.name:
            layouts[entry.name] = axes.laid(entry.layout)
        casts += [
            Cast(c.user, c.value, c.kind, axes.laid(c.source), axes.laid(c.target))
            for c in entry.casts
        ]
    for operation in region.operations:
        path = region.parameter_path(operation.name)
        layouts.setdefault(operation.name, weights.get(path, R) if path else R)
    assignment = Assignment(
        layouts,
        tuple(casts),
        {entry.name: entry.becomes for entry in records if entry.becomes},
        tuple(entry.name for entry in records if entry.gathered),
        {
            operation.name: "shared" if layouts[operation.name] == R else "own"
            for operation in region.operations
            if operation.random
        },
    )
    used = {x.axis for x in (*weights.values(), *layouts.values()) if isinstance(x, Shard)}
    return Sharded(
        assignment,
        weights,
        {axis: units for axis, units in axes.units.items() if axis in used},
        patterns,
        region.fineness.alike,
    )
