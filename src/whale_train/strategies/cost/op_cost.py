"""Seconds of pieces of the model on a device, computed once for each piece.

A piece is a set of operations and the fractions of their values that a rank holds. Its price is a
sum over classes of equal operations (`op_work.py`), cached by device and number of samples.
"""

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from whale_train.strategies.cost.op_work import PartOfValue, Work, Works, whole
from whale_train.strategies.cost.roofline import Times, work_times
from whale_train.strategies.graph.operation_graph import OperationGraph
from whale_train.strategies.hardware.cluster import Device
from whale_train.strategies.layouts.propagation import Assignment, Shard

NamedIntervals = Mapping[str, Sequence[tuple[int, int]]]


@dataclass
class Prices:
    """Prices of the pieces of one graph at one precision. Callers identify pieces by keys.

    scaled: the names of the products that round their factors to 8 bits.
    """

    graph: OperationGraph
    precision: str
    scaled: frozenset[str] = frozenset()
    _works: dict[Hashable, Counter[Work]] = field(default_factory=dict)
    _times: dict[tuple[Hashable, int, float], Times] = field(default_factory=dict)
    _devices: dict[int, Device] = field(default_factory=dict)  # keeps devices alive for their ids

    @cached_property
    def works(self) -> Works:
        """Return the work of the graph's operations, analysed once."""
        return Works(self.graph, self.scaled)

    def times(
        self,
        key: Hashable,
        operations: Iterable[str],
        device: Device,
        samples: float,
        part: Callable[[], PartOfValue] = lambda: whole,
        added_to: Callable[[], Container[str]] = tuple,
    ) -> Times:
        """Return the seconds of `operations` for `samples` samples on `device`.

        key: identifies the piece. Equal keys must stand for equal `operations`, `part` and
            `added_to`.
        part: returns the function that gives the fraction of a value that the rank holds; called
            once for each key.
        added_to: returns the parameters whose gradients lookups only add to (see `Works.of`);
            called once for each key.
        """
        asked = (key, id(device), samples)
        if asked not in self._times:
            self._devices[id(device)] = device
            if key not in self._works:
                self._works[key] = self.works.of(operations, part(), added_to())
            self._times[asked] = work_times(self._works[key], samples, device, self.precision)
        return self._times[asked]


def part_of(assignment: Assignment | None, axes: NamedIntervals, index: int) -> PartOfValue:
    """Return the function that gives the fraction of each value that member `index` of a shard
    group holds.

    `axes` are the intervals of every axis, one for each member. Where an operation reads a value
    through a cast, the fraction is that of the cast's target. Without an `assignment` every
    fraction is 1.
    """
    if assignment is None:
        return whole
    fractions = {
        axis: (intervals[index][1] - intervals[index][0]) / intervals[-1][1]
        for axis, intervals in axes.items()
        if index < len(intervals) and intervals[-1][1]
    }
    cast = {
        (layout_cast.user, layout_cast.value): layout_cast.target
        for layout_cast in assignment.casts
    }

    def part(name: str, reader: str | None) -> float:
        lies = assignment.layouts.get(name)
        layout = lies if reader is None else cast.get((reader, name), lies)
        return fractions.get(layout.axis, 1.0) if isinstance(layout, Shard) else 1.0

    return part
