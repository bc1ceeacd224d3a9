"""What a candidate takes at the least: its step's time, and its memory.

A bound is cheap, and not above what the simulator finds for the strategy: it leaves out what is
only known once tensors are laid and instructions are ordered. `auto.py` opens an arrangement, and
resolves a candidate, only where its bound is below the best step it has found.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import ceil, floor, inf

from whale_train.strategies.chunks import cut_by_speed
from whale_train.strategies.cluster import Cluster, Device, Link
from whale_train.strategies.cost import Times, flops_rate, offloaded_update_time_s, update_time_s
from whale_train.strategies.findings import Findings
from whale_train.strategies.memory import precision_bytes
from whale_train.strategies.segments import Line, Segments
from whale_train.strategies.sharing import Training
from whale_train.strategies.space import Arrangement, Candidate, Part
from whale_train.strategies.stage_ends import (
    UNSUMMED,
    Affine,
    StageTimes,
    done_together_s,
    ends_of,
)
from whale_train.strategies.staging import VIRTUAL_STAGES
from whale_train.strategies.step_tasks import PIECES


@dataclass(frozen=True)
class Bounds:
    """Of candidates for a model on `cluster`, whose work is shared by `balance`."""

    findings: Findings
    cluster: Cluster
    training: Training
    balance: str = "hardware"
    _found: dict[tuple[int, str], Sequence[Device]] = field(default_factory=dict)
    _cuts: dict[object, Sequence["_Stage"]] = field(default_factory=dict)
    _known: dict[object, Sequence["_Ends"]] = field(default_factory=dict)
    _made: dict[Arrangement, Sequence["_Copies"]] = field(default_factory=dict)
    _timed: dict[object, StageTimes] = field(default_factory=dict)
    _rooms: dict[tuple[int, str], float] = field(default_factory=dict)

    # --- Memory ---

    def shortfall_bytes(self, candidate: Candidate) -> float:
        """By how much the weights, gradients and optimizer's state of one copy of the pipeline are
        more than its devices hold together; not positive where they may fit."""
        shape, zero = candidate.arrangement, candidate.zero
        copies = shape.copies * shape.widest
        sizes = precision_bytes(self.training.precision, zero, candidate.offload == "all")
        weights = sizes.weights * (1 / copies if zero == 3 else 1.0)
        gradients = sizes.gradients * (1 / copies if zero >= 2 else 1.0)
        states = 4 * self.training.optimizer_states + sizes.master
        optimizer = states * (1 / copies if zero else 1.0)
        need = gradients + sizes.casts
        need += 0.0 if candidate.offload == "all" else weights
        need += 0.0 if candidate.offload != "none" else optimizer
        room = sum(
            part.stages * part.shards * self._memory_bytes(shape, part) for part in shape.parts
        )
        return need * self._elements(candidate.split_head) - room

    # --- Time ---

    def least_of(self, shape: Arrangement) -> float:
        """Seconds that no candidate of `shape` is faster than, whatever the cut and the number of
        micro-batches."""
        copies, alone = self._copies(shape), shape.stages == 1
        elements = self._elements(without_head=alone)
        holders = shape.copies * shape.widest
        update = self._update_s(elements / (shape.stages * shape.shards * holders))
        if alone or len(copies) > 1:
            # A split head has of all that does not grow with the samples its part.
            lines = [self.segments.whole(each.devices[0], shape.shards) for each in copies]
            ends = [Affine(0.0, line.each.total / shape.stages) for line in lines]
            return self._together(copies, ends) + update
        samples = self.training.global_batch / shape.copies
        parts = [part for part in shape.parts for _ in range(part.stages)]
        wholes = self.segments.comparable_s(copies[0].devices, shape.shards, samples)
        speed, summed = 0.0, inf
        for part, whole, device in zip(parts, wholes, copies[0].devices, strict=True):
            # Of two micro-batches or more, and one for each copy; one goes through all stages.
            line = self.segments.whole(device, shape.shards)
            backward = 1 - min(
                times.forward / times.total for times in (line.fixed, line.each) if times.total
            )
            own = (1 / part.copies - UNSUMMED * backward / max(2, part.copies)) * whole
            speed += 1 / own
            summed = min(summed, 2 * self._gather_s(shape, part, elements) / own)
        # However work and parameters lie: stages weighed by how fast they are, the sum of what they
        # take is at least that of all work, and of all sums where these are the least beside it.
        return min((1 + summed) / speed, min(wholes)) + update

    def least(self, candidate: Candidate) -> float:
        """Seconds that its step is not faster than."""
        shape, zero = candidate.arrangement, candidate.zero
        stages = self._stages(shape, candidate.schedule, candidate.split_head)
        ends = self._ends(shape, candidate.micro_batches, candidate.schedule, candidate.split_head)
        least = after = update = 0.0
        for stage, end in zip(stages, ends, strict=True):
            gather = self._gather_s(shape, stage.part, stage.elements)
            update = max(update, self._update_of(candidate, stage))
            least = max(least, end.computed)
            if zero == 0:
                summed = 0.0 if candidate.split_head else end.last_backward
                least = max(least, summed + 2 * gather, end.computed + 2 * gather / PIECES)
            elif zero == 3:
                width = 0.5 if self.training.precision == "bf16" else 1.0
                least = max(least, end.computed + gather + 2 * width * gather)
            else:
                least, after = max(least, end.done + 2 * gather), max(after, gather)
        return least + after + update if stages else inf

    def _ends(
        self, shape: Arrangement, micro_batches: int, schedule: str, split_head: bool
    ) -> Sequence["_Ends"]:
        """When each stage is done at the earliest."""
        key = (shape, micro_batches, schedule, split_head)
        if key not in self._known:
            copies, pieces = self._copies(shape), max(1, micro_batches)
            mean = self.training.global_batch / shape.copies / pieces
            # A micro-batch may have fewer samples than the mean of its copy's.
            small = floor(mean) / mean if len(copies) == 1 else max(0.0, 1 - 1 / mean)
            stages = self._stages(shape, schedule, split_head)
            each = [
                ends_of(
                    [
                        (
                            self._times(stage, device, shape.shards, split_head),
                            self._send(shape, stage),
                            stage.part.copies,
                        )
                        for stage, device in zip(stages, of.devices, strict=True)
                    ],
                    *(pieces, small, schedule),
                )
                for of in copies
            ]
            self._known[key] = [
                _Ends(
                    self._latest(copies, [ends.computed for ends in stage]),
                    self._latest(copies, [ends.done for ends in stage]),
                    self._latest(copies, [ends.last_backward for ends in stage]),
                )
                for stage in zip(*each, strict=True)
            ]
        return self._known[key]

    def _times(self, stage: "_Stage", device: Device, shards: int, split_head: bool) -> StageTimes:
        """Of a micro-batch; of a split head every device has its part."""
        key = (stage.chunks, id(device), shards, split_head)
        if key not in self._timed:
            chunks = [
                self.segments.line(device, shards, *chunk)
                if chunk
                else self.segments.whole(device, shards)
                for chunk in stage.chunks
            ]
            if split_head:
                chunks = [Line(Times(), line.each) for line in chunks]
            self._timed[key] = StageTimes.of(chunks)
        return self._timed[key]

    def _together(self, copies: Sequence["_Copies"], ends: Sequence[Affine]) -> float:
        return done_together_s(self.training.global_batch, [of.count for of in copies], ends)

    def _latest(self, copies: Sequence["_Copies"], ends: Sequence[Sequence[Affine]]) -> float:
        """By several formulas."""
        return max(self._together(copies, formulas) for formulas in zip(*ends, strict=True))

    def _update_of(self, candidate: Candidate, stage: "_Stage") -> float:
        holders = candidate.arrangement.copies * stage.part.copies
        held = stage.elements / candidate.arrangement.shards / (holders if candidate.zero else 1)
        if candidate.offload == "none":
            return self._update_s(held)
        states, device = self.training.optimizer_states, self._fastest_memory
        return offloaded_update_time_s(held, states, device, self.cluster.on_cpu)

    def _update_s(self, held: float) -> float:
        return update_time_s(held, self.training.optimizer_states, self._fastest_memory)

    # --- Transfers ---

    def _gather_s(self, shape: Arrangement, part: Part, elements: float) -> float:
        """Seconds in which fp32 values, as many as parameters of a stage of `part`, are gathered
        over the copies that hold them, once a node: half of an all-reduce. On its way out of a
        node that shares with the groups of all else the node holds."""
        members, held = shape.copies * part.copies, shape.copies * part.width
        num_bytes, bandwidth = 4 * elements / shape.shards, self._fastest_link.bandwidth_bytes_s
        if shape.copies > 1 and held > self._most_in_node:
            members = min(members, ceil(held / self._most_in_node))
            crowd = max(1.0, min(part.width, self._least_in_node) / part.copies)
            bandwidth = self.cluster.network.bandwidth_bytes_s / crowd
        return num_bytes * (members - 1) / members / bandwidth

    def _send(self, shape: Arrangement, stage: "_Stage") -> Affine:
        """What a stage sends of a micro-batch to the next one, by its samples, in a pipeline that
        begins a node. Kinds of devices are on nodes of their own."""
        room, network, link = self._most_in_node, self.cluster.network, self._fastest_link
        number, shards = stage.number_in_part, shape.shards
        ends_part = shape.by_kind and number == stage.part.stages - 1
        leaves = not shape.by_kind and (number + 1) * shards // room > number * shards // room
        least = link
        if (leaves or ends_part) and network.bandwidth_bytes_s < self._slowest_bytes_s:
            least = network
            # All members of a group send at once, and a node amid a pipeline sends two ways.
            ways = 2 if not shape.by_kind and shape.parts[0].width > 2 * room else 1
            num_bytes = self._crossing_bytes * shards * ways
        else:  # a link of the node, be it the fastest
            num_bytes = self._crossing_bytes
        return Affine(least.latency_s, num_bytes / least.bandwidth_bytes_s)

    # --- The stages ---

    def _stages(self, shape: Arrangement, schedule: str, split_head: bool) -> Sequence["_Stage"]:
        """Those of the arrangement, cut as the resolver will; none where it cannot."""
        if shape.stages == 1:
            elements = self._elements(split_head)
            whole = (0, self.segments.count) if self.findings.profile.graph else ()
            return [_Stage(shape.parts[0], 0, (whole,), elements)]
        rounds = VIRTUAL_STAGES if schedule == "interleaved_1f1b" else 1
        key = (shape.devices, shape.parts, rounds)
        if key not in self._cuts:
            self._cuts[key] = list(self._cut(shape, rounds))
        return self._cuts[key]

    def _cut(self, shape: Arrangement, rounds: int) -> Iterator["_Stage"]:
        parts = [(part, number) for part in shape.parts for number in range(part.stages)]
        speeds = [self._speed(shape, part) for part, _ in parts]
        cut = cut_by_speed(self.findings, tuple(speeds * rounds), {})
        chunks = list(pairwise(cut)) if cut is not None else []
        for number, (part, in_part) in enumerate(parts if chunks else ()):
            mine = tuple(chunks[number :: len(parts)])
            elements = sum(self.segments.elements(*chunk) for chunk in mine)
            yield _Stage(part, in_part, mine, elements)

    def _speed(self, shape: Arrangement, part: Part) -> float:
        """As fast as the resolver takes a stage of `part` for."""
        precision = self.training.precision
        kinds = {id(device): device for device in self._devices(shape, part)}
        rates = (flops_rate(device, precision) for device in kinds.values())
        each = 1.0 if self.balance == "even" else min(rates)
        return sum([each] * (part.copies * part.shards))

    # --- The hardware and the model's size ---

    def _copies(self, shape: Arrangement) -> Sequence["_Copies"]:
        """The copies of the pipeline, those on equal devices together."""
        if shape not in self._made:
            self._made[shape] = self._copies_of(shape)
        return self._made[shape]

    def _copies_of(self, shape: Arrangement) -> Sequence["_Copies"]:
        if shape.by_kind:
            parts = [part for part in shape.parts for _ in range(part.stages)]
            devices = tuple(self._devices(shape, part)[0] for part in parts)
            return [_Copies(shape.copies, devices)]
        devices_of = self._devices(shape, shape.parts[0])
        kinds = {id(device): device for device in devices_of}
        counts = Counter(id(device) for device in devices_of)
        width = shape.parts[0].width
        return [_Copies(counts[k] / width, (kinds[k],) * shape.stages) for k in kinds]

    def _devices(self, shape: Arrangement, part: Part) -> Sequence[Device]:
        """Those that may hold the part."""
        key = (shape.devices, part.kind)
        if key not in self._found:
            listed = self.cluster.devices[: shape.devices]
            self._found[key] = [d for d in listed if part.kind in ("", d.name)]
        return self._found[key]

    def _memory_bytes(self, shape: Arrangement, part: Part) -> float:
        """Of the device with most of it that may hold the part."""
        key = (shape.devices, part.kind)
        if key not in self._rooms:
            self._rooms[key] = max(d.memory_bytes for d in self._devices(shape, part))
        return self._rooms[key]

    @cached_property
    def segments(self) -> Segments:
        return Segments(self.findings, self.cluster)

    @cached_property
    def _fastest_memory(self) -> Device:
        states = self.training.optimizer_states
        return min(self.cluster.devices, key=lambda device: update_time_s(1e9, states, device))

    @cached_property
    def _fastest_link(self) -> Link:
        links = [node.link for node in self.cluster.nodes]
        return Link(
            "",
            max(link.bandwidth_bytes_s for link in links),
            min(link.latency_s for link in (*links, self.cluster.network)),
        )

    @cached_property
    def _slowest_bytes_s(self) -> float:
        return min(node.link.bandwidth_bytes_s for node in self.cluster.nodes)

    @cached_property
    def _most_in_node(self) -> int:
        return max(len(node.devices) for node in self.cluster.nodes)

    @cached_property
    def _least_in_node(self) -> int:
        return min(len(node.devices) for node in self.cluster.nodes)

    @cached_property
    def _crossing_bytes(self) -> float:
        """The least that is sent of a sample, wherever the model is cut."""
        order = self.findings.order
        between = (
            num_bytes
            for num_bytes, weights in zip(order.bytes_crossing, order.weights, strict=True)
            if 0 < weights < order.weights[-1]
        )
        width = 1.0 if self.training.precision == "fp32" else 0.5
        return width * min(between, default=0.0)

    def _elements(self, without_head: bool) -> float:
        """Of the trained parameters."""
        return self._trained_elements - (self._head_elements if without_head else 0)

    @cached_property
    def _trained_elements(self) -> float:
        profile = self.findings.profile
        left = sum(profile.parameter_by_path[path].elements for path in profile.unused_parameters)
        return float(profile.parameter_elements - left)

    @cached_property
    def _head_elements(self) -> int:
        heads = self.findings.heads if self.findings.profile.graph else ()
        by_path = self.findings.profile.parameter_by_path
        return max((by_path[head.weight].elements for head in heads), default=0)


@dataclass(frozen=True)
class _Copies:
    """So many copies of the pipeline, whose stages are on `devices`."""

    count: float
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class _Stage:
    """A stage of a cut: its part, its number there, the segments [first, last) of its chunks (none:
    all there is), and how many parameters it holds."""

    part: Part
    number_in_part: int
    chunks: tuple[tuple[int, int] | tuple[()], ...]
    elements: float


@dataclass(frozen=True)
class _Ends:
    """When a stage has computed all and its gradients have gone back through those before it; when
    it is done itself; and when the first gradients of its parameters may be summed."""

    computed: float
    done: float
    last_backward: float
