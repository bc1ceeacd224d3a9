"""Price the blocks of a model, in seconds and bytes, by the device and shard group that run them.

A unit is the smallest range of blocks that a stage may hold: a block with a weight, and following
blocks without weights. The seconds and bytes of units add up, so the costs of a stage are the
difference of two prefix sums. Every figure is computed for the exact number of samples; none is
interpolated.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from whale_train.strategies.cost.op_work import Work
from whale_train.strategies.cost.resharding import cast_times
from whale_train.strategies.cost.roofline import Times, whole_times, work_times
from whale_train.strategies.graph.block_paths import is_repeated
from whale_train.strategies.graph.saved_tensors import kept
from whale_train.strategies.hardware.cluster import Device, Link
from whale_train.strategies.layouts.propagation import Assignment, Layout, R, Shard
from whale_train.strategies.stages.analysis import ModelAnalysis
from whale_train.strategies.tensor_parallel.choose import Sharded, choose_patterns

Prefix = Sequence[float]


@dataclass(frozen=True)
class Seconds:
    """Prefix sums, over the units, of the seconds of a micro-batch.

    forward: seconds of the forward.
    backward_input: seconds of the backward part that makes gradients of inputs.
    backward_weight: seconds of the backward part that makes gradients of weights.
    """

    forward: Prefix
    backward_input: Prefix
    backward_weight: Prefix

    @cached_property
    def total(self) -> Prefix:
        """Return the prefix sums of the seconds of forward and backward together."""
        parts = zip(self.forward, self.backward_input, self.backward_weight, strict=True)
        return [sum(unit_parts) for unit_parts in parts]


@dataclass(frozen=True)
class BlockMemory:
    """Prefix sums, over the units, of the memory of one member of a shard group.

    elements: trained elements.
    saved: bytes that autograd saves for one sample.
    entering: bytes of one sample that enter blocks, which are all that recomputation saves.
    """

    elements: Prefix
    saved: Prefix
    entering: Prefix


@dataclass(frozen=True)
class _Piece:
    """Consecutive blocks on one member of a shard group.

    works: the work of the operations, and how often each occurs.
    assignment: layouts and casts of the values (None: nothing is sharded).
    elements: trained elements that the member holds.
    saved: bytes that autograd saves for one sample.
    entering: bytes of one sample that enter the first block, if it is one of a list of repeated
        blocks; else `saved`.
    """

    works: Counter[Work]
    assignment: Assignment | None
    elements: float
    saved: float
    entering: float


@dataclass(frozen=True)
class _Region:
    """Names of the operations of consecutive blocks, as a stage would run them.

    own: operations of the blocks themselves.
    operations: `own`, and the operations they read that every stage recomputes, in graph order.
    takes: operations of earlier blocks whose values are read.
    gives: operations of `own` whose values are read outside of the region.
    """

    own: Sequence[str]
    operations: Sequence[str]
    takes: Sequence[str]
    gives: Sequence[str]


@dataclass(frozen=True)
class BlockCosts:
    """Costs of the blocks of one model at one precision, each computed once.

    findings: analysis of the model.
    """

    findings: ModelAnalysis
    _pieces: dict[tuple[int, int, int, str], _Piece] = field(default_factory=dict)
    _seconds: dict[object, Seconds] = field(default_factory=dict)
    _holding: dict[tuple[int, str], BlockMemory] = field(default_factory=dict)
    _units: dict[int, Sequence[int]] = field(default_factory=dict)

    def units(self, shards: int) -> Sequence[int]:
        """Return the places where units begin and, last, the place where the last unit ends.

        Each unit reads a weight. Over a shard group, each reads a weight that can be sharded, if
        the model has any.
        """
        if shards not in self._units:
            order = self.findings.order
            weights: Sequence[int] = order.weights
            if shards > 1:
                cut = self.findings.weights_to_cut(shards)
                weights = cut if cut[-1] else weights
            starts, last = [0], len(order.places) - 1
            for place in range(1, last):
                if weights[starts[-1]] < weights[place] < weights[place + 1]:
                    starts.append(place)
            self._units[shards] = [*starts, last]
        return self._units[shards]

    def seconds(
        self, device: Device, shards: int, dim: str, link: Link | None, samples: float
    ) -> Seconds:
        """Return the seconds of the units on a group of `shards` devices like `device`.

        dim: dimension that splits divide, as in a strategy file.
        link: link that joins the group (None: no collective is priced).
        samples: samples of the micro-batch.
        """
        key = (id(device), shards, dim, link, samples)
        if key not in self._seconds:
            alike: dict[int, Times] = {}
            unit_times = []
            for first, last in pairwise(self.units(shards)):
                total = Times()
                for block in range(first, last):
                    kind = self._alike[block]
                    if kind not in alike:
                        alike[kind] = self._block(block, device, shards, dim, link, samples)
                    total += alike[kind]
                unit_times.append(total)
            self._seconds[key] = Seconds(
                _sums(times.forward for times in unit_times),
                _sums(times.backward_input for times in unit_times),
                _sums(times.backward_weight for times in unit_times),
            )
        return self._seconds[key]

    def holding(self, shards: int, dim: str) -> BlockMemory:
        """Return the elements and bytes of the units on one member of a group of `shards`
        devices."""
        key = (shards, dim)
        if key not in self._holding:
            alike: dict[int, tuple[float, float, float]] = {}
            rows = []
            for first, last in pairwise(self.units(shards)):
                row = (0.0, 0.0, 0.0)
                for block in range(first, last):
                    kind = self._alike[block]
                    if kind not in alike:
                        pieces = [self._piece(*ends, shards, dim) for ends in self._ends(block)]
                        one = pieces[-1]
                        saved = one.saved if len(pieces) == 1 else pieces[0].saved - one.saved
                        alike[kind] = (one.elements, saved, min(one.entering, saved))
                    row = (
                        row[0] + alike[kind][0],
                        row[1] + alike[kind][1],
                        row[2] + alike[kind][2],
                    )
                rows.append(row)
            columns = [_sums(column) for column in zip(*rows, strict=True)]
            self._holding[key] = BlockMemory(*columns)
        return self._holding[key]

    def whole(self, device: Device, samples: float) -> Times:
        """Return the times, in seconds, of the whole model on one device, for `samples` samples."""
        if self.findings.profile.graph is None:
            flops = self.findings.profile.forward_flops * samples
            return whole_times(flops, device, self.findings.precision)
        of_units = self.seconds(device, 1, "auto", None, samples)
        return Times(
            of_units.forward[-1], of_units.backward_input[-1], of_units.backward_weight[-1]
        )

    def crossing_bytes(self, unit: int, shards: int, samples: float) -> float:
        """Return the bytes that cross the start of a unit, for a micro-batch of `samples`."""
        return self._crossing[self.units(shards)[unit]] * samples

    @cached_property
    def _crossing(self) -> Sequence[float]:
        """Return the bytes of one sample that cross each place."""
        order, graph, view = self.findings.order, self.findings.graph, self.findings.view
        position, crossing = self._position, [0.0] * len(order.places)
        for name, start in position.items():
            readers = [position[user] for user in graph.users[name] if user in position]
            if readers and graph[name].shape is not None:
                sent = view.crossing_bytes(name, 1.0)
                for number, place in enumerate(order.places):
                    if start < place <= max(readers):
                        crossing[number] += sent
        return crossing

    # --- One block ---

    def _block(
        self, block: int, device: Device, shards: int, dim: str, link: Link | None, samples: float
    ) -> Times:
        """Return the times of a block, alone or added to an equal neighbour."""
        times = [
            self._times(self._piece(*ends, shards, dim), device, shards, link, samples)
            for ends in self._ends(block)
        ]
        return times[0] if len(times) == 1 else times[0] + times[1].scaled(-1)

    def _ends(self, block: int) -> Sequence[tuple[int, int]]:
        """Return the intervals of blocks to price for one block.

        They are the block alone or, where a neighbour is equal, both blocks and that neighbour
        alone: the difference leaves out gathers that are not needed between the two.
        """
        if block and self._alike[block - 1] == self._alike[block]:
            return [(block - 1, block + 1), (block - 1, block)]
        following = block + 1
        if following < len(self._alike) and self._alike[following] == self._alike[block]:
            return [(block, block + 2), (following, following + 1)]
        return [(block, block + 1)]

    def _times(
        self, piece: _Piece, device: Device, shards: int, link: Link | None, samples: float
    ) -> Times:
        """Return the times of consecutive blocks on one device, with the collectives over
        `link`."""
        times = work_times(piece.works, samples, device, self.findings.precision)
        if piece.assignment is None or link is None:
            return times
        graph, precision = self.findings.graph, self.findings.precision
        return times + cast_times(graph, piece.assignment.casts, precision, shards, samples, link)

    def _piece(self, first: int, last: int, shards: int, dim: str) -> _Piece:
        """Return the cached analysis of the blocks [first, last) over a shard group."""
        key = (first, last, shards, dim)
        if key not in self._pieces:
            self._pieces[key] = self._found(*key)
        return self._pieces[key]

    def _found(self, first: int, last: int, shards: int, dim: str) -> _Piece:
        """Analyse the blocks [first, last) over a shard group of `shards` devices."""
        findings, profile = self.findings, self.findings.profile
        part = self._region(first, last)
        sharded = None
        if shards > 1:
            key = ("blocks", first, last, dim)
            sharded = findings.sharded(key, shards, lambda: self._sharded(part, shards, dim))
        layouts = sharded.assignment.layouts if sharded else {}

        def share(name: str, reader: str | None = None) -> float:
            layout = layouts.get(name)
            return 1 / shards if isinstance(layout, Shard) else 1.0

        weights = sharded.weights if sharded else {}
        held = {
            (parameter := profile.parameter_by_path[findings.graph[name].path]).path: parameter
            for name in part.operations
            if findings.graph[name].target == "parameter"
        }
        unused = set(profile.unused_parameters)
        elements = sum(
            parameter.elements / (shards if path in weights else 1)
            for path, parameter in held.items()
            if path not in unused
        )
        view = findings.view.held_by(share)
        if self._measured:
            saved = sum(kept(view, part.operations).values())
        else:
            made = sum(view.num_bytes(name) for name in part.own)
            saved = profile.activation_bytes * made / self._made
        works = findings.prices.works.of(part.own, share, self._added_to)
        of_block = findings.order.blocks[first]
        entering = self._crossing[first] if is_repeated(of_block) else saved
        assignment = sharded.assignment if sharded else None
        return _Piece(works, assignment, elements, saved, entering)

    def _region(self, first: int, last: int) -> _Region:
        """Return the region of the blocks [first, last), as a stage of these blocks would run it.

        The region has the operations of the blocks, and all operations they read that depend on no
        parameter and no random number.
        """
        order, graph = self.findings.order, self.findings.graph
        own = order.operations[order.places[first] : order.places[last]]
        inside, takes, waiting = set[str](), set[str](), list(own)
        own_names = set(own)
        while waiting:
            name = waiting.pop()
            if name in inside or name in takes:
                continue
            if name in self._position and name not in own_names and graph[name].shape is not None:
                takes.add(name)
                continue
            inside.add(name)
            waiting += graph[name].inputs
        gives = [n for n in own if any(user not in inside for user in graph.users[n])]
        operations = sorted(inside, key=self._place_in_graph.__getitem__)
        return _Region(own, operations, sorted(takes), gives)

    def _sharded(self, part: _Region, shards: int, dim: str) -> Sharded:
        """Return the layouts chosen for a region whose inputs and outputs are replicated."""
        graph, profile = self.findings.graph, self.findings.profile
        given: dict[str, Layout] = dict.fromkeys(part.takes, R)
        wanted: dict[str, Layout] = dict.fromkeys(part.gives, R)
        return choose_patterns(
            graph,
            part.operations,
            parameters=profile.weights_read(part.operations),
            held=profile.weight_elements,
            group_size=shards,
            given=given,
            wanted=wanted,
            dim=dim,
        )

    @cached_property
    def _position(self) -> Mapping[str, int]:
        """Return the position, by name, of every operation that exactly one stage runs: those that
        depend on a parameter or on random numbers."""
        return {name: n for n, name in enumerate(self.findings.order.operations)}

    @cached_property
    def _place_in_graph(self) -> Mapping[str, int]:
        """Return the position of every operation in the graph, by its name."""
        return {operation.name: n for n, operation in enumerate(self.findings.graph)}

    @cached_property
    def _measured(self) -> bool:
        """Return True if the graph has measured saved tensors."""
        return any(operation.saved for operation in self.findings.graph)

    @cached_property
    def _made(self) -> float:
        """Return the bytes, in fp32, of all values computed for one sample."""
        return sum(self.findings.graph.num_bytes[name] for name in self._position) or 1.0

    @cached_property
    def _added_to(self) -> frozenset[str]:
        """Return the names of the parameters whose gradients later micro-batches accumulate."""
        graph = self.findings.graph
        return frozenset(operation.name for operation in graph if operation.target == "parameter")

    @cached_property
    def _alike(self) -> Sequence[int]:
        """Return a class number for every block: equal for blocks with equal operations, weights
        and work."""
        order, works = self.findings.order, self.findings.prices.works
        numbers: dict[object, int] = {}
        block_numbers = []
        for number, (first, last) in enumerate(pairwise(order.places)):
            names = order.operations[first:last]
            kinds = tuple(self.findings.graph[name].target for name in names)
            weights = order.weights[number + 1] - order.weights[number]
            work = frozenset(works.of(names, added_to=self._added_to).items())
            block_numbers.append(numbers.setdefault((kinds, weights, work), len(numbers)))
        return block_numbers


def _sums(values: Iterable[float]) -> Prefix:
    """Return the prefix sums of `values`, starting with 0."""
    return [0.0, *accumulate(values)]
