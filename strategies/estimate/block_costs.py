"""What the blocks of a model take and hold, by the device and the shard group that runs them.

A unit is what a stage may hold at the least: a block with a weight, or several of which the later
ones have none. Units' seconds and bytes add up, so that a stage has the difference of two prefix
sums. Every figure is of the number of samples in question: none is a line through others.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from whale_train.strategies.cost.op_work import Work
from whale_train.strategies.cost.resharding import cast_times
from whale_train.strategies.cost.roofline import Times, whole_times, work_times
from whale_train.strategies.graph.operation_graph import is_repeated
from whale_train.strategies.graph.saved_tensors import kept
from whale_train.strategies.hardware.cluster import Device, Link
from whale_train.strategies.layouts.propagation import Assignment, Layout, R, Shard
from whale_train.strategies.stages.analysis import Findings
from whale_train.strategies.tensor_parallel.choose import Sharded, choose_patterns

Prefix = Sequence[float]


@dataclass(frozen=True)
class Seconds:
    """Prefix sums, over the units, of a micro-batch's seconds: forward, the backward's two
    parts."""

    forward: Prefix
    backward_input: Prefix
    backward_weight: Prefix

    @cached_property
    def total(self) -> Prefix:
        """The sums of forward and backward."""
        parts = zip(self.forward, self.backward_input, self.backward_weight, strict=True)
        return [sum(each) for each in parts]


@dataclass(frozen=True)
class Holding:
    """Prefix sums, over the units, of what one member of a shard group holds: trained `elements`;
    bytes of a sample that autograd saves (`saved`), and those that enter blocks (`entering`), which
    is what is saved where blocks are computed again."""

    elements: Prefix
    saved: Prefix
    entering: Prefix


@dataclass(frozen=True)
class _Piece:
    """Consecutive blocks over a shard group: their work, their collectives, what they hold."""

    works: Counter[Work]
    assignment: Assignment | None
    elements: float
    saved: float
    entering: float


@dataclass(frozen=True)
class _Region:
    """The operations of some blocks: their `own`, and with what each stage runs that reads it; what
    they take from earlier ones and give to later ones."""

    own: Sequence[str]
    operations: Sequence[str]
    takes: Sequence[str]
    gives: Sequence[str]


@dataclass(frozen=True)
class BlockCosts:
    """The costs of the blocks of one model at one precision."""

    findings: Findings
    _pieces: dict[tuple[int, int, int, str], _Piece] = field(default_factory=dict)
    _seconds: dict[object, Seconds] = field(default_factory=dict)
    _holding: dict[tuple[int, str], Holding] = field(default_factory=dict)
    _units: dict[int, Sequence[int]] = field(default_factory=dict)

    def units(self, shards: int) -> Sequence[int]:
        """Return the places where units begin and the last one ends: each has a weight and, over a
        shard group, one that can be cut."""
        if shards not in self._units:
            order = self.findings.order
            weights: Sequence[int] = order.weights
            if shards > 1:
                cut = self.findings.weights_to_cut(shards)
                weights = cut if cut[-1] else weights
            found, last = [0], len(order.places) - 1
            for place in range(1, last):
                if weights[found[-1]] < weights[place] < weights[place + 1]:
                    found.append(place)
            self._units[shards] = [*found, last]
        return self._units[shards]

    def seconds(
        self, device: Device, shards: int, dim: str, link: Link | None, samples: float
    ) -> Seconds:
        """Return the seconds of the units on a group of `shards` such devices, joined by `link`,
        for a micro-batch of `samples`."""
        key = (id(device), shards, dim, link, samples)
        if key not in self._seconds:
            alike: dict[int, Times] = {}
            found = []
            for first, last in pairwise(self.units(shards)):
                total = Times()
                for block in range(first, last):
                    kind = self._alike[block]
                    if kind not in alike:
                        alike[kind] = self._block(block, device, shards, dim, link, samples)
                    total += alike[kind]
                found.append(total)
            self._seconds[key] = Seconds(
                _sums(each.forward for each in found),
                _sums(each.backward_input for each in found),
                _sums(each.backward_weight for each in found),
            )
        return self._seconds[key]

    def holding(self, shards: int, dim: str) -> Holding:
        """Return what one member of a group of `shards` holds of the units."""
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
            self._holding[key] = Holding(*columns)
        return self._holding[key]

    def whole(self, device: Device, samples: float) -> Times:
        """Return the seconds of the whole model, uncut, on one device."""
        if self.findings.profile.graph is None:
            flops = self.findings.profile.forward_flops * samples
            return whole_times(flops, device, self.findings.precision)
        of_units = self.seconds(device, 1, "auto", None, samples)
        return Times(
            of_units.forward[-1], of_units.backward_input[-1], of_units.backward_weight[-1]
        )

    def crossing_bytes(self, unit: int, shards: int, samples: float) -> float:
        """Return the bytes of a micro-batch that cross the beginning of a unit."""
        return self._crossing[self.units(shards)[unit]] * samples

    @cached_property
    def _crossing(self) -> Sequence[float]:
        """The bytes of a sample that cross every place."""
        order, graph, view = self.findings.order, self.findings.graph, self.findings.view
        position, found = self._position, [0.0] * len(order.places)
        for name, start in position.items():
            readers = [position[user] for user in graph.users[name] if user in position]
            if readers and graph[name].shape is not None:
                sent = view.crossing_bytes(name, 1.0)
                for number, place in enumerate(order.places):
                    if start < place <= max(readers):
                        found[number] += sent
        return found

    # --- One block ---

    def _block(
        self, block: int, device: Device, shards: int, dim: str, link: Link | None, samples: float
    ) -> Times:
        """Return the seconds of a block: alone, or as one more beside its like."""
        found = [
            self._times(self._piece(*ends, shards, dim), device, shards, link, samples)
            for ends in self._ends(block)
        ]
        return found[0] if len(found) == 1 else found[0] + found[1].scaled(-1)

    def _ends(self, block: int) -> Sequence[tuple[int, int]]:
        """Return the blocks to look at: itself, or where the one before is alike both and that
        one, as what lies between two need not be gathered."""
        if block and self._alike[block - 1] == self._alike[block]:
            return [(block - 1, block + 1), (block - 1, block)]
        following = block + 1
        if following < len(self._alike) and self._alike[following] == self._alike[block]:
            return [(block, block + 2), (following, following + 1)]
        return [(block, block + 1)]

    def _times(
        self, piece: _Piece, device: Device, shards: int, link: Link | None, samples: float
    ) -> Times:
        times = work_times(piece.works, samples, device, self.findings.precision)
        if piece.assignment is None or link is None:
            return times
        graph, precision = self.findings.graph, self.findings.precision
        return times + cast_times(graph, piece.assignment.casts, precision, shards, samples, link)

    def _piece(self, first: int, last: int, shards: int, dim: str) -> _Piece:
        key = (first, last, shards, dim)
        if key not in self._pieces:
            self._pieces[key] = self._found(*key)
        return self._pieces[key]

    def _found(self, first: int, last: int, shards: int, dim: str) -> _Piece:
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
        """Return the operations of the blocks [first, last) and all that these read and that
        depends on no parameter, as a stage of these blocks would run them."""
        order, graph = self.findings.order, self.findings.graph
        own = order.operations[order.places[first] : order.places[last]]
        inside, takes, waiting = set[str](), set[str](), list(own)
        mine = set(own)
        while waiting:
            name = waiting.pop()
            if name in inside or name in takes:
                continue
            if name in self._position and name not in mine and graph[name].shape is not None:
                takes.add(name)
                continue
            inside.add(name)
            waiting += graph[name].inputs
        gives = [n for n in own if any(user not in inside for user in graph.users[n])]
        operations = sorted(inside, key=self._place_in_graph.__getitem__)
        return _Region(own, operations, sorted(takes), gives)

    def _sharded(self, part: _Region, shards: int, dim: str) -> Sharded:
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
        """The position of every operation that depends on a parameter, which one stage runs."""
        return {name: n for n, name in enumerate(self.findings.order.operations)}

    @cached_property
    def _place_in_graph(self) -> Mapping[str, int]:
        return {operation.name: n for n, operation in enumerate(self.findings.graph)}

    @cached_property
    def _measured(self) -> bool:
        """Whether the graph says what autograd saves."""
        return any(operation.saved for operation in self.findings.graph)

    @cached_property
    def _made(self) -> float:
        """The bytes of a sample of all that is made, in fp32."""
        return sum(self.findings.graph.num_bytes[name] for name in self._position) or 1.0

    @cached_property
    def _added_to(self) -> frozenset[str]:
        """The parameters: of later micro-batches, gradients are added where they are made."""
        graph = self.findings.graph
        return frozenset(each.name for each in graph if each.target == "parameter")

    @cached_property
    def _alike(self) -> Sequence[int]:
        """A number for every block, the same for those that are alike in their operations, their
        weights and their work."""
        order, works = self.findings.order, self.findings.prices.works
        numbers: dict[object, int] = {}
        found = []
        for number, (first, last) in enumerate(pairwise(order.places)):
            names = order.operations[first:last]
            kinds = tuple(self.findings.graph[name].target for name in names)
            weights = order.weights[number + 1] - order.weights[number]
            work = frozenset(works.of(names, added_to=self._added_to).items())
            found.append(numbers.setdefault((kinds, weights, work), len(numbers)))
        return found


def _sums(values: Iterable[float]) -> Prefix:
    return [0.0, *accumulate(values)]
