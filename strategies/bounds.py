"""What a candidate takes at the least: its step's time, and its memory.

A bound is cheap, and not above what the simulator finds for the strategy: it leaves out what is
only known once tensors are laid and instructions are ordered. `auto.py` opens an arrangement, and
resolves a candidate, only where its bound is below the best step it has found.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import ceil, inf

from whale_train.strategies.arranged import Arranged, Hop, StageCut
from whale_train.strategies.cluster import Cluster, Device, Link
from whale_train.strategies.cost import Times, offloaded_update_time_s, update_time_s
from whale_train.strategies.findings import Findings
from whale_train.strategies.list_scheduling import in_flight_for
from whale_train.strategies.memory_bound import MemoryBound
from whale_train.strategies.schedule import spacing_of_equals
from whale_train.strategies.segments import Line, Segments
from whale_train.strategies.space import Arrangement, Batched, Candidate, Opening, Part
from whale_train.strategies.stage_ends import PieceTimes, StageOf, done_together_s, ends_of
from whale_train.strategies.stage_shares import cut_s, spread_s
from whale_train.strategies.step_tasks import PIECES, sum_pieces
from whale_train.strategies.training import Training

_UNSUMMED = 1 - 1 / PIECES  # of a backward, the part in which it has gradients that are not summed


@dataclass(frozen=True)
class Bounds:
    """Of candidates for a model on `cluster`, whose work is shared by `balance`."""

    findings: Findings
    cluster: Cluster
    training: Training
    balance: str = "hardware"
    _known: dict[object, Sequence["_End"]] = field(default_factory=dict)
    _timed: dict[object, Sequence["_Timed"]] = field(default_factory=dict)
    _pieces: dict[object, PieceTimes] = field(default_factory=dict)
    _costs: dict[object, list[float]] = field(default_factory=dict)
    _serials: dict[object, float] = field(default_factory=dict)

    def shortfall_bytes(self, candidate: Candidate) -> float:
        """By how much a copy's devices, or their hosts, have too little memory."""
        return self._memory.shortfall_bytes(candidate)

    def least_of(self, opening: Opening) -> float:
        """Seconds that no candidate of it is faster than, whatever the cut, the number of
        micro-batches, and, unless it is ordered, the order of its parts."""
        shape, copies = opening.arrangement, self.arranged.copies(opening.arrangement)
        alone = shape.stages == 1
        elements = self.findings.copied_elements(split_head=alone)
        holders = shape.copies * shape.widest
        update = self._update_s(elements / (shape.stages * shape.shards * holders))
        if alone or len(copies) > 1:
            # A split head has of all that does not grow with the samples its part.
            lines = [self.segments.whole(each.devices[0], shape.shards) for each in copies]
            ends = [
                (len(each.numbers), 0.0, line.each.total / shape.stages)
                for each, line in zip(copies, lines, strict=True)
            ]
            return done_together_s(self.training.global_batch, ends) + update
        costs = [self._until(shape, part) for part in shape.parts]
        stages = [number for number, part in enumerate(shape.parts) for _ in range(part.stages)]
        least = spread_s(costs, stages)
        if opening.rounds == 1 and opening.ordered:
            least = cut_s(costs, stages, least)
        if shape.widest == 1:  # a sole micro-batch goes through all stages
            least = min(least, self._serial_s(shape))
        return least + update

    def _serial_s(self, shape: Arrangement) -> float:
        """Of all samples of a copy through all segments, each where that takes the least; gradients
        of weights may be made meanwhile."""
        samples = -(-self.training.global_batch // shape.copies)
        devices = [self.arranged.devices(shape, part)[0] for part in shape.parts]
        key = (samples, shape.shards, *map(id, devices))
        if key not in self._serials:
            listed = (self.segments.until(device, shape.shards) for device in devices)
            times = [[line.at(samples) for line, _ in each] for each in listed]
            inputs = [[x.total - x.backward_weight for x in each] for each in times]
            self._serials[key] = sum(
                min(until[i + 1] - until[i] for until in inputs) for i in range(self.segments.count)
            )
        return self._serials[key]

    def _until(self, shape: Arrangement, part: Part) -> list[float]:
        """What a stage of a part takes of all segments before each place, and of the sums of their
        gradients but for what its last backward hides."""
        key = (shape.copies, part, shape.devices)
        if key not in self._costs:
            samples = -(-self.training.global_batch // shape.copies)
            pieces, device = max(2, part.copies), self.arranged.devices(shape, part)[0]
            summed, large = 2 * self._gather_s(shape, part, 1.0), -(-samples // pieces)
            found, before, sums = [0.0], 0.0, 0.0
            for line, elements in self.segments.until(device, shape.shards)[1:]:
                last = line.at(large)
                hidden = _UNSUMMED * (last.total - last.forward)
                work = pieces * line.fixed.total + samples * line.each.total
                seen = work / part.copies - hidden
                # No segment hides more than it takes.
                found.append(found[-1] + max(0.0, seen - before) + summed * (elements - sums))
                before, sums = seen, elements
            self._costs[key] = found
        return self._costs[key]

    def least_of_batched(self, batched: Batched) -> float:
        """Seconds that no candidate of these is faster than: with gradients of weights that may
        wait, sums as early as any, and an optimizer that all copies share."""
        shape, pieces = batched.arrangement, batched.micro_batches
        if not pieces:
            return 0.0
        schedule = "zero_bubble" if shape.stages > 1 else "1f1b"
        schedule = "interleaved_1f1b" if batched.rounds > 1 else schedule
        summed = Candidate(shape, pieces, schedule)
        return self.least(summed, shared=replace(summed, zero=1))

    def least(self, candidate: Candidate, shared: Candidate | None = None) -> float:
        """Seconds that its step is not faster than; `shared` is whose optimizer it has, if another
        one's."""
        ends = self._ends(candidate)
        least = after = update = 0.0
        for end in ends:
            gather = self._gather_s(candidate.arrangement, end.part, end.elements)
            update = max(update, self._update_of(shared or candidate, end))
            match candidate.zero:
                case 0:
                    least = max(least, end.begun + 2 * gather, end.done + 2 * gather / end.pieces)
                case 3:
                    width = 1.0 if self.training.precision == "fp32" else 0.5
                    least = max(least, end.done + gather + 2 * width * gather)
                case _:
                    least, after = max(least, end.done + 2 * gather), max(after, gather)
        return least + after + update if ends else inf

    def _ends(self, candidate: Candidate) -> Sequence["_End"]:
        """When each stage is done at the earliest, in the copies where it is last; none where the
        strategy cannot be."""
        shape, pieces = candidate.arrangement, candidate.micro_batches
        key = (shape, pieces, candidate.schedule, candidate.split_head)
        if key not in self._known:
            flat = not pieces and shape.shards == 1
            self._known[key] = (
                [self._flat_end(shape, candidate.split_head)]
                if flat
                else list(self._pipeline_ends(shape, max(1, pieces), candidate.schedule))
            )
        return self._known[key]

    def _flat_end(self, shape: Arrangement, split_head: bool) -> "_End":
        """Of copies that share the samples as they like; of a split head every device has its
        part."""
        copies, elements = self.arranged.copies(shape), self.findings.copied_elements(split_head)
        lines = [self.segments.whole(each.devices[0], 1) for each in copies]
        if split_head:
            lines = [Line(Times(), line.each) for line in lines]
        pieces = sum_pieces(self.findings.profile.parameter_elements)

        def together(unsummed: float) -> float:
            kinds = []
            for each, line in zip(copies, lines, strict=True):
                fixed, slope = (
                    x.total - unsummed * (x.total - x.forward) for x in (line.fixed, line.each)
                )
                kinds.append((len(each.numbers), fixed, slope))
            return done_together_s(self.training.global_batch, kinds)

        done, begun = together(0.0), together(1 - 1 / pieces)
        devices = tuple(each.devices[0] for each in copies)
        part = shape.parts[0]
        return _End(part, devices, elements, pieces, done, 0.0 if split_head else begun)

    def _pipeline_ends(self, shape: Arrangement, pieces: int, schedule: str) -> Iterator["_End"]:
        key = (shape, pieces, schedule == "interleaved_1f1b")
        if key not in self._timed:
            self._timed[key] = list(self._timed_copies(shape, pieces, schedule))
        for copy in self._timed[key]:
            for number, done in enumerate(ends_of(copy.stages, pieces, schedule)):
                cut, device = copy.seated[number]
                summed = sum_pieces(cut.most_elements)
                begun = done - (1 - 1 / summed) * copy.last_backwards[number]
                yield _End(cut.part, (device,), cut.elements, summed, done, begun)

    def _timed_copies(self, shape: Arrangement, pieces: int, schedule: str) -> Iterator["_Timed"]:
        """Copies of a pipeline, of those that are alike one: what their stages take, which of a
        schedule depends on their chunks alone."""
        stages = self._stages(shape, schedule)
        shared = self.arranged.samples(shape, max(pieces, shape.widest))
        if not stages or shared is None:
            return
        limits = self.arranged.in_flight(shape, pieces, schedule)
        for of, samples in zip(self.arranged.copies(shape), shared, strict=True):
            seated = list(zip(stages, of.devices, strict=True))
            mean, small, large = (
                [self._piece(shape.shards, stage, device, each) for stage, device in seated]
                for each in (samples / pieces, samples // pieces, -(-samples // pieces))
            )
            hops = self.arranged.hops(shape, of.numbers[0], pieces) if len(stages) > 1 else ()
            sends = self._sends(hops, stages, samples // pieces)
            more = self._more_in_flight(hops, stages, pieces, -(-samples // pieces), large)
            rounds = len(stages[0].chunks)
            timed = [
                StageOf(
                    *(mean[n], small[n], stage.part.copies, limits[n] + more[n]),
                    *(sends[n][0], sends[n][1], rounds * sends[n][2]),
                    linked=all(stage.enters),
                )
                for n, stage in enumerate(stages)
            ]
            backwards = [each.whole - each.first_forward for each in large]
            yield _Timed(seated, timed, backwards)

    def _piece(self, shards: int, stage: StageCut, device: Device, samples: float) -> PieceTimes:
        """A micro-batch of so many samples."""
        key = (shards, stage.chunks, id(device), samples)
        if key not in self._pieces:
            lines = (self.segments.line(device, shards, *chunk) for chunk in stage.chunks)
            self._pieces[key] = PieceTimes.of([line.at(samples) for line in lines])
        return self._pieces[key]

    def _sends(
        self, hops: Sequence[Hop], stages: Sequence[StageCut], samples: float
    ) -> list[tuple[float, float, float]]:
        """Of every stage, the seconds in which a micro-batch of so many samples is sent to the next
        one, the least and the mean; and for how long the link of one of its copies is at it."""
        found = list[tuple[float, float, float]]()
        back: Sequence[float] = [0.0] * stages[0].part.copies
        for hop, there in zip(hops, stages[1:], strict=True):
            sent = min(self.segments.sent_bytes(each, samples) for each in there.enters)
            if not sent:
                found.append((0.0, 0.0, max(back)))
                back = [0.0] * there.part.copies
                continue
            least, mean, ahead, behind = hop.seconds(sent)
            lanes = (a + b for a, b in zip(ahead, back, strict=True))
            found.append((least, mean, max(lanes)))
            back = behind
        return [*found, (0.0, 0.0, max(back))]

    def _more_in_flight(
        self,
        hops: Sequence[Hop],
        stages: Sequence[StageCut],
        pieces: int,
        samples: float,
        large: Sequence[PieceTimes],
    ) -> list[int]:
        """How many micro-batches the copies of each stage may have in flight at most for what is on
        its way to the later stages and back (`list_scheduling.py`). The largest of `pieces` has
        `samples`, and takes `large` on each stage."""
        taken = zip(large, stages, strict=True)
        pace = max(times.whole / stage.part.copies for times, stage in taken)
        found, underway = [0], 0.0
        for hop, (here, there) in zip(reversed(hops), reversed([*pairwise(stages)]), strict=True):
            sent = max(self.segments.crossing_bytes(first, samples) for first, _ in there.chunks)
            underway += 2 * hop.most_s(sent)
            each = pieces
            if pace:
                spacing = spacing_of_equals(here.part.copies, pieces)
                each = min(pieces, in_flight_for(underway / pace, spacing))
            found.append(here.part.copies * each * (2 if len(here.chunks) > 1 else 1))
        return found[::-1]

    def _update_of(self, candidate: Candidate, end: "_End") -> float:
        holders = candidate.arrangement.copies * end.part.copies
        held = end.elements / candidate.arrangement.shards / (holders if candidate.zero else 1)
        states = self.training.optimizer_states
        if candidate.offload == "none":
            return max(update_time_s(held, states, device) for device in end.devices)
        on_cpu = self.cluster.on_cpu
        return max(offloaded_update_time_s(held, states, each, on_cpu) for each in end.devices)

    def _update_s(self, held: float) -> float:
        return update_time_s(held, self.training.optimizer_states, self._fastest_memory)

    # --- Transfers ---

    def _gather_s(self, shape: Arrangement, part: Part, elements: float) -> float:
        """Seconds in which fp32 values, as many as parameters of a stage of `part`, are gathered
        over the copies that hold them, once a node: half of an all-reduce. On its way out of a
        node that shares with the groups of all else the node holds."""
        members, least = shape.copies * part.copies, self._least_in_node
        num_bytes, bandwidth = 4 * elements / shape.shards, self._fastest_link.bandwidth_bytes_s
        # Members follow each other within a stage, and at the distance of a copy beyond.
        apart = part.width if shape.copies > 1 else part.shards
        held = apart * (shape.copies if shape.copies > 1 else part.copies)
        if members > 1 and held > self._most_in_node:
            members = min(members, ceil(held / self._most_in_node))
            crowd = max(1.0, min(part.shards, least), min(part.width, least) / part.copies)
            bandwidth = self.cluster.network.bandwidth_bytes_s / crowd
        return num_bytes * (members - 1) / members / bandwidth

    def _stages(self, shape: Arrangement, schedule: str) -> Sequence[StageCut]:
        """Those of the arrangement; of one stage, all there is."""
        if shape.stages > 1:
            return self.arranged.stages(shape, schedule)
        most = self.findings.profile.parameter_elements
        whole = (0, self.segments.count)
        return [StageCut(shape.parts[0], (whole,), self.findings.trained_elements, most)]

    # --- The hardware and the model's size ---

    @cached_property
    def segments(self) -> Segments:
        return Segments(self.findings, self.cluster, self.training.global_batch)

    @cached_property
    def arranged(self) -> Arranged:
        return Arranged(self.segments, self.cluster, self.training, self.balance)

    @cached_property
    def _memory(self) -> MemoryBound:
        return MemoryBound(self.findings, self.training, self.arranged)

    @cached_property
    def _fastest_memory(self) -> Device:
        states = self.training.optimizer_states
        return min(self.cluster.devices, key=lambda device: update_time_s(1e9, states, device))

    @cached_property
    def _fastest_link(self) -> Link:
        links = [node.link for node in self.cluster.nodes]
        if self.cluster.shared_memory is not None:
            links.append(self.cluster.shared_memory)
        return Link(
            "",
            max(link.bandwidth_bytes_s for link in links),
            min(link.latency_s for link in (*links, self.cluster.network)),
        )

    @cached_property
    def _most_in_node(self) -> int:
        return max(len(node.devices) for node in self.cluster.nodes)

    @cached_property
    def _least_in_node(self) -> int:
        return min(len(node.devices) for node in self.cluster.nodes)


@dataclass(frozen=True)
class _Timed:
    """A copy of a pipeline: the cut and the device of every stage, what it takes, and the seconds
    of the last backward of its largest micro-batch."""

    seated: Sequence[tuple[StageCut, Device]]
    stages: Sequence[StageOf]
    last_backwards: Sequence[float]


@dataclass(frozen=True)
class _End:
    """When a stage of `part`, in copies on `devices`, is done at the earliest, and when gradients
    of the last backward begin to be there, of which the sums are in `pieces`; how many trained
    parameters it holds."""

    part: Part
    devices: tuple[Device, ...]
    elements: float
    pieces: int
    done: float
    begun: float
