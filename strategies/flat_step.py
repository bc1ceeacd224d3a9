"""The step of a flat strategy: copies of the whole model, perhaps beside a split head.

Ranks of equal devices and equal shares do the same at the same time: one stands for all of them.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil

from whale_train.strategies.batch_norm_sums import batch_norm_times
from whale_train.strategies.cast_times import bridge_time_s
from whale_train.strategies.cluster import Cluster
from whale_train.strategies.cost import (
    Times,
    accumulation_time_s,
    fetch_time_s,
    offloaded_update_time_s,
    update_time_s,
    whole_times,
)
from whale_train.strategies.cut import CLASSES
from whale_train.strategies.findings import Findings
from whale_train.strategies.grammar import Replicate
from whale_train.strategies.graph import StrategyGraph
from whale_train.strategies.instructions import Instruction, Kind
from whale_train.strategies.layouts import BATCH
from whale_train.strategies.links import (
    all_reduce_time_s,
    gather_stops_s,
    gather_time_s,
    group_link,
    modules_of,
    partitioned_sum_time_s,
    sum_time_s,
)
from whale_train.strategies.pricing import part_of
from whale_train.strategies.shares import even_shares, tile
from whale_train.strategies.sharing import Training
from whale_train.strategies.step_tasks import Actor, Cost, Step, Sync, costs, sum_pieces


class FlatStep:
    """A flat strategy on `cluster`; `samples` and `classes` are what each rank takes of the global
    batch and of a split head."""

    def __init__(
        self,
        graph: StrategyGraph,
        cluster: Cluster,
        findings: Findings,
        training: Training,
        samples: Sequence[int],
        classes: Sequence[int],
    ) -> None:
        self.graph, self.cluster, self.training = graph, cluster, training
        self.profile = findings.profile
        self.samples, self.classes = samples, classes
        body = graph.task_graphs[0].node
        assert isinstance(body, Replicate)
        self.body = body
        self.count = len(samples)
        self.link = group_link(cluster, range(self.count))
        self.elements = self._elements(0)
        self.prices = findings.prices if findings.profile.graph else None
        self.findings = findings
        self.weights_bytes = findings.weight_width(body.zero)

    def step(self) -> tuple[Step, Mapping[int, int]]:
        """The step of the ranks that stand for all, and who stands for each. Ranks that share
        processors stand for themselves."""
        first: dict[tuple[int, int, int, int], int] = {}
        stands = {}
        for rank in range(self.count):
            device = self.cluster.devices[rank]
            classes = self.classes[rank] if self.classes else 0
            itself = rank if self.count > self.cluster.processors else 0
            alike = (id(device), self.samples[rank], classes, itself)
            stands[rank] = first.setdefault(alike, rank)
        actors = [self._actor(rank) for rank in first.values()]
        return Step(actors, self._syncs(len(actors)), self._norm_s()), stands

    def _actor(self, rank: int) -> Actor:
        table, instructions = {}, []
        norms, gathers, bridges = self._norms(), self._gathers_s(), self._bridges_s()
        for number, size in enumerate(self._sizes(rank)):
            times = self._times(rank, size)
            backward = times.backward_input + times.backward_weight
            if number:
                backward += self._accumulation_s(rank)
            for kind, seconds, summed, gathered in (
                (Kind.FORWARD, times.forward, norms.forward, gathers[0]),
                (Kind.BACKWARD, backward, norms.backward_input, gathers[1]),
            ):
                moved = bridges + summed + gathered
                table[kind, 0, number] = Cost(seconds + moved, moved)
                instructions.append(Instruction(kind, 0, number))
        return Actor((rank,), 0, instructions, costs(table), self._update_s(rank))

    def _accumulation_s(self, rank: int) -> float:
        parameters = len(self.graph.task_graphs[0].parameters)
        device, precision = self.cluster.devices[rank], self.training.precision
        return accumulation_time_s(self.elements, parameters, device, precision)

    def _sizes(self, rank: int) -> Sequence[int]:
        pieces, share = self.training.accumulate, self.samples[rank]
        sizes = even_shares(share, pieces, [share] * pieces)
        assert sizes is not None
        return sizes

    def _times(self, rank: int, size: int) -> Times:
        """Of one micro-batch of `size` samples of its own."""
        device, precision = self.cluster.devices[rank], self.training.precision
        if self.prices is None:
            return whole_times(self.profile.forward_flops * size, device, precision)
        if self.graph.cut is None:
            return self.prices.times("the whole", self.prices.graph.by_name, device, size)
        total = Times()
        axes = {
            BATCH: tile(sum(self.samples), self.samples),
            CLASSES: tile(sum(self.classes), self.classes),
        }
        for number, segment in enumerate(self.graph.cut.segments):
            if segment.task_graph == 0:
                found = self.prices.times(("flat", number), segment.operations, device, size)
            else:
                assert segment.assignment is not None
                key = ("flat", number, self.classes[rank], self.samples[rank])
                whole = self.training.global_batch / self.training.accumulate
                found = self.prices.times(
                    key, segment.operations, device, whole,
                    partial(part_of, segment.assignment, axes, rank),
                )  # fmt: skip
            total += found
        return total

    def _gathers_s(self) -> tuple[float, float]:
        """ZeRO 3's parameters, for a forward and for a backward."""
        if self.body.zero < 3:
            return 0.0, 0.0
        num_bytes = self.weights_bytes * self.elements
        sent = gather_time_s(num_bytes, self.count, self.link)
        if self.body.offload_parameters == "cpu":
            devices = self.cluster.devices
            sent += fetch_time_s(num_bytes / self.count, devices, self.cluster.on_cpu)
        modules = len(modules_of(self.graph.task_graphs[0].parameters))
        forward, backward = gather_stops_s(
            self.elements, modules, self.cluster.devices, self.training.precision
        )
        return sent + forward, sent + backward

    def _norms(self) -> Times:
        """The collectives of BatchNorm over the copies. Those of a model whose operations nobody
        knows are left out."""
        graph = self.profile.graph
        if graph is None or not self.training.sync_batchnorm:
            return Times()
        return batch_norm_times(graph, graph.by_name, self.count, self.link)

    def _bridges_s(self) -> float:
        """What crosses to a split head and back, for a forward or a backward."""
        cut = self.graph.cut
        if cut is None:
            return 0.0
        batch = ceil(self.training.global_batch / self.training.accumulate)
        view = self.findings.view
        link = group_link(self.cluster, range(self.count), by_memory=True)
        taken = (name for segment in cut.segments for name in segment.takes)
        return bridge_time_s(view, taken, batch, self.count, link)

    def _syncs(self, actors: int) -> list[Sync]:
        if self.count == 1:
            return []
        num_bytes = 4.0 * self.elements
        zero, link = self.body.zero, self.link
        members = tuple(range(actors))
        pieces = sum_pieces(self.elements)
        if zero == 0:
            ranks = range(self.count)
            seconds = sum_time_s(self.cluster, ranks, num_bytes, by_memory=True)
            busy = group_link(self.cluster, ranks, by_memory=True).busy
            return [Sync(members, seconds, pieces, True, busy)]
        if zero == 3:
            seconds = gather_time_s(num_bytes, self.count, link)
            return [Sync(members, seconds, 1, False, link.busy)]
        seconds = partitioned_sum_time_s(
            self.elements,
            sum_time_s(self.cluster, range(self.count), num_bytes),
            self.cluster.devices,
            self.training.precision,
        )
        gathers = gather_time_s(self.weights_bytes * self.elements, self.count, link)
        return [Sync(members, seconds, 1, False, link.busy, gathers)]

    def _norm_s(self) -> float:
        return all_reduce_time_s(4.0, self.count, self.link)

    def _update_s(self, rank: int) -> float:
        held = self.elements / self.count if self.body.zero else self.elements
        device, states = self.cluster.devices[rank], self.training.optimizer_states
        if self.body.offload_optimizer == "cpu":
            seconds = offloaded_update_time_s(held, states, device, self.cluster.on_cpu)
        else:
            seconds = update_time_s(held, states, device)
        if self.classes and self.graph.head:
            part = self.classes[rank] / self.graph.head.classes
            seconds += update_time_s(part * self._elements(1), states, device)
        return seconds

    def _elements(self, number: int) -> float:
        paths = self.graph.task_graphs[number].parameters
        return sum(self.profile.parameter_by_path[path].elements for path in paths)
