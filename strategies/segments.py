"""The model in segments, between the places where it may be cut: what each takes, and holds.

A segment's time on a device grows with the samples of a micro-batch, and is at least a `Line`:
lines add up, so that whatever the cut, a stage takes the sum of its segments. Over a shard group
operations are counted as if all were divided, and of collectives those inside of repeated blocks,
which every split has.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise

from whale_train.strategies.cast_times import cast_times
from whale_train.strategies.cluster import Cluster, Device
from whale_train.strategies.cost import Times, whole_times, work_times
from whale_train.strategies.findings import Findings
from whale_train.strategies.layouts import Assignment, Layout, R
from whale_train.strategies.links import group_link
from whale_train.strategies.operations import block_of, is_repeated
from whale_train.strategies.patterns import choose_patterns
from whale_train.strategies.work import Work

_NOTHING = Times()


@dataclass(frozen=True)
class Line:
    """Seconds of a micro-batch: `fixed`, and `each` of its samples."""

    fixed: Times = _NOTHING
    each: Times = _NOTHING

    def at(self, samples: float) -> Times:
        return self.fixed + self.each.scaled(samples)

    def scaled(self, factor: float) -> "Line":
        return Line(self.fixed.scaled(factor), self.each.scaled(factor))

    def __add__(self, other: "Line") -> "Line":
        return Line(self.fixed + other.fixed, self.each + other.each)

    def __sub__(self, other: "Line") -> "Line":
        return self + other.scaled(-1)


@dataclass(frozen=True)
class Segments:
    """Lower bounds of what segments of a model take on the devices of `cluster`, at one precision,
    for micro-batches of 1 to `most` samples."""

    findings: Findings
    cluster: Cluster
    most: int
    _sums: dict[tuple[int, int], Sequence[Line]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Segments there are."""
        return len(self.findings.order.places) - 1

    def line(self, device: Device, shards: int, first: int, last: int) -> Line:
        """Of the segments [first, last) over a group of `shards` such devices."""
        sums = self._lines(device, shards)
        return sums[last] - sums[first]

    def whole(self, device: Device, shards: int) -> Line:
        """Of the whole model."""
        if self.findings.profile.graph is not None:
            return self.line(device, shards, 0, self.count)
        flops, precision = self.findings.profile.forward_flops, self.findings.precision
        return self._chord(lambda samples: whole_times(samples * flops, device, precision))

    def elements(self, first: int, last: int) -> float:
        """Trained parameters that the segments read, and no others do."""
        return self._elements[last] - self._elements[first]

    def most_elements(self, first: int, last: int) -> float:
        """Of all parameters that the segments read, of which several may read the same."""
        return self._read_elements[last] - self._read_elements[first]

    def read(self, first: int, middle: int, last: int) -> tuple[str, ...]:
        """The values that have a gradient and that the segments [first, middle) make and
        [middle, last) read."""
        begin, border, end = (self.findings.order.places[i] for i in (first, middle, last))
        found = {x for n in range(border, end) for x in self._read[n] if begin <= x < border}
        return tuple(self.findings.order.operations[x] for x in sorted(found))

    def sent_bytes(self, values: tuple[str, ...], samples: float) -> float:
        """Return the bytes of a micro-batch's `values` that are sent."""
        view = self.findings.view
        return sum(view.crossing_bytes(value, samples) for value in values)

    def crossing_bytes(self, place: int, samples: float) -> float:
        """At most of a micro-batch's values that a stage which begins at `place` may be sent."""
        view = self.findings.view
        return sum(view.crossing_bytes(name, samples) for name in self._crossing[place])

    @cached_property
    def _crossing(self) -> Sequence[Sequence[str]]:
        """Of every place, the values made before it that are read behind it."""
        order, graph = self.findings.order, self.findings.graph
        position = {name: n for n, name in enumerate(order.operations)}
        last = [
            max((position[x] for x in graph.users[name] if x in position), default=0)
            for name in order.operations
        ]
        return [
            [n for n, user in zip(order.operations[:place], last, strict=False) if user >= place]
            for place in order.places
        ]

    @cached_property
    def _read(self) -> Sequence[Sequence[int]]:
        """Of every operation, where those are that it reads, are tensors and have a gradient."""
        graph, operations = self.findings.graph, self.findings.order.operations
        position = {
            name: n
            for n, name in enumerate(operations)
            if name in graph.trained and graph[name].shape is not None
        }
        return [[position[x] for x in graph[name].inputs if x in position] for name in operations]

    def until(self, device: Device, shards: int) -> Sequence[tuple[Line, float]]:
        """Before each place, what all segments take, and how many parameters they alone train."""
        return list(zip(self._lines(device, shards), self._elements, strict=True))

    @cached_property
    def _blocks(self) -> Sequence[str]:
        """The block of every segment."""
        return self.findings.order.blocks[:-1]

    @cached_property
    def _elements(self) -> Sequence[float]:
        order, profile = self.findings.order, self.findings.profile
        known = {*profile.unused_parameters, *self.findings.tied}
        found = []
        for first, last in pairwise(order.places):
            own = 0
            for name in order.operations[first:last]:
                for read in self.findings.graph[name].inputs:
                    operation = self.findings.graph[read]
                    if operation.target == "parameter":
                        parameter = profile.parameter_by_path.get(operation.path)
                        if parameter is not None and parameter.path not in known:
                            known.add(parameter.path)
                            own += parameter.elements
            found.append(float(own))
        return [0.0, *accumulate(found)]

    @cached_property
    def _read_elements(self) -> Sequence[float]:
        order, graph = self.findings.order, self.findings.graph
        found = []
        for first, last in pairwise(order.places):
            read = {x for name in order.operations[first:last] for x in graph[name].inputs}
            paths = {graph[x].path for x in read if graph[x].target == "parameter"}
            by_path = self.findings.profile.parameter_by_path
            found.append(float(sum(by_path[path].elements for path in paths if path in by_path)))
        return [0.0, *accumulate(found)]

    @cached_property
    def _works(self) -> Sequence[dict[Work, int]]:
        order, works = self.findings.order, self.findings.prices.works
        # At the least: tables have their gradient.
        added_to = {each.name for each in self.findings.graph if each.target == "parameter"}
        return [
            dict(works.of(order.operations[a:b], added_to=added_to))
            for a, b in pairwise(order.places)
        ]

    def _lines(self, device: Device, shards: int) -> Sequence[Line]:
        """Of the segments before each place."""
        key = (id(device), shards)
        if key not in self._sums:
            known: dict[object, Line] = {}  # blocks of a stack are equal
            found = [Line()]
            for number, works in enumerate(self._works):
                alike = (frozenset(works.items()), self._list_of(number))
                if alike not in known:
                    divided = {_divided(work, shards): n for work, n in works.items()}
                    known[alike] = self._chord(
                        partial(self._times, divided, number, device, shards)
                    )
                found.append(found[-1] + known[alike])
            self._sums[key] = found
        return self._sums[key]

    def _times(
        self, works: Mapping[Work, int], number: int, device: Device, shards: int, samples: float
    ) -> Times:
        """Return what a segment of these `works` takes for so many samples."""
        times = work_times(works, samples, device, self.findings.precision)
        return times + self._casts(number, device, shards, samples)

    def _chord(self, times: Callable[[float], Times]) -> Line:
        """Return the line through what the fewest and the most samples take, above which all
        between them lie: work grows in proportion, and of an all-reduce, which is done as a tree
        or a ring, whichever is faster, more samples take less each."""
        most = max(self.most, 2)
        first = times(1)
        each = (times(most) + first.scaled(-1)).scaled(1 / (most - 1))
        return Line(first + each.scaled(-1), each)

    def _list_of(self, number: int) -> str:
        """The list of repeated blocks that a segment is of; empty for others."""
        block = self._blocks[number]
        return block.rpartition(".")[0] if is_repeated(block) else ""

    # --- Collectives inside of blocks ---

    def _casts(self, number: int, device: Device, shards: int, samples: float) -> Times:
        """Return what a block over a group takes: alone (a first one, that reads what has no
        gradient, less than the others), or as one more beside another, whichever is less."""
        listed = self._list_of(number)
        if shards == 1 or not listed:
            return Times()
        names = [name for name in dict.fromkeys(self._blocks) if name.rpartition(".")[0] == listed]
        if len(names) < 2 or len([n for n in self._blocks if n == self._blocks[number]]) > 1:
            return Times()  # no repetition, or a block in several segments
        first = self.cluster.devices.index(device)
        link = group_link(self.cluster, range(first, first + shards), by_memory=True)
        itself, one, two = (
            cast_times(
                self.findings.graph,
                self._laid(blocks, shards),
                *(self.findings.precision, shards, samples, link),
            )
            for blocks in ((self._blocks[number],), tuple(names[-1:]), tuple(names[-2:]))
        )
        return min(itself, one, two + one.scaled(-1), key=lambda times: times.total)

    @cached_property
    def _block_of(self) -> Mapping[str, str]:
        """The block of every operation."""
        return {op.name: block_of(op.module) for op in self.findings.graph}

    def _laid(self, blocks: tuple[str, ...], shards: int) -> Assignment:
        """The values of `blocks` over a group, all that enters or leaves being whole."""
        graph, profile = self.findings.graph, self.findings.profile
        region = [name for name, block in self._block_of.items() if block in blocks]
        inside = set(region)
        read = {name for op in region for name in graph[op].inputs} - inside
        held = [name for name in read if graph[name].target in ("parameter", "buffer")]
        given: dict[str, Layout] = dict.fromkeys(read - set(held), R)
        wanted: dict[str, Layout] = {
            name: R for name in region if any(user not in inside for user in graph.users[name])
        }
        parameters = {
            name: profile.parameter_by_path[graph[name].path].path
            for name in (*region, *held)
            if graph[name].target == "parameter"
        }
        return self.findings.once(
            ("blocks", blocks, shards),
            lambda: (
                choose_patterns(
                    graph,
                    [*held, *region],
                    parameters=parameters,
                    held={p.path: p.elements for p in profile.parameters},
                    group_size=shards,
                    given=given,
                    wanted=wanted,
                ).assignment
            ),
        )


def _divided(work: Work, shards: int) -> Work:
    backward = work.backward.times(1 / shards) if work.backward is not None else None
    forward = work.forward.times(1 / shards)
    return replace(work, flops=work.flops / shards, forward=forward, backward=backward)
