"""What an arrangement is on its devices: which kinds of copies there are, and which stages.

Owns what candidates of one arrangement have in common, as the resolver will find it; what that
takes at the least is `bounds.py`'s.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from whale_train.strategies.chunks import cut_by_speed
from whale_train.strategies.cluster import Cluster, Device, Link
from whale_train.strategies.cost import flops_rate
from whale_train.strategies.links import Crowd, crowd_of, group_link, send_time_s
from whale_train.strategies.schedule import in_flight_limits, owners_of_equals
from whale_train.strategies.segments import Segments
from whale_train.strategies.shares import even_shares, optimal_shares
from whale_train.strategies.space import Arrangement, Part
from whale_train.strategies.staging import VIRTUAL_STAGES, Seats, seats
from whale_train.strategies.training import Training


@dataclass(frozen=True)
class Copies:
    """Copies of the pipeline, by their `numbers`, that are alike, and whose stages are on `devices`
    as fast as these."""

    numbers: Sequence[int]
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class StageCut:
    """A stage of a cut: its part, the segments [first, last) of its chunks, how many trained
    parameters it holds, and at most of all. For every chunk but the model's first, `enters` are the
    values it reads of the chunk before."""

    part: Part
    chunks: tuple[tuple[int, int], ...]
    elements: float
    most_elements: float
    enters: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Hop:
    """From the copies of a stage to those of the next one: how many micro-batches each sends to
    each, by their numbers, and over which link."""

    sent: Mapping[tuple[int, int], int]
    links: Mapping[tuple[int, int], Link]

    def most_s(self, num_bytes: float) -> float:
        """Of a micro-batch of `num_bytes`, at most."""
        links = {id(link): link for link in self.links.values()}
        return max(send_time_s(num_bytes, link) for link in links.values())

    def seconds(self, num_bytes: float) -> tuple[float, float, Sequence[float], Sequence[float]]:
        """Of a micro-batch of `num_bytes`, the least and the mean; and of all micro-batches, by
        sender and by receiver."""
        each = {pair: send_time_s(num_bytes, link) for pair, link in self.links.items()}
        ahead = [0.0] * (1 + max(a for a, _ in each))
        behind = [0.0] * (1 + max(b for _, b in each))
        for (a, b), count in self.sent.items():
            ahead[a] += count * each[a, b]
            behind[b] += count * each[a, b]
        return min(each.values()), sum(ahead) / sum(self.sent.values()), ahead, behind


@dataclass(frozen=True)
class Arranged:
    """Arrangements on `cluster` of the model of `segments`, work being shared by `balance`."""

    segments: Segments
    cluster: Cluster
    training: Training
    balance: str = "hardware"
    _found: dict[object, Sequence[Device]] = field(default_factory=dict)
    _firsts: dict[int, int] = field(default_factory=dict)
    _rates: dict[tuple[int, str], float] = field(default_factory=dict)
    _cuts: dict[object, Sequence[StageCut]] = field(default_factory=dict)
    _copies: dict[Arrangement, Sequence[Copies]] = field(default_factory=dict)
    _samples: dict[object, Sequence[int] | None] = field(default_factory=dict)
    _limits: dict[object, Sequence[int]] = field(default_factory=dict)
    _seats: dict[Arrangement, tuple[Seats, Crowd]] = field(default_factory=dict)
    _hops: dict[object, Sequence["Hop"]] = field(default_factory=dict)
    _links: dict[object, dict[tuple[int, int], Link]] = field(default_factory=dict)

    def copies(self, shape: Arrangement) -> Sequence[Copies]:
        """The copies of the pipeline, those on equal devices together."""
        if shape not in self._copies:
            self._copies[shape] = list(self._kinds_of_copies(shape))
        return self._copies[shape]

    def samples(self, shape: Arrangement, least: int) -> Sequence[int] | None:
        """Those of a copy of each kind, of equal copies the one with most; `least` is the fewest a
        copy may have. None where some would have fewer."""
        if self.training.global_batch < shape.copies * least:
            return None
        kinds = self.copies(shape)
        if len(kinds) == 1:
            return [-(-self.training.global_batch // shape.copies)]
        key = (shape, least)
        if key not in self._samples:
            self._samples[key] = self._shared(shape, kinds, least)
        return self._samples[key]

    def stages(self, shape: Arrangement, schedule: str) -> Sequence[StageCut]:
        """Those of a pipeline, cut as the resolver will; none where it cannot."""
        rounds = VIRTUAL_STAGES if schedule == "interleaved_1f1b" else 1
        key = (shape.devices, shape.parts, rounds)
        if key not in self._cuts:
            self._cuts[key] = list(self._cut(shape, rounds))
        return self._cuts[key]

    def in_flight(self, shape: Arrangement, pieces: int, schedule: str) -> Sequence[int]:
        """How many of `pieces` micro-batches each stage may have in flight, times the chunks it
        holds, all its copies together."""
        copies = tuple(part.copies for part in shape.parts for _ in range(part.stages))
        rounds = VIRTUAL_STAGES if schedule == "interleaved_1f1b" else 1
        key = (copies, rounds, pieces)
        if key not in self._limits:
            self._limits[key] = in_flight_limits(*key)
        return self._limits[key]

    def hops(self, shape: Arrangement, copy: int, pieces: int) -> Sequence["Hop"]:
        """Of a copy that takes `pieces` micro-batches: between each stage and the next."""
        key = (shape, copy, pieces)
        if key not in self._hops:
            self._hops[key] = list(self._hops_of(*key))
        return self._hops[key]

    def _hops_of(self, shape: Arrangement, copy: int, pieces: int) -> Iterator["Hop"]:
        seated, crowd = self._seated(shape)
        of_stage = [seated.of_stage(stage) for stage in range(shape.stages)]
        known = self._links.setdefault((shape, copy), {})
        for here, there in pairwise(of_stage):
            sent = _dealt(len(here), len(there), pieces)
            links = {}
            for a, b in sent:
                pair = (here[a], there[b])
                if pair not in known:
                    ends = [seated.positions[copy][position][0] for position in pair]
                    known[pair] = group_link(self.cluster, ends, crowd, by_memory=True)
                links[a, b] = known[pair]
            yield Hop(sent, links)

    def _seated(self, shape: Arrangement) -> tuple[Seats, Crowd]:
        """Who sits where, and how many send out of each node."""
        if shape not in self._seats:
            stages = [
                (part.kind or None, part.copies, part.shards)
                for part in shape.parts
                for _ in range(part.stages)
            ]
            found = seats(stages, shape.copies, self.cluster.devices[: shape.devices])
            self._seats[shape] = found, crowd_of(self.cluster, found.edges())
        return self._seats[shape]

    def devices(self, shape: Arrangement, part: Part) -> Sequence[Device]:
        """Those that may hold the part."""
        key = (shape.devices, part.kind)
        if key not in self._found:
            listed = self.cluster.devices[: shape.devices]
            self._found[key] = [d for d in listed if part.kind in ("", d.name)]
        return self._found[key]

    def _kinds_of_copies(self, shape: Arrangement) -> Iterator[Copies]:
        if shape.by_kind:
            parts = [part for part in shape.parts for _ in range(part.stages)]
            devices = tuple(self.devices(shape, part)[0] for part in parts)
            yield Copies(range(shape.copies), devices)
            return
        width, listed = shape.parts[0].width, self.devices(shape, shape.parts[0])
        alike: dict[int, list[int]] = {}
        for copy in range(shape.copies):
            fastest = max(listed[copy * width : (copy + 1) * width], key=self._flops)
            alike.setdefault(self._first_like(fastest), []).append(copy)
        for first, numbers in alike.items():
            yield Copies(numbers, (self.cluster.devices[first],) * shape.stages)

    def _first_like(self, device: Device) -> int:
        """The rank of the first device that is equal."""
        if id(device) not in self._firsts:
            self._firsts[id(device)] = self.cluster.devices.index(device)
        return self._firsts[id(device)]

    def _flops(self, device: Device) -> float:
        return flops_rate(device, self.training.precision)

    def _shared(
        self, shape: Arrangement, kinds: Sequence[Copies], least: int
    ) -> Sequence[int] | None:
        """In proportion to the speed of copies, as whole samples."""
        total = self.training.global_batch
        listed = {copy: kind for kind, each in enumerate(kinds) for copy in each.numbers}
        each = [sum([self._rate(kind.devices)] * shape.shards) for kind in kinds]
        speeds = [each[listed[copy]] for copy in range(shape.copies)]
        caps = [total] * len(listed)
        if self.balance == "even":
            found = even_shares(total, len(listed), caps)
        else:
            found = optimal_shares(total, speeds, caps, least)
        if found is None:
            return None
        return [max(found[copy] for copy in kind.numbers) for kind in kinds]

    def _cut(self, shape: Arrangement, rounds: int) -> Iterator[StageCut]:
        parts = [part for part in shape.parts for _ in range(part.stages)]
        speeds = [self._speed(shape, part) for part in parts]
        members = (shape.shards,) * len(speeds)
        cut = cut_by_speed(self.segments.findings, tuple(speeds * rounds), members * rounds, {})
        chunks = list(pairwise(cut)) if cut is not None else []
        read = [(self.segments.read(*before, after[1]),) for before, after in pairwise(chunks)]
        for number, part in enumerate(parts if chunks else ()):
            mine = tuple(chunks[number :: len(parts)])
            enters = sum([(), *read][number :: len(parts)], ())
            elements = sum(self.segments.elements(*chunk) for chunk in mine)
            most = sum(self.segments.most_elements(*chunk) for chunk in mine)
            yield StageCut(part, mine, elements, most, enters)

    def _speed(self, shape: Arrangement, part: Part) -> float:
        """As fast as the resolver takes a stage of `part` for."""
        key = (shape.devices, part.kind)
        if key not in self._rates:
            self._rates[key] = self._rate(self.devices(shape, part))
        return sum([self._rates[key]] * (part.copies * part.shards))

    def _rate(self, devices: Sequence[Device]) -> float:
        """FLOP/s of the slowest; 1 where all count alike."""
        if self.balance == "even":
            return 1.0
        kinds = {id(device): device for device in devices}
        return min(self._flops(each) for each in kinds.values())


@lru_cache(maxsize=1 << 12)
def _dealt(here: int, there: int, pieces: int) -> Mapping[tuple[int, int], int]:
    """How many of `pieces` micro-batches go from each of so many equal copies to each of others."""
    pairs = zip(owners_of_equals(here, pieces), owners_of_equals(there, pieces), strict=True)
    return Counter(pairs)
