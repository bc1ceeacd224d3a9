"""The seconds of a strategy's chunks: operations, and collectives between layouts."""

from collections.abc import Sequence
from functools import partial
from types import MappingProxyType

from whale_train.strategies.context_parallel.attention import attentions
from whale_train.strategies.cost.collectives import group_link
from whale_train.strategies.cost.op_cost import part_of
from whale_train.strategies.cost.resharding import (
    ROUTES,
    cast_times,
    routing_times,
    rows_time_s,
)
from whale_train.strategies.cost.roofline import Times, whole_times
from whale_train.strategies.hardware.cluster import Device, Link
from whale_train.strategies.layouts.propagation import BATCH
from whale_train.strategies.layouts.segment import Segment
from whale_train.strategies.layouts.types import Cast
from whale_train.strategies.schedule.apportion import apportion_by_time, most_shared, tile
from whale_train.strategies.stages.attention_groups import group_of
from whale_train.strategies.stages.fused_accumulation import named_in_place
from whale_train.strategies.stages.offloading import transfer_times
from whale_train.strategies.stages.placement import (
    AxisIntervals,
    PlanningContext,
    StageChunk,
    equivalent_ranks,
    named_key,
    segment_of,
)
from whale_train.strategies.stages.recomputation import Units, key_of_units, operations_again


