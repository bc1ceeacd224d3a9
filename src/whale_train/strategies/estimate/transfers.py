"""Estimate the transfers between the devices of a mesh, from the placement of its groups and
stages.

Devices of a kind are consecutive, replica by replica and stage by stage, so the nodes' sizes tell
which of them share a node. Owns these estimates of links; the resolver's are exact.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import lcm

from whale_train.strategies.cost.collectives import all_reduce_time_s, group_link, nic_contention
from whale_train.strategies.estimate.candidates import Mesh, Part
from whale_train.strategies.estimate.stage_dp import StageLink
from whale_train.strategies.hardware.cluster import Cluster, Device, Link
from whale_train.strategies.stages.placement import place_ranks


@dataclass(frozen=True)
class Group:
    """Ranks that hold the same shard of a stage.

    members: number of these ranks.
    in_node: members on each node that has any.
    beside: number of such groups that leave a node at the same time.
    """

    members: int
    in_node: int
    beside: int

    @property
    def nodes(self) -> int:
        """Return the number of nodes that have members."""
        return -(-self.members // self.in_node)


@dataclass(frozen=True)
class Transfers:
    """Transfers between the devices of `cluster`."""

    cluster: Cluster
    _shard_links: dict[tuple[str, int], Link] = field(default_factory=dict)
    _hops: dict[Mesh, Sequence[StageLink]] = field(default_factory=dict)

    @cached_property
    def device_of(self) -> Mapping[str, Device]:
        """Return the first device of every kind; the empty name stands for the first of all."""
        devices = {"": self.cluster.devices[0]}
        for device in self.cluster.devices:
            devices.setdefault(device.name, device)
        return devices

    @cached_property
    def _first(self) -> Mapping[str, int]:
        """Return the first rank of every kind; the empty name stands for rank 0."""
        first_ranks = {"": 0}
        for rank, device in enumerate(self.cluster.devices):
            first_ranks.setdefault(device.name, rank)
        return first_ranks

    @cached_property
    def _node_sizes(self) -> Mapping[str, int]:
        """Return the largest number of devices of each kind on any node; the empty name stands for
        all kinds."""
        sizes: dict[str, int] = {"": max(len(node.devices) for node in self.cluster.nodes)}
        for node in self.cluster.nodes:
            for kind in {device.name for device in node.devices}:
                count = sum(device.name == kind for device in node.devices)
                sizes[kind] = max(sizes.get(kind, 0), count)
        return sizes

    @cached_property
    def inside(self) -> Mapping[str, Link]:
        """Return the slowest link inside the nodes that have a kind; the empty name stands for all
        nodes."""
        links: dict[str, Link] = {}
        for node in self.cluster.nodes:
            for kind in {"", *(device.name for device in node.devices)}:
                other = links.get(kind, node.link)
                slower = node.link.bandwidth_bytes_s < other.bandwidth_bytes_s
                links[kind] = node.link if slower else other
        return links

    def shard_link(self, kind: str, shards: int) -> Link:
        """Return the link of a shard group of `shards` devices of a kind (empty: the first
        devices)."""
        if (kind, shards) not in self._shard_links:
            first = self._first[kind]
            ranks = range(first, min(first + shards, len(self.cluster.devices)))
            self._shard_links[kind, shards] = group_link(self.cluster, ranks, by_memory=True)
        return self._shard_links[kind, shards]

    def hop(self, mesh: Mesh, here: Part, there: Part) -> StageLink:
        """Return the mean cost of a send from a stage of `here` to one of `there`."""
        size = self._node_sizes[here.kind]
        memory = self.cluster.shared_memory
        inside = self.inside[here.kind] if memory is None else memory
        if len(self.cluster.nodes) == 1:
            return StageLink(inside.latency_s, 1 / inside.bandwidth_bytes_s)
        if here == there:
            width, between = here.width, here.copies * here.shards
            crossing = 0.0 if size % width == 0 else min(1.0, between / size)
            crowd = 2 * here.shards
        else:
            crossing = 1.0
            crowd = here.shards * max(1, size // here.width) * (2 if len(mesh.parts) > 2 else 1)
        network = self.cluster.network
        outside = crowd / network.bandwidth_bytes_s
        return StageLink(
            crossing * network.latency_s + (1 - crossing) * inside.latency_s,
            crossing * outside + (1 - crossing) / inside.bandwidth_bytes_s,
        )

    def hops(self, mesh: Mesh) -> Sequence[StageLink]:
        """Return the cost of a send between neighbouring stages of a mesh, for each neighbouring
        pair.

        The costs are computed from the exact placement of ranks, since stages with copies on
        devices of any kind may lie anywhere.
        """
        if mesh not in self._hops:
            self._hops[mesh] = [*self._by_seats(mesh)]
        return self._hops[mesh]

    def _by_seats(self, mesh: Mesh) -> Iterator[StageLink]:
        """Yield the cost of a send for each pair of neighbouring stages, over the slowest link
        between them."""
        parts = [part for part in mesh.parts for _ in range(part.stages)]
        stages = [(part.kind or None, part.copies, part.shards) for part in parts]
        seated = place_ranks(stages, mesh.copies, self.cluster.devices)
        crowd = nic_contention(self.cluster, seated.edges())
        for number, (here, there) in enumerate(pairwise(parts)):
            senders, receivers = seated.of_stage(number), seated.of_stage(number + 1)
            pairs = {
                (positions[senders[turn % here.copies]][0],
                 positions[receivers[turn % there.copies]][0])
                for positions in seated.positions
                for turn in range(lcm(here.copies, there.copies))
            }  # fmt: skip
            links = (group_link(self.cluster, pair, crowd, by_memory=True) for pair in pairs)
            slowest = min(links, key=lambda link: link.bandwidth_bytes_s)
            yield StageLink(slowest.latency_s, 1 / slowest.bandwidth_bytes_s)

    def group(self, copies: int, part: Part) -> Group:
        """Return the ranks that hold one shard of a stage of `part`, in all `copies` of the
        pipeline."""
        members, size = copies * part.copies, self._node_sizes[part.kind]
        if self.cluster.on_cpu:
            return Group(members, members, 1)
        copies_in_node = max(1, size // part.width)
        in_node = min(members, part.copies * copies_in_node, max(1, size // part.shards))
        return Group(members, in_node, max(1, size // in_node) if in_node < members else 1)

    def link(self, group: Group, part: Part) -> Link:
        """Return the bottleneck link of a ring over a group."""
        if group.in_node >= group.members and (group.members <= self._node_sizes[part.kind]):
            return self.inside[part.kind]
        network = self.cluster.network
        shared = replace(network, bandwidth_bytes_s=network.bandwidth_bytes_s / group.beside)
        inside = self.inside[part.kind]
        return min(shared, inside, key=lambda link: link.bandwidth_bytes_s)

    def sum_s(self, group: Group, part: Part, num_bytes: float) -> float:
        """Return the seconds of an all-reduce of `num_bytes` over a group (see
        `collectives.sum_time_s`)."""
        link = self.link(group, part)
        flat = all_reduce_time_s(num_bytes, group.members, link)
        if group.nodes == 1 or self.cluster.on_cpu:
            return flat
        within = all_reduce_time_s(num_bytes, group.in_node, self.inside[part.kind])
        return min(flat, max(within, all_reduce_time_s(num_bytes, group.nodes, link)))
