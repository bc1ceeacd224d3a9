"""The search for patterns: a walk over a region with a set of states.

The region is walked in order. A state is one way to lay out everything so far. At a weight with a
choice every state branches; states that agree on all that is still to be read are merged, and only
the cheapest remains (Viterbi). The cost compares replicated elements of weights first, then bytes
moved forward and backward, then collectives. After Whale's sharding patterns (USENIX ATC 2022) and
TAP's cost (arXiv 2302.00247).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from whale_train.strategies.graph.operation_graph import HELD, Operation
from whale_train.strategies.layouts.propagation import (
    Axes,
    Cast,
    Layout,
    P,
    PartialSum,
    R,
    RuleResult,
    Shard,
    cast_kind,
    casts_of,
    typing_of,
    whole,
)
from whale_train.strategies.layouts.types import elements
from whale_train.strategies.tensor_parallel.candidates import Weight, WeightSharding
from whale_train.strategies.tensor_parallel.region import Region, by_token
from whale_train.strategies.tensor_parallel.state import (
    Record,
    State,
    StateCost,
    moved,
    plus,
    signature,
)

_BEAM = 64  # states kept; blocks of common models need fewer than half of them
_SAMPLES = 8  # the samples for which bytes are counted: a nominal micro-batch
# Bytes of an element. All patterns move the same dtype, and (n - 1) / n of it around a ring of n:
# only ratios matter.
_BYTES = 4


def cheapest(region: Region, fixed: Mapping[str, str]) -> State:
    """Return the cheapest state at the end of `region`. `fixed` holds the requested patterns, by
    path."""
    return _Search(region, fixed).run()


class _Search:
    """One search over a region.

    region: the operations to be sharded, with the request.
    fixed: the requested patterns, by path.
    """

    def __init__(self, region: Region, fixed: Mapping[str, str]) -> None:
        self.region, self.fixed = region, fixed
        self._by_tokens = region.dim == "sequence"
        self._typings: dict[tuple[str, tuple[Layout, ...]], RuleResult | None] = {}

    def run(self) -> State:
        """Return the cheapest state at the end of the region."""
        first = {name: x for name, x in self.region.given.items() if x != R}
        states = [State(first, {}, {}, Axes(fineness=self.region.fineness), (0, 0.0, 0), None)]
        for position, operation in enumerate(self.region.operations):
            if operation.target in ("input", *HELD, "output"):
                continue
            if operation.name in self.region.given:
                continue
            followed: list[State] = []
            for state in states:
                followed += self.step(state, operation)
            assert followed, operation
            states = self.merged([self.forgetting(s, operation, position) for s in followed])
        return min((self.handed_on(state) for state in states), key=lambda s: s.cost)

    def step(self, state: State, operation: Operation) -> Iterator[State]:
        """Yield the states after `operation`, one for each of its choices."""
        known = {name: self.layout(state, name) for name in operation.inputs}
        open_weights = [
            name for name in operation.inputs
            if (path := self.region.parameters.get(name)) in self.region.weights
            and path not in state.decided
        ]  # fmt: skip
        if not open_weights:
            if all(name not in state.layouts and known[name] == R for name in known):
                yield state
                return
            yield from self.typed(state, operation, known, ())
            return
        name = open_weights[0]
        weight = self.region.weights[self.region.parameters[name]]
        for other in open_weights[1:]:  # one choice for each operation: its other weights replicate
            state = self.left_whole(state, self.region.parameters[other])
        yield from self.decisions(state, operation, known, name, weight)

    def left_whole(self, state: State, path: str) -> State:
        """Return the state after the weight `path` is replicated."""
        decided = ((path, "replicate", R),)
        record = Record(state.record, "", R, (), "", False, decided)
        cost = plus(state.cost, self.region.counted.get(path, 0), 0.0, 0)
        return replace(state, decided={**state.decided, path: R}, cost=cost, record=record)

    def decisions(
        self, state: State, operation: Operation, known: dict[str, Layout], name: str,
        weight: Weight,
    ) -> Iterator[State]:  # fmt: skip
        """Yield the states of every pattern that the weight read as `name` may have here."""
        fixed, path = self.fixed.get(weight.path), weight.path
        made = 0
        for candidate in weight.candidates:
            if fixed not in (None, candidate.pattern) or (fixed is None and self.shuns(candidate)):
                continue
            axes = state.axes.added(candidate.layout)
            if axes is None:
                continue
            cut = replace(state, axes=axes)
            decided = ((path, candidate.pattern, candidate.layout),)
            laid = {**known, name: candidate.layout}
            for result in self.typed(cut, operation, laid, decided, keep_cut=True):
                made += 1
                yield result
        if weight.follows and fixed in (None, "row"):
            typing = self.typing_of(operation, known)
            wish = typing.wants.get(name) if typing else None
            if typing and isinstance(wish, Shard):
                decided = ((path, "row", wish),)
                laid = {**known, name: wish}
                for result in self.typed(state, operation, laid, decided, keep_cut=True):
                    made += 1
                    yield result
        if fixed in (None, "replicate") or not made:
            stays = ((path, "replicate", R),)
            left = replace(state, cost=plus(state.cost, self.region.counted.get(path, 0), 0.0, 0))
            typing = self.typing_of(operation, known)
            if typing and not isinstance(typing.wants.get(name), Shard):
                yield from self.typed(left, operation, known, stays)
            else:
                yield from self.applied(left, operation, known, whole(known), stays, True)

    def shuns(self, candidate: WeightSharding) -> bool:
        """Return True if a candidate is only tried on request.

        A table that a head is tied to is not sharded by columns: the head's logits would be partial
        sums. Nor is any table where values between products are sharded by tokens: its partial sums
        are what is scattered to them. A weight that can follow the layout of the input is not
        sharded by rows on its own: the input would have to be sharded for it.
        """
        path = candidate.layout.axis
        if candidate.pattern == "row":
            return self.region.weights[path].follows
        return (
            candidate.pattern == "column"
            and path in (self.region.tables if self._by_tokens else self.region.tied_tables)
            and bool(self.region.counted[path])
        )

    def typed(
        self, state: State, operation: Operation, known: dict[str, Layout],
        decided: tuple[tuple[str, str, Layout], ...], keep_cut: bool = False,
    ) -> Iterator[State]:  # fmt: skip
        """Yield the states after `operation`: those of its rule and, in three cases, one with
        unsharded inputs; where a table sharded by columns ends, the latter alone.

        The cases are: no rule applies; the rule would shard values that have a gradient; or the
        operation directly follows a weight's product. A weight that was just sharded for this
        operation (`keep_cut`) is not gathered for it.
        """
        if self.ends_table(operation, known):
            yield from self.applied(state, operation, known, whole(known), decided, False)
            return
        typing = self.typing_of(operation, known)
        num_states = 0
        if self._by_tokens and (typing is None or R in typing.wants.values()):
            sequenced = self.scattered(state, operation, known)
            if sequenced is not None:
                yield from self.applied(*sequenced, decided, False)
                return
        if typing is not None:
            for result in self.applied(state, operation, known, typing, decided, False):
                num_states += 1
                yield result
        moves = typing is not None and any(
            isinstance(wish, Shard) and known[name] != wish and name in self.region.gradients
            and name not in self.region.weight_of
            for name, wish in typing.wants.items()
        )  # fmt: skip
        moves = moves or any(
            isinstance(x, Shard)
            and (name in self.region.made_by_weight or name in self.region.table_values)
            for name, x in known.items()
        )
        if (not num_states and not keep_cut) or (num_states and moves):
            yield from self.applied(state, operation, known, whole(known), decided, typing is None)

    def ends_table(self, operation: Operation, known: Mapping[str, Layout]) -> bool:
        """Return True if `operation` reads lookups of a table sharded by columns, and is neither
        element by element nor a product with a weight. The lookups are gathered for it: a norm or
        a residual that kept their columns would need a collective in every block."""
        region = self.region
        return (
            not self._by_tokens
            and operation.name not in region.table_values
            and operation.name not in region.made_by_weight
            and any(isinstance(x, Shard) and n in region.table_values for n, x in known.items())
        )

    def typing_of(self, operation: Operation, known: Mapping[str, Layout]) -> RuleResult | None:
        """Return the rule's result for `operation` with inputs laid out as `known`. It is cached,
        as many states share it."""
        key = (operation.name, tuple(known.values()))
        if key not in self._typings:
            region = self.region
            self._typings[key] = typing_of(region.graph, operation, known, region.gradients)
        return self._typings[key]

    def scattered(
        self, state: State, operation: Operation, known: Mapping[str, Layout]
    ) -> tuple[State, Operation, Mapping[str, Layout], RuleResult] | None:
        """Return the arguments of `applied` for `operation` on shards of the sequence: the state,
        the operation, the layouts of its inputs and the rule's result.

        Partial sums of values [batch, tokens, width] are then reduce-scattered instead of
        all-reduced. Returns None where some sum has another shape, or no rule applies to the
        shards.
        """
        sums = {
            name: by_token(self.region.graph[name]) for name, x in known.items()
            if isinstance(x, PartialSum)
        }  # fmt: skip
        shards = {name: x for name, x in sums.items() if x is not None}
        if not sums or len(shards) < len(sums):
            return None
        axes = state.axes
        for laid in shards.values():
            extended = axes if laid.axis in axes.units else axes.added(laid)
            if extended is None:
                return None
            axes = extended
        typing = self.typing_of(operation, {**known, **shards})
        if typing is None or not isinstance(typing.gives, Shard):
            return None
        wants = {**shards, **typing.wants}
        return replace(state, axes=axes), operation, known, replace(typing, wants=wants)

    def applied(
        self, state: State, operation: Operation, known: Mapping[str, Layout], typing: RuleResult,
        decided: tuple[tuple[str, str, Layout], ...], gathered: bool,
    ) -> Iterator[State]:  # fmt: skip
        """Yield the state after `operation` with this `typing`; none where an axis would have too
        few units."""
        axes = state.axes.after(typing)
        if axes is None or self.loses_updates(state, typing, known):
            return
        absorbed = [
            (path, "", axes.laid(wish))
            for name, wish in typing.wants.items()
            if isinstance(wish, Shard) and (path := self.absorbable(state, name, known[name]))
        ]
        taken = {path for path, _, _ in absorbed}
        wants = {
            name: wish for name, wish in typing.wants.items()
            if self.region.parameter_path(name) not in taken
        }  # fmt: skip
        casts = self.casts(state, operation.name, wants, known, axes)
        cost, made = self.paid(state, casts)
        if typing.becomes == "split_cross_entropy":  # row maxima, row sums and labels' logits
            rows = (self.region.graph[operation.inputs[0]].shape or ())[:1]
            sent = 3 * 2 * elements(rows, _SAMPLES) * _BYTES
            cost = plus(cost, 0, sent, 3)
        gives = axes.laid(typing.gives)
        layouts = dict(state.layouts)
        changed = operation.changes
        for name in (operation.name, changed) if changed else (operation.name,):
            layouts.pop(name, None)
            if gives != R:
                layouts[name] = gives
        if changed in made:
            made = {name: casts for name, casts in made.items() if name != changed}
        every = (*decided, *absorbed)
        settled = {**state.decided, **{path: layout for path, _, layout in every}}
        cut_before = any(isinstance(x, Shard) for x in known.values())
        record = Record(
            state.record, operation.name, gives, casts, typing.becomes, gathered and cut_before,
            every,
        )  # fmt: skip
        yield State(layouts, settled, made, axes, cost, record)

    def casts(
        self, state: State, user: str, wants: Mapping[str, Layout], known: Mapping[str, Layout],
        axes: Axes,
    ) -> tuple[Cast, ...]:  # fmt: skip
        """Return the casts of the inputs of `user`. A partial sum that was reduced once is
        available to all later readers, as if the value had been unsharded, or scattered, from the
        start."""
        casts = []
        needed = {c.value: c for c in casts_of(user, wants, known, self.region.gradients, axes)}
        for name, laid in known.items():
            cast = needed.get(name)
            if isinstance(state.layouts.get(name), PartialSum) and not isinstance(laid, PartialSum):
                target = cast.target if cast else laid
                if isinstance(target, PartialSum):
                    continue  # the value is still a partial sum
                kind = "reduce_slice" if cast and cast.kind == "slice" else cast_kind(P, target)
                cast = Cast(user, name, kind, P, target)
            if cast is not None:
                casts.append(cast)
        return tuple(casts)

    def layout(self, state: State, name: str) -> Layout:
        """Return the layout in which a reader finds the value `name`."""
        path = self.region.parameter_path(name)
        laid = state.decided.get(path, R) if path else state.layouts.get(name, R)
        if isinstance(laid, PartialSum):
            made = state.made.get(name, ())
            if R in made:
                return R
            laid = next((x for x in made if isinstance(x, Shard)), laid)
        return state.axes.laid(laid)

    def absorbable(self, state: State, name: str, known: Layout) -> str:
        """Return the path of a parameter that may be held in the layout of its only user (a bias, a
        norm inside a sharded region), or of a buffer that is updated in place; '' for any other
        value."""
        path = self.region.parameter_path(name)
        free = path and path not in state.decided and path not in self.region.weights
        alone = self.region.uses.get(path) == 1
        by_hand = self.fixed.get(path) == "replicate"
        return path if free and alone and known == R and not by_hand else ""

    def loses_updates(self, state: State, typing: RuleResult, known: Mapping[str, Layout]) -> bool:
        """Return True if statistics would be updated in a slice or a gathered copy of their
        buffer."""
        return any(
            wish != known[name] and not self.absorbable(state, name, known[name])
            for name, wish in typing.wants.items()
            if name in self.region.statistics
        )

    # --- The cost and the merging of states ---

    def paid(
        self, state: State, casts: tuple[Cast, ...]
    ) -> tuple[StateCost, Mapping[str, tuple[Layout, ...]]]:
        """Return the cost after `casts`, and all casts made so far. Each cast of a value is paid
        once."""
        cost, made = state.cost, state.made
        for cast in casts:
            earlier = made.get(cast.value, ())
            if cast.target in earlier:
                continue
            operation = self.region.graph[cast.value]
            if isinstance(cast.source, Shard) and cast.kind.startswith("gather"):
                path = self.region.weight_of.get(cast.value, "")
                cost = plus(cost, self.region.counted.get(path, 0), 0.0, 0)
            size = elements(operation.shape or (), _SAMPLES) * _BYTES
            sent, count = moved(cast, size, cast.value in self.region.gradients, R in earlier)
            cost = plus(cost, 0, sent, count)
            added = (cast.target,) if cast.kind != "reduce_enter" else (cast.target, R)
            made = {**made, cast.value: (*earlier, *added)}
        return cost, made

    def forgetting(self, state: State, operation: Operation, position: int) -> State:
        """Return the state without the values that no later operation reads."""
        gone = [
            name for name in (*operation.inputs, operation.name)
            if self.region.last_use.get(name, -1) <= position
        ]  # fmt: skip
        paths = {p for n in gone if (p := self.region.parameter_path(n))}
        if not any(name in state.layouts or name in state.made for name in gone) and not paths:
            return state
        decided = state.decided
        return State(
            {n: x for n, x in state.layouts.items() if n not in gone},
            {p: x for p, x in decided.items() if p not in paths} if paths else decided,
            {n: x for n, x in state.made.items() if n not in gone} if state.made else state.made,
            state.axes,
            state.cost,
            state.record,
        )

    def merged(self, states: list[State]) -> list[State]:
        """Return the cheapest of the states that agree on all that is still to be read, at most
        `_BEAM` states."""
        if len(states) == 1:
            return states
        best: dict[Any, State] = {}
        for state in states:
            key = signature(state)
            if key not in best or state.cost < best[key].cost:
                best[key] = state
        return sorted(best.values(), key=lambda state: state.cost)[:_BEAM]

    def handed_on(self, state: State) -> State:
        """Return the state after the casts of the values that leave the region."""
        known = {name: self.layout(state, name) for name in self.region.wanted}
        casts = self.casts(state, "", self.region.wanted, known, state.axes)
        cost, made = self.paid(state, casts)
        record = Record(state.record, "", R, casts, "", False, ())
        return replace(state, cost=cost, made=made, record=record)