class ChunkTimes:
    """The seconds of a strategy's chunks at the positions that hold them.

    job: the strategy on its devices.
    chunks: all chunks, in the order they run.
    axes: intervals of the members of shard groups, by axis.
    recomputed: paths of the modules that are recomputed in the backward, by stage.
    offloaded: paths of the modules whose saved tensors are sent to the host, by stage.
    limits: the most samples per micro-batch of each rank, which bound the shares of members that
        divide a micro-batch (empty: no limit).
    """

    def __init__(
        self,
        job: PlanningContext,
        chunks: Sequence[StageChunk],
        axes: AxisIntervals,
        recomputed: Units = MappingProxyType({}),
        limits: Sequence[int] = (),
        offloaded: Units = MappingProxyType({}),
    ) -> None:
        self.job, self.chunks, self.axes, self.recomputed = job, chunks, axes, recomputed
        self.limits, self.offloaded = limits, offloaded
        self._members = [equivalent_ranks(chunk.axes, axes) for chunk in chunks]
        self._parts = [_parts(chunk) if chunk.shares_samples else () for chunk in chunks]

    def of(self, number: int, copy: int, position: int, samples: int) -> tuple[Times, Times]:
        """Return the times, in seconds, of a micro-batch of `samples` in chunk `number`: all of
        them, and the part that is communication."""
        ranks = self.job.seats.positions[copy][position]
        link = group_link(self.job.cluster, ranks, by_memory=True)
        devices = tuple(id(self.job.cluster.devices[rank]) for rank in ranks)
        chunk = self.chunks[number]
        again = key_of_units(self.job, chunk, self.recomputed.get(chunk.stage, frozenset()))
        sent = key_of_units(self.job, chunk, self.offloaded.get(chunk.stage, frozenset()))
        cut = tuple(self.axes[x] for x in chunk.axes)
        nodes = tuple(self.job.cluster.node_of[x] for x in ranks) if chunk.expert_axes else ()
        shares = self.member_shares(number, ranks, samples) if chunk.shares_samples else ()
        return self.job.findings.once(
            ("times", chunk.key, cut, devices, samples, link, again, sent, shares, nodes),
            lambda: self._priced(number, ranks, samples, shares, link),
        )

    def stage_s(self, stage: int, copy: int, position: int, samples: int) -> float:
        """Return the seconds of a micro-batch of `samples` in all chunks that a position of `stage`
        holds."""
        return sum(
            self.of(number, copy, position, samples)[0].total
            for number, chunk in enumerate(self.chunks)
            if chunk.stage == stage
        )

    def member_shares(self, number: int, ranks: Sequence[int], samples: int) -> tuple[int, ...]:
        """Return the samples that each of `ranks`, the members of a shard group, takes of a
        micro-batch of `samples` in chunk `number`, which the members divide among them.

        The limits of the ranks are ignored where they leave no room for all samples: the search for
        shares also prices micro-batches that do not fit.
        """
        limits = [self.limits[rank] if self.limits else samples for rank in ranks]
        room = most_shared(self.job.strategy.balance, limits)
        if room < samples or min(limits) < 1:
            limits = [samples] * len(ranks)
        devices = [self.job.cluster.devices[rank] for rank in ranks]
        key = ("members", self.chunks[number].key, samples, *map(id, devices), *limits)
        shares = self.job.findings.once(
            (*key, self.job.strategy.balance),
            lambda: apportion_by_time(
                self.job.strategy.balance,
                samples,
                [partial(self._rest_s, number, device) for device in devices],
                limits,
                1,
            ),
        )
        assert shares is not None, (samples, limits)
        return shares

    def _rest_s(self, number: int, device: Device, samples: int) -> float:
        """Return the seconds of `samples` in the replicated part of chunk `number`."""
        chunk = self.chunks[number]
        return sum(
            self.job.findings.prices.times(
                (chunk.key, part, ()), segment.operations, device, samples,
                added_to=partial(named_in_place, self.job, chunk),
            ).total
            for part, segment in enumerate(self._parts[number])
            if segment.assignment is None
        )  # fmt: skip

    def durations(
        self, copy: int, samples: int
    ) -> dict[tuple[int, int], tuple[float, float, float]]:
        """Return the seconds of (forward, input gradient, weight gradient) for a micro-batch of
        `samples` of a replica, by chunk and the position that holds it."""
        durations: dict[tuple[int, int], tuple[float, float, float]] = {}
        for number, chunk in enumerate(self.chunks):
            for position in self.job.seats.of_stage(chunk.stage):
                times, _ = self.of(number, copy, position, samples)
                durations[number, position] = (
                    times.forward, times.backward_input, times.backward_weight
                )  # fmt: skip
        return durations

    def _priced(
        self, number: int, ranks: Sequence[int], samples: int, shares: Sequence[int], link: Link
    ) -> tuple[Times, Times]:
        """Return two times. The first is that of the shard group's slowest member, for which the
        others wait, with its collectives; the second is that of the collectives alone."""
        chunk = self.chunks[number]
        members = [self._own(number, i, rank, samples, shares) for i, rank in enumerate(ranks)]
        slowest = max(members, key=lambda times: times.total)
        casts = chunk.sharded.assignment.casts if chunk.sharded else ()
        moved = self._casts(chunk, casts, ranks, samples, link)
        moved += self._under_products(chunk, ranks, samples, shares)
        index = members.index(slowest)
        moved += self._attentions(chunk, ranks, samples, link)
        if units := self.recomputed.get(chunk.stage):
            again = frozenset(self._again(chunk, units))
            once_more = self._own(number, index, ranks[index], samples, shares, units).forward
            back = self._casts(chunk, [x for x in casts if x.user in again], ranks, samples, link)
            slowest += Times(backward_input=once_more + back.forward)
            moved += Times(backward_input=back.forward)
        copied = self._sent(number, index, ranks, samples)
        return slowest + moved + copied, moved + copied

    def _sent(self, number: int, index: int, ranks: Sequence[int], samples: int) -> Times:
        """Return the times that copies to the host and back add, for member `index` of a shard
        group."""
        chunk, job = self.chunks[number], self.job
        sent = self.offloaded.get(chunk.stage)
        if not sent or job.profile.graph is None:
            return Times()
        assignment = chunk.sharded.assignment if chunk.sharded else None
        again = self.recomputed.get(chunk.stage, frozenset())
        device, part = job.cluster.devices[ranks[index]], part_of(assignment, self.axes, index)
        return transfer_times(job, chunk.slice.operations, sent, again, device, samples, part)

    def _again(self, chunk: StageChunk, units: frozenset[str]) -> Sequence[str]:
        """Return the operations of a chunk that run again in the backward."""
        if self.job.profile.graph is None:
            return ()
        return operations_again(self.job, chunk.slice.operations, units)

    def _own(
        self,
        number: int,
        index: int,
        rank: int,
        samples: int,
        shares: Sequence[int],
        units: frozenset[str] = frozenset(),
    ) -> Times:
        """Return the times of member `index` of a shard group for its operations: all of them, or
        those in `units` alone."""
        if self.chunks[number].shares_samples:
            return self._beside(number, index, rank, shares, units)
        return self._split(number, index, rank, samples, units)

    def _split(
        self, number: int, index: int, rank: int, samples: int, units: frozenset[str]
    ) -> Times:
        """Return the times of member `index` of a shard group whose members all run the same
        `samples`, as in `_own`."""
        chunk, device = self.chunks[number], self.job.cluster.devices[rank]
        if self.job.profile.graph is None:
            return whole_times(chunk.slice.flops * samples, device, self.job.training.precision)
        member = self._members[number][index] if self._members[number] else 0
        assignment = chunk.sharded.assignment if chunk.sharded else None
        own: tuple[object, ...] = tuple(self.axes[axis][member] for axis in chunk.axes)
        operations: Sequence[str] = chunk.slice.operations
        if units:
            own = (*own, key_of_units(self.job, chunk, units))
            operations = self._again(chunk, units)
        return self.job.findings.prices.times(
            (chunk.key, own), operations, device, samples,
            partial(part_of, assignment, self.axes, index),
            partial(named_in_place, self.job, chunk),
        )  # fmt: skip

    def _beside(
        self, number: int, index: int, rank: int, shares: Sequence[int], units: frozenset[str]
    ) -> Times:
        """Return the times of a member of a shard group that divides its samples, as in `_own`: the
        member's shard of the split part runs on all samples of the group, and its replica of the
        rest on its own share."""
        chunk, total = self.chunks[number], Times()
        axes = {**self.axes, BATCH: tile(sum(shares), shares)}
        device = self.job.cluster.devices[rank]
        for part, segment in enumerate(self._parts[number]):
            shared = segment.assignment is not None
            samples = sum(shares) if shared else shares[index]
            cut = [axes[axis] for axis in (*chunk.axes, BATCH)] if shared else []
            own: tuple[object, ...] = tuple((x[index][1] - x[index][0], x[-1][1]) for x in cut)
            operations: Sequence[str] = segment.operations
            if units:
                own = (*own, key_of_units(self.job, chunk, units))
                operations = operations_again(self.job, operations, units)
            total += self.job.findings.prices.times(
                (chunk.key, part, own), operations, device, samples,
                partial(part_of, segment.assignment, axes, index),
                partial(named_in_place, self.job, chunk),
            )  # fmt: skip
        return total

    def _under_products(
        self, chunk: StageChunk, ranks: Sequence[int], samples: int, shares: Sequence[int]
    ) -> Times:
        """Return the times, negative or 0, that a step saves because rows return from experts while
        all of `ranks` run products (overlap of communication with computation)."""
        job, hidden = self.job, Times()
        nodes = {job.cluster.node_of[rank] for rank in ranks}
        by_memory = job.cluster.shared_memory is not None and len(nodes) == 1
        # A transfer through shared memory occupies the processors that would run the products.
        if chunk.sharded is None or not chunk.expert_axes or by_memory:
            return hidden
        for rewrite in job.findings.once(
            ("overlapped", *named_key(job, chunk)),
            lambda: tuple(segment_of(job, chunk).scope(job.graph).overlapped_rows()),
        ):
            value, *under = rewrite.operations
            rows_s = rows_time_s(
                job.graph, value, job.training.precision, job.cluster, ranks, samples
            )
            runs = [
                job.findings.prices.times(
                    ("under", value), under, job.cluster.devices[rank], shares[index]
                )
                for index, rank in enumerate(ranks)
            ]
            back = min(run.backward_input + run.backward_weight for run in runs)
            hidden += Times(-min(rows_s, *(run.forward for run in runs)), -min(rows_s, back))
        return hidden

    def _attentions(
        self, chunk: StageChunk, ranks: Sequence[int], samples: int, link: Link
    ) -> Times:
        """Return the times of the exchanges inside attentions whose positions `ranks` divide, and
        of waits for the one with the most work."""
        total = Times()
        if chunk.shares_sequence and chunk.sharded is not None:
            group = group_of(self.job, ranks, samples, link)
            becomes = chunk.sharded.assignment.becomes
            for operation in attentions(self.job.graph, chunk.slice.operations):
                if operation.name in becomes:
                    total += group.times(operation, becomes[operation.name])
        return total

    def _casts(
        self,
        chunk: StageChunk,
        casts: Sequence[Cast],
        ranks: Sequence[int],
        samples: int,
        link: Link,
    ) -> Times:
        """Return the times of some of a shard group's collectives."""
        precision, members = self.job.training.precision, len(ranks)
        if not casts:
            return Times()
        graph = self.job.graph
        routes = [cast for cast in casts if cast.kind in ROUTES]
        between = [cast for cast in casts if cast.kind not in ROUTES]
        moved = cast_times(graph, between, precision, members, samples, link)
        if routes:
            moved += routing_times(graph, routes, precision, self.job.cluster, ranks, samples)
        return moved


def _parts(chunk: StageChunk) -> Sequence[Segment]:
    """Return the two segments of a chunk whose members divide the samples: the replicated rest, and
    the split part."""
    assert chunk.sharded is not None
    assert chunk.beside is not None
    operations, beside = chunk.slice.operations, chunk.beside
    return (
        Segment(0, tuple(x for x in operations if x not in beside), (), (), None),
        Segment(1, tuple(x for x in operations if x in beside), (), (), chunk.sharded.assignment),
    )
