"""The step of a strategy: the schedule's instructions, gradient reductions, the update.

Replicas of a pipeline with equal devices and equal micro-batches do the same at the same time: only
one of them is simulated.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from whale_train.strategies.cost.batch_exchange import batch_norm_times, batch_sum_times
from whale_train.strategies.cost.collectives import (
    NicContention,
    all_reduce_time_s,
    gather_time_s,
    group_link,
    modules_of,
    nic_contention,
    send_time_s,
    zero3_gather_overhead_s,
)
from whale_train.strategies.cost.op_cost import part_of
from whale_train.strategies.cost.roofline import (
    Times,
    accumulation_time_s,
    fetch_time_s,
    offloaded_update_time_s,
    update_time_s,
    zeros_time_s,
)
from whale_train.strategies.graph.operation_graph import LOOKUP
from whale_train.strategies.memory import nvme
from whale_train.strategies.schedule.instructions import COMPUTATIONS, ENDS, Instruction, Kind
from whale_train.strategies.simulate.tasks import Actor, Cost, Step
from whale_train.strategies.stages.chunk_cost import ChunkTimes
from whale_train.strategies.stages.engines import engines_of_stages, held_elements
from whale_train.strategies.stages.fused_accumulation import added_in_place
from whale_train.strategies.stages.gradient_sync import gradient_sums
from whale_train.strategies.stages.micro_batches import Batches
from whale_train.strategies.stages.p2p import P2PCosts
from whale_train.strategies.stages.placement import PlanningContext
from whale_train.strategies.stages.recomputation import operations_again


class StagedStep:
    """The costs of a strategy's step.

    job: the strategy on its devices.
    times: seconds of the chunks.
    batches: micro-batches of every replica.
    orders: instructions, by replica and position.
    shared: stages of every parameter that several stages hold, by path.
    parts: relative part of every copy of a stage in the state that ZeRO partitions, by stage; empty
        where parts are equal, or nothing is partitioned.
    """

    def __init__(
        self,
        job: PlanningContext,
        times: ChunkTimes,
        batches: Batches,
        orders: Sequence[Sequence[Sequence[Instruction]]],
        shared: Mapping[str, Sequence[int]],
        parts: Sequence[Sequence[int]] = (),
    ) -> None:
        self._parts = parts
        self.job, self.times, self.batches, self.orders = job, times, batches, orders
        self.shared, self.cluster = shared, job.cluster
        self.engines = engines_of_stages(job, times.chunks, times.axes)
        crossing = (g for of_stage in self.engines for engine in of_stage for g in engine.groups)
        self.crowd: NicContention = nic_contention(self.cluster, crossing)
        self.sends = P2PCosts(job, times.chunks)
        norms = job.profile.batch_norm_modules
        self.synchronises = bool(norms) and job.training.sync_batchnorm
        self._over_batch: dict[int, Times] = {}
        self._gradients: dict[tuple[int, ...], float] = {}

    def step(self) -> tuple[Step, Mapping[int, int]]:
        """Return the step of the simulated replicas, and the simulated rank that stands for every
        rank. Where ranks share processors, every replica is simulated."""
        first: dict[object, int] = {}
        stands: dict[int, int] = {}
        chosen: list[int] = []
        for copy, positions in enumerate(self.job.seats.positions):
            alike = (
                tuple(self._seated(positions)),
                tuple(stop - start for start, stop in self.batches.samples[copy]),
                copy if len(self.cluster.devices) > self.cluster.processors else 0,
            )
            simulated = first.setdefault(alike, copy)
            if simulated == copy:
                chosen.append(copy)
            seats = zip(positions, self.job.seats.positions[simulated], strict=True)
            for ranks, simulated_ranks in seats:
                stands |= dict(zip(ranks, simulated_ranks, strict=True))
        actors, numbers = list[Actor](), dict[tuple[int, int], int]()
        for copy in chosen:
            for position in range(len(self.job.seats.stage_of)):
                numbers[copy, position] = len(actors)
                actors.append(self._actor(copy, position))
        norm = all_reduce_time_s(
            4.0, len(self.cluster.devices), group_link(self.cluster, range(len(stands)))
        )
        # Replicas on one host then reduce in shared memory (runtime/comms/process_groups.py).
        one_backward = self.job.has_one_backward(self.orders)
        syncs = gradient_sums(
            self.job, self.engines, self.shared, self.crowd, numbers, one_backward
        )
        return Step(actors, syncs, norm), stands

    def _seated(self, positions: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
        """Yield the device (its `id`) and the node of every rank of a replica. Nodes are numbered
        in the order in which the replica's ranks first use them."""
        numbers: dict[int, int] = {}
        for rank in (rank for ranks in positions for rank in ranks):
            node = numbers.setdefault(self.cluster.node_of[rank], len(numbers))
            yield id(self.cluster.devices[rank]), node

    def _actor(self, copy: int, position: int) -> Actor:
        """Return the actor at a position of a replica. Instructions of one kind and chunk cost the
        same for equally many samples and between the same positions."""
        ranks = self.job.seats.positions[copy][position]
        order, sizes = self.orders[copy][position], self._sizes[copy]
        owners = self.batches.owners[copy]
        costs: dict[object, Cost] = {}
        ends = [x for x in order if x.kind in ENDS]
        first, last = {x.chunk: x for x in reversed(ends)}, {x.chunk: x for x in ends}

        def cost(instruction: Instruction) -> Cost:
            kind, chunk, micro_batch, peer = instruction
            samples = sizes[micro_batch]
            if kind in COMPUTATIONS:
                adds = kind in ENDS and instruction != first[chunk]
                key = (kind, chunk, samples, adds)
                if key not in costs:
                    costs[key] = self._cost(copy, position, instruction, samples)
                    if kind in ENDS:
                        alone = first[chunk] == last[chunk]
                        more = self._gradients_s(chunk, ranks, adds, alone)
                        costs[key] = replace(costs[key], seconds=costs[key].seconds + more)
                return costs[key]
            peer_position = owners[peer][micro_batch]
            edge = (kind, chunk, peer, peer_position, samples)
            if edge not in costs:
                link = self.sends.link(copy, (position, peer_position))
                sent = self.sends.num_bytes(chunk, peer, samples)
                costs[edge] = Cost(send_time_s(sent, link), busy=link.busy)
            return costs[edge]

        return Actor(ranks, copy, order, cost, max(self._update_s(rank) for rank in ranks))

    def _gradients_s(self, number: int, ranks: Sequence[int], adds: bool, alone: bool) -> float:
        """Return the seconds that a backward of chunk `number` spends on accumulating gradients, on
        the slowest of `ranks`, its shard group.

        A later backward `adds` its gradients to the accumulated ones, except those that are
        accumulated in place. The first backward fills embedding gradients with zeros. It skips a
        table that other operations than lookups read too if it is not `alone` (a later backward
        follows).
        """
        devices = [self.cluster.devices[rank] for rank in ranks]
        key = (number, adds, alone, *map(id, devices))
        if key not in self._gradients:
            chunk, axes = self.times.chunks[number], self.times.axes
            in_place = added_in_place(self.job, chunk)
            made = [x for x, of in in_place.items() if LOOKUP in of and (alone or len(of) == 1)]
            seconds = []
            for member, device in enumerate(devices):
                held = held_elements(self.job, chunk, axes, member)
                if adds:
                    own = [n for path, n in held.items() if path not in in_place]
                    seconds.append(accumulation_time_s(sum(own), len(own), device, self._precision))
                else:
                    tables = sum(held[path] for path in made)
                    seconds.append(zeros_time_s(tables, device, self._precision))
            self._gradients[key] = max(seconds)
        return self._gradients[key]

    @property
    def _precision(self) -> str:
        return self.job.training.precision

    @cached_property
    def _sizes(self) -> Sequence[Sequence[int]]:
        """Return the number of samples of every micro-batch, by replica."""
        return [[stop - start for start, stop in of_copy] for of_copy in self.batches.samples]

    def _cost(self, copy: int, position: int, instruction: Instruction, samples: int) -> Cost:
        """Return the cost of a computation on a micro-batch of `samples`, including exchanges over
        the batch and ZeRO 3's all-gathers."""
        times, moved = self.times.of(instruction.chunk, copy, position, samples)
        if self.synchronises or self.job.batch_sums:
            exchanged = self._exchanged(instruction.chunk)
            times, moved = times + exchanged, moved + exchanged
        gathers = self._gathers_s(copy, position)
        match instruction.kind:
            case Kind.FORWARD:
                return Cost(times.forward + gathers[0], moved.forward + gathers[0])
            case Kind.BACKWARD_INPUT:
                return Cost(times.backward_input, moved.backward_input)
            case Kind.BACKWARD_WEIGHT:
                return Cost(times.backward_weight, moved.backward_weight)
        backward, transfers = times.total - times.forward, moved.total - moved.forward
        return Cost(backward + gathers[1], transfers + gathers[1])

    def _gathers_s(self, copy: int, position: int) -> tuple[float, float]:
        """Return the seconds of ZeRO 3's parameter all-gathers in a forward and in a backward. No
        schedule splits a backward under ZeRO."""
        if self.job.zero < 3:
            return 0.0, 0.0
        stage = self.job.seats.stage_of[position]
        engine = self.engines[stage][0]  # parts split beside the rest have ZeRO 1 at most
        group, held = engine.groups[0], max(engine.elements)
        width = self.job.findings.weight_width(self.job.zero)
        link = group_link(self.cluster, group, self.crowd)
        sent = gather_time_s(width * held, len(group), link)
        keeper, streamed = self.job.form.keeper, 0.0
        if keeper is not None and keeper.offload_parameters != "none":
            holders = [self.cluster.devices[rank] for rank in group]
            sent += fetch_time_s(width * held / len(group), holders, self.cluster.on_cpu)
            if keeper.offload_parameters == "nvme":
                sent += nvme.read_time_s(4 * held / len(group), group, self.cluster)
            streamed = self._streamed_s(copy, position)
        chunks = [chunk for chunk in self.times.chunks if chunk.stage == stage]
        of_head = {x for chunk in chunks if chunk.shares_samples for x in chunk.shards}
        paths = [path for chunk in chunks for path in chunk.slice.parameters if path not in of_head]
        forward, backward = zero3_gather_overhead_s(
            held, len(modules_of(paths)), self.cluster.devices, self.job.training.precision
        )
        # The backward fetches streamed weights once more, and sends their gradients to the host.
        return sent + forward + streamed, sent + backward + 2 * streamed

    def _streamed_s(self, copy: int, position: int) -> float:
        """Return the seconds to fetch the streamed weights of a stage from the hosts once."""
        width = self.job.findings.weight_width(1)
        devices = [self.cluster.devices[r] for r in self.job.seats.positions[copy][position]]
        return sum(
            fetch_time_s(width * max(engine.elements), devices, self.cluster.on_cpu)
            for engine in self.engines[self.job.seats.stage_of[position]]
            if engine.streams
        )

    def _exchanged(self, number: int) -> Times:
        """Return the times of exchanging BatchNorm statistics and sums over the batch between the
        replicas of a chunk's stage."""
        if number not in self._over_batch:
            self._over_batch[number] = self._priced_exchange(number)
        return self._over_batch[number]

    def _priced_exchange(self, number: int) -> Times:
        """Compute the times that `_exchanged` caches."""
        chunk, job = self.times.chunks[number], self.job
        if job.profile.graph is None:
            return Times()
        group = job.copies_of_rest[chunk.stage][0]
        operations, link = chunk.slice.operations, group_link(self.cluster, group, self.crowd)
        assignment = chunk.sharded.assignment if chunk.sharded else None

        def exchanged(names: Sequence[str]) -> Times:
            sums = [name for name in names if name in job.batch_sums]
            times = batch_sum_times(job.graph, sums, len(group), link)
            if self.synchronises:
                channels = part_of(assignment, self.times.axes, 0)
                times += batch_norm_times(job.graph, names, len(group), link, channels)
            return times

        exchange = exchanged(operations)
        if units := self.times.recomputed.get(chunk.stage):
            again = exchanged(operations_again(job, operations, units))
            exchange += Times(backward_input=again.forward)
        return exchange

    def _update_s(self, rank: int) -> float:
        """Return the seconds of the optimizer's update on `rank`."""
        copy, position = self.job.place_of(rank)
        number = self.job.seats.stage_of[position]
        member = self.job.seats.positions[copy][position].index(rank)
        device, states = self.cluster.devices[rank], self.job.training.optimizer_states
        seconds = 0.0
        for engine in self.engines[number]:
            held, keeper = engine.elements[member], engine.keeper
            if self._parts and (parts := self._parts[number]):
                ranks = self.job.seats.positions[copy][position]
                held *= parts[self.job.replicas[number].index(ranks)] / sum(parts)
            elif keeper is not None and keeper.zero:
                held /= len(engine.groups[0])
            if keeper is not None and keeper.offload_optimizer != "none":
                on_cpu, moves = self.cluster.on_cpu, not engine.streams
                seconds += offloaded_update_time_s(held, states, device, on_cpu, moves)
                swapped = (held, nvme.in_files(keeper), self.job.training, rank)
                seconds += nvme.swap_time_s(*swapped, self.cluster)
            else:
                seconds += update_time_s(held, states, device)
        return seconds
