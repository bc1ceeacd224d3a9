"""The step of a nested strategy: the schedule's instructions, sums over copies, the update.

Copies of a pipeline with equal devices and equal micro-batches do the same at the same time: one
stands for all of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from math import ceil

from whale_train.strategies.cast_times import moved_bytes
from whale_train.strategies.cost import offloaded_update_time_s, update_time_s
from whale_train.strategies.instructions import COMPUTATIONS, Instruction, Kind
from whale_train.strategies.links import (
    Crowd,
    all_reduce_time_s,
    crowd_of,
    gather_stops_s,
    gather_time_s,
    group_link,
    modules_of,
    partitioned_sum_time_s,
    send_time_s,
    sum_time_s,
)
from whale_train.strategies.memory import REDUCE_BUCKET_ELEMENTS, precision_bytes
from whale_train.strategies.micro_batches import Batches
from whale_train.strategies.stage_memory import held_elements
from whale_train.strategies.stage_times import ChunkTimes
from whale_train.strategies.staging import Staging
from whale_train.strategies.step_tasks import PIECES, Actor, Cost, Step, Sync, costs


class StagedStep:
    """`orders` are the instructions by copy and position."""

    def __init__(
        self,
        job: Staging,
        times: ChunkTimes,
        batches: Batches,
        orders: Sequence[Sequence[Sequence[Instruction]]],
    ) -> None:
        self.job, self.times, self.batches, self.orders = job, times, batches, orders
        self.cluster = job.cluster
        crossing = (
            group for stage in range(len(job.form.stages)) for group in job.data_parallel(stage)
        )
        self.crowd: Crowd = crowd_of(self.cluster, crossing)
        self.senders: Crowd = crowd_of(self.cluster, self._edges())

    def step(self) -> tuple[Step, Mapping[int, int]]:
        """The step of the copies that stand for all, and which rank stands for each. Where ranks
        share processors, all copies stand for themselves."""
        first: dict[object, int] = {}
        stands: dict[int, int] = {}
        chosen: list[int] = []
        for copy, positions in enumerate(self.job.seats.positions):
            alike = (
                tuple(self._seated(positions)),
                tuple(stop - start for start, stop in self.batches.samples[copy]),
                copy if len(self.cluster.devices) > self.cluster.processors else 0,
            )
            other = first.setdefault(alike, copy)
            if other == copy:
                chosen.append(copy)
            for mine, theirs in zip(positions, self.job.seats.positions[other], strict=True):
                stands |= dict(zip(mine, theirs, strict=True))
        actors, numbers = list[Actor](), dict[tuple[int, int], int]()
        for copy in chosen:
            for position in range(len(self.job.seats.stage_of)):
                numbers[copy, position] = len(actors)
                actors.append(self._actor(copy, position))
        norm = all_reduce_time_s(
            4.0, len(self.cluster.devices), group_link(self.cluster, range(len(stands)))
        )
        return Step(actors, self._syncs(chosen, numbers), norm), stands

    def _seated(self, positions: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
        """Every rank's device, and its node, numbered in the order in which the copy's ranks come
        upon them."""
        numbers: dict[int, int] = {}
        for rank in (rank for ranks in positions for rank in ranks):
            node = numbers.setdefault(self.cluster.node_of[rank], len(numbers))
            yield id(self.cluster.devices[rank]), node

    def _actor(self, copy: int, position: int) -> Actor:
        ranks = self.job.seats.positions[copy][position]
        order = self.orders[copy][position]
        table = {
            (each.kind, each.chunk, each.micro_batch): self._cost(copy, position, each)
            for each in order
            if each.kind in COMPUTATIONS
        }
        sends = {
            _as_sent(each): self._send(copy, position, each)
            for each in order
            if each.kind in (Kind.SEND, Kind.SEND_GRADIENT)
        }
        computations = costs(table)

        def cost(instruction: Instruction) -> Cost:
            if instruction.kind in COMPUTATIONS:
                return computations(instruction)
            return sends[_as_sent(instruction)]

        return Actor(ranks, copy, order, cost, max(self._update_s(rank) for rank in ranks))

    def _cost(self, copy: int, position: int, instruction: Instruction) -> Cost:
        start, stop = self.batches.samples[copy][instruction.micro_batch]
        times, moved = self.times.of(instruction.chunk, copy, position, stop - start)
        gathers = self._gathers_s(copy, position)
        match instruction.kind:
            case Kind.FORWARD:
                return Cost(times.forward + gathers[0], moved.forward + gathers[0])
            case Kind.BACKWARD_INPUT:
                return Cost(times.backward_input, moved.backward_input)
            case Kind.BACKWARD_WEIGHT:
                return Cost(times.backward_weight, moved.backward_weight)
        backward, of_it_moved = times.total - times.forward, moved.total - moved.forward
        return Cost(backward + gathers[1], of_it_moved + gathers[1])

    def _gathers_s(self, copy: int, position: int) -> tuple[float, float]:
        """ZeRO 3's parameters, for a forward and for a backward (which no pipeline splits)."""
        if self.job.zero < 3:
            return 0.0, 0.0
        stage = self.job.seats.stage_of[position]
        group = self.job.data_parallel(stage)[0]
        width = precision_bytes(self.job.training.precision, self.job.zero).weights
        link = group_link(self.cluster, group, self.crowd)
        held = max(self._held[stage])
        sent = gather_time_s(width * held, len(group), link)
        mine = (chunk for chunk in self.times.chunks if chunk.stage == stage)
        paths = (path for chunk in mine for path in chunk.slice.parameters)
        forward, backward = gather_stops_s(
            held, len(modules_of(paths)), self.cluster.devices, self.job.training.precision
        )
        return sent + forward, sent + backward

    def _send(self, copy: int, position: int, instruction: Instruction) -> Cost:
        """A value, or the gradient of one, to the position that owns the micro-batch there."""
        there = self.batches.owners[copy][instruction.peer][instruction.micro_batch]
        ends = (
            self.job.seats.positions[copy][position][0],
            self.job.seats.positions[copy][there][0],
        )
        link = group_link(self.cluster, ends, self.senders)
        backward = instruction.kind is Kind.SEND_GRADIENT
        maker, taker = instruction.chunk, instruction.peer
        if backward:
            maker, taker = taker, maker
        start, stop = self.batches.samples[copy][instruction.micro_batch]
        num_bytes = self._crossing_bytes(maker, taker, stop - start, backward)
        return Cost(send_time_s(num_bytes, link))

    def _crossing_bytes(self, maker: int, taker: int, samples: int, backward: bool) -> float:
        taken = set(self.times.chunks[taker].slice.takes)
        total = 0.0
        for name in self.times.chunks[maker].slice.gives:
            operation = self.job.graph[name]
            if name in taken and (not backward or "float" in operation.dtype):
                total += moved_bytes(self.job.graph, name, samples, self.job.training.precision)
        return total

    def _edges(self) -> list[tuple[int, int]]:
        """Pairs of ranks of neighbouring stages, as far as they send to each other."""
        found = []
        for positions in self.job.seats.positions:
            for one, other in pairwise(positions):
                found += [(one[i % len(one)], rank) for i, rank in enumerate(other)]
        return found

    def _syncs(self, chosen: Sequence[int], numbers: Mapping[tuple[int, int], int]) -> list[Sync]:
        """The sums of every stage's gradients over its copies."""
        found, zero = [], self.job.zero
        for stage in range(len(self.job.form.stages)):
            groups = self.job.data_parallel(stage)
            copies = len(groups[0])
            if copies == 1:
                continue
            link = group_link(self.cluster, groups[0], self.crowd)
            num_bytes = 4 * max(self._held[stage])
            pieces = max(1, min(PIECES, ceil(num_bytes / 4 / REDUCE_BUCKET_ELEMENTS)))
            members = tuple(
                numbers[copy, position]
                for copy in chosen
                for position in self.job.seats.of_stage(stage)
            )
            summed = sum_time_s(self.cluster, groups[0], num_bytes, self.crowd)
            if zero == 0:
                found.append(Sync(members, summed, pieces, True, link.busy))
                continue
            gathered = gather_time_s(num_bytes, copies, link)
            if zero == 3:
                found.append(Sync(members, gathered, 1, False, link.busy))
                continue
            seconds = partitioned_sum_time_s(
                num_bytes / 4, summed, self.cluster.devices, self.job.training.precision
            )
            found.append(Sync(members, seconds, 1, False, link.busy, gathered))
        return found

    @cached_property
    def _held(self) -> Sequence[Sequence[float]]:
        """By stage and place in its shard group, how many parameters a rank holds of a copy."""
        found = []
        for stage, form in enumerate(self.job.form.stages):
            mine = [chunk for chunk in self.times.chunks if chunk.stage == stage]
            listed = []
            for member in range(form.shards):
                held: dict[str, float] = {}
                for chunk in mine:
                    held |= held_elements(self.job, chunk, self.times.axes, member)
                listed.append(sum(held.values()))
            found.append(listed)
        return found

    def _update_s(self, rank: int) -> float:
        copy, position = self.job.place_of(rank)
        number = self.job.seats.stage_of[position]
        stage = self.job.form.stages[number]
        held = self._held[number][self.job.seats.positions[copy][position].index(rank)]
        if self.job.zero:
            held /= self.job.form.copies * stage.copies
        device, states = self.cluster.devices[rank], self.job.training.optimizer_states
        keeper = self.job.form.keeper
        if keeper is not None and keeper.offload_optimizer == "cpu":
            return offloaded_update_time_s(held, states, device, self.cluster.on_cpu)
        return update_time_s(held, states, device)


def _as_sent(instruction: Instruction) -> tuple[Kind, int, int, int]:
    return instruction.kind, instruction.chunk, instruction.micro_batch, instruction.peer
