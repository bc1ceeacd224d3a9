"""Enumerate the candidates of a search: sets of devices, meshes, and all other settings of a
strategy.

Devices are chosen by kind, and devices of a kind are interchangeable: neither the choice nor the
order depends on the inventory's order. Owns the choices that exist, and the reasons why others do
not; `search.py` chooses.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations, product
from math import gcd, inf, prod

from whale_train.errors import Fault
from whale_train.strategies.estimate.candidates import Candidate, Mesh, Part
from whale_train.strategies.hardware.calibration import is_measured
from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.shared_batch import refuse_shared_batch
from whale_train.strategies.stages.analysis import ModelAnalysis
from whale_train.strategies.stages.placement import VIRTUAL_STAGES

Devices = tuple[tuple[str, int], ...]  # kinds of devices, and the number of each

# With more micro-batches for each stage, a pipeline's bubble is under a ninth of its step.
_MOST_PER_STAGE = 8
_FEW = 8  # limit on shard groups that form stages of unequal widths
_SETS = 64  # limit on sets of devices for which every number of each kind is tried
_COMBINED = 8  # limit on kinds of devices that are combined in every way


@dataclass(frozen=True)
class Space:
    """All choices of a search for one model.

    cluster: the cluster whose devices are used.
    devices: the kinds of devices that may be used, and the number of each.
    places: number of parts of the model that have parameters of their own.
    global_batch: samples of a step.
    exported: True if the model can be cut: its graph is known, and train.accumulate is 1.
    shared: True if replicas, and micro-batches, may divide a batch.
    zero: True if optimizers may be partitioned.
    offload: True if optimizers may be offloaded.
    split_head: True if the model has an output projection to split.
    experts: most devices that the experts of a mixture may be spread over (0: no experts).
    sole_micro_batch: True if a replica must take its samples in one micro-batch.
    splits: True if parameters may be split.
    use_all: True if no device may stay idle.
    wide_splits: True if shard groups may span nodes.
    unlike: numbers of CPU processes whose times cannot be compared with those of all processes.
    """

    cluster: Cluster
    devices: Devices
    places: int
    global_batch: int
    exported: bool = True
    shared: bool = True
    zero: bool = True
    offload: bool = True
    split_head: bool = False
    experts: int = 0
    sole_micro_batch: bool = False
    splits: bool = True
    use_all: bool = False
    wide_splits: bool = False
    unlike: frozenset[int] = frozenset()

    @property
    def available(self) -> int:
        """Return the number of devices that may be used."""
        return sum(count for _, count in self.devices)

    # --- Devices ---

    def sets(self) -> Sequence[Devices]:
        """Return the sets of devices to try, the largest first.

        For few devices, these are all sets. For many devices, they are the sets with all devices of
        some kinds, and those with a power of two of one kind. For CPU processes, they are one set
        for each number of processes to try.
        """
        if self.use_all:
            return [self.devices]
        if self.cluster.processors < inf:
            return [((self.devices[0][0], count),) for count in self.numbers_of_processes()]
        if prod(count + 1 for _, count in self.devices) <= _SETS:
            numbers = product(*(range(count + 1) for _, count in self.devices))
            device_sets = {self._set(counts) for counts in numbers if any(counts)}
        else:
            device_sets = set(self._of_whole_kinds())
            device_sets |= {
                ((kind, 1 << power),)
                for kind, count in self.devices
                for power in range(count.bit_length())
            }
        return sorted(device_sets, key=lambda used: (-sum(count for _, count in used), used))

    def _of_whole_kinds(self) -> Iterator[Devices]:
        """Yield the sets that have all devices of some kinds.

        Up to `_COMBINED` kinds are combined in every way. With more kinds, each kind is a set
        alone, and so are the fastest n kinds for every n.
        """
        kinds = len(self.devices)
        if kinds <= _COMBINED:
            for size in range(1, kinds + 1):
                yield from combinations(self.devices, size)
            return
        speeds = {device.name: max(device.flops.values()) for device in self.cluster.devices}
        fastest = sorted(self.devices, key=lambda kind_count: -speeds[kind_count[0]])
        for number, kind_count in enumerate(fastest):
            yield (kind_count,)
            yield tuple(sorted(fastest[: number + 1]))

    def _set(self, numbers: Sequence[int]) -> Devices:
        """Return the set of devices with these numbers of each kind. Kinds with none are left
        out."""
        pairs = zip(self.devices, numbers, strict=True)
        return tuple((kind, number) for (kind, _), number in pairs if number)

    def numbers_of_processes(self) -> Sequence[int]:
        """Return the numbers of CPU processes to try, the largest first.

        With fewer processes, each has more processors. Numbers whose times cannot be compared with
        those of all processes are left out.
        """
        return sorted(self._worth_trying() - self.unlike, reverse=True)

    def not_comparable(self) -> Sequence[int]:
        """Return the numbers of CPU processes that are left out because their times cannot be
        compared: they were measured and all processes together were not, or the other way round."""
        return sorted(self._worth_trying() & self.unlike)

    def _worth_trying(self) -> set[int]:
        """Return the numbers of CPU processes that may be fast; an empty set for other devices and
        for `use_all`."""
        if self.use_all or self.cluster.processors == inf:
            return set()
        count = self.available
        numbers = {1, count, self.global_batch, int(self.cluster.processors)}
        numbers |= {2**power for power in range(count.bit_length())}
        return {number for number in numbers if 0 < number <= count}

    # --- Meshes ---

    def meshes(self, devices: Devices, cluster: Cluster) -> Iterator[Mesh]:
        """Yield the meshes on `devices`, which are all devices of `cluster`. Meshes whose stages
        name kinds of devices come with their parts in one order."""
        yield from dict.fromkeys(self._alike(devices, cluster))
        if len(devices) == 1 and self.exported:
            yield from dict.fromkeys(self._of_copied_stages(devices, cluster))
        if len(devices) > 1 and self.exported:
            yield from dict.fromkeys(self._by_kind(devices, cluster))

    def orders(self, mesh: Mesh) -> Iterator[Mesh]:
        """Yield the mesh with its parts in every order."""
        for parts in permutations(mesh.parts) if mesh.by_kind else [mesh.parts]:
            yield Mesh(mesh.devices, mesh.copies, parts)

    def _shard_numbers(self, cluster: Cluster) -> Sequence[int]:
        """Return the sizes of shard groups to try.

        Each size divides every node's number of devices of a kind, so that groups stay inside
        nodes. With `wide_splits`, multiples of the largest such size that divide all devices are
        added.
        """
        if not (self.exported and self.splits):
            return [1]
        sizes = {
            sum(device.name == kind for device in node.devices)
            for node in cluster.nodes
            for kind in {device.name for device in node.devices}
        }
        common, count = gcd(*sizes), len(cluster.devices)
        group_sizes = divisors(common)
        if self.wide_splits:
            group_sizes = [
                *group_sizes,
                *(n for n in divisors(count) if n > common and n % common == 0),
            ]
        return group_sizes

    def _alike(self, devices: Devices, cluster: Cluster) -> Iterator[Mesh]:
        """Yield meshes of consecutive replicas, each on one kind of device."""
        names = [device.name for device in cluster.devices]
        runs = 1 + sum(a != b for a, b in pairwise(names))
        count = len(names)
        for shards in self._shard_numbers(cluster):
            for stages in divisors(count // shards) if count % shards == 0 else ():
                width = stages * shards
                mixed = width > 1 and len(devices) > 1
                if mixed and (runs > len(devices) or any(n % width for _, n in devices)):
                    continue
                if stages > 1 and (stages > self.places or not self.exported):
                    continue
                copies = count // width
                if copies <= self.global_batch and (self.shared or copies == 1):
                    yield Mesh(devices, copies, (Part("", stages, 1, shards),))

    def _of_copied_stages(self, devices: Devices, cluster: Cluster) -> Iterator[Mesh]:
        """Yield meshes of pipelines with several copies of a stage, on the next devices of any
        kind."""
        count = len(cluster.devices)
        for copies, shards in product(divisors(count), self._shard_numbers(cluster)):
            groups, left = divmod(count // copies, shards)
            most = self.global_batch // copies
            if left or not most or not (self.shared or copies == 1):
                continue
            for parts in self._copied_stages(groups, shards):
                of_all = sum(part.stages for part in parts)
                if of_all <= self.places and max(part.copies for part in parts) <= most:
                    yield Mesh(devices, copies, parts)

    def _copied_stages(self, groups: int, shards: int) -> Iterator[tuple[Part, ...]]:
        """Yield the ways in which `groups` shard groups form stages of which some have copies.

        All stages have equally many copies or, for at most `_FEW` groups, the first stages have one
        number of copies and the others another.
        """
        for stages in divisors(groups)[1:-1]:
            yield (Part("", stages, groups // stages, shards),)
        for first in range(1, groups if groups <= _FEW else 1):
            for before, after in product(divisors(first), divisors(groups - first)):
                parts = (
                    Part("", before, first // before, shards),
                    Part("", after, (groups - first) // after, shards),
                )
                if parts[0].copies != parts[1].copies:
                    yield parts

    def _by_kind(self, devices: Devices, cluster: Cluster) -> Iterator[Mesh]:
        """Yield meshes of pipelines with stages on every kind of device."""
        for copies in divisors(gcd(*(count for _, count in devices))):
            if copies > self.global_batch or not (self.shared or copies == 1):
                continue
            for shards in self._shard_numbers(cluster):
                parts = [
                    list(self._parts(kind, count // copies, shards, copies))
                    for kind, count in devices
                ]
                for chosen in product(*parts):
                    if sum(part.stages for part in chosen) > self.places:
                        continue
                    yield Mesh(devices, copies, chosen)

    def _parts(self, kind: str, count: int, shards: int, copies: int) -> Iterator[Part]:
        """Yield the parts that `count` devices of a kind can form in each of `copies` pipelines."""
        if count % shards:
            return
        for stages in divisors(count // shards):
            stage_copies = count // shards // stages
            if stages < self.places and stage_copies <= self.global_batch // copies:
                yield Part(kind, stages, stage_copies, shards)

    # --- Other settings of a strategy ---

    def numbers_of_micro_batches(self, mesh: Mesh) -> Sequence[int]:
        """Return the numbers of micro-batches to try for the samples of a replica (0: no pipeline).

        They are powers of two, and these times the copies of the widest stage. None exceeds the
        samples of a replica, or `_MOST_PER_STAGE` for each stage (or 4 for each copy of the widest
        stage, if that is more). None exceeds 1 where a batch must not be divided.
        """
        widest, numbers = mesh.widest, list[int]()
        if mesh.stages == widest == 1:
            numbers.append(0)
        if not self.exported:
            return numbers
        most = min(
            self.global_batch // mesh.copies,
            max(_MOST_PER_STAGE * mesh.stages, 4 * widest),
            1 if self.sole_micro_batch or not self.shared else self.global_batch,
        )
        powers = [2**power for power in range(most.bit_length())]
        several = sorted({n for p in powers for n in (p, p * widest) if widest <= n <= most})
        # Replicas that take all samples at once need no pipeline: the module runs as it is.
        is_unpipelined = mesh.stages == widest == 1
        return [*numbers, *(n for n in several if n > 1 or not is_unpipelined)]

    def dims(self, mesh: Mesh) -> Sequence[str]:
        """Return the values of `dim` to try for the splits of a mesh."""
        return ("auto", "sequence") if mesh.shards > 1 else ("auto",)

    def variants(self, mesh: Mesh, micro_batches: int, dim: str) -> Iterator[Candidate]:
        """Yield the candidates with one mesh, number of micro-batches and `dim`. They differ in
        schedule, ZeRO stage and offload and, without micro-batches, in a split head or spread
        experts."""
        several = mesh.copies * min(part.copies for part in mesh.parts) > 1
        if not micro_batches:
            for zero, offload in self.keepings(several, 3):
                yield Candidate(mesh, 0, "1f1b", zero, offload, dim=dim)
                if self.exported:
                    yield Candidate(mesh, 0, "1f1b", zero, offload, dim=dim, recompute=True)
            if self.split_head and mesh.shards == 1 and mesh.copies > 1:
                for zero, offload in self.keepings(several, 3):
                    yield Candidate(mesh, 0, "1f1b", zero, offload, split_head=True)
            for size in self._expert_groups(mesh):
                for zero, offload in self.keepings(several, 3):
                    yield Candidate(mesh, 0, "1f1b", zero, offload, experts=size)
            return
        schedules = ["1f1b", "zero_bubble"] if mesh.stages > 1 else ["1f1b"]
        if 1 < mesh.stages <= self.places // VIRTUAL_STAGES:
            schedules.append("interleaved_1f1b")
        for schedule, (zero, offload) in product(schedules, self.keepings(several, 1)):
            yield Candidate(mesh, micro_batches, schedule, zero, offload, dim=dim)

    def _expert_groups(self, mesh: Mesh) -> Sequence[int]:
        """Return the numbers of devices to spread experts over, each a divisor of the mesh's
        replicas."""
        if not self.experts or mesh.shards > 1 or mesh.copies == 1:
            return ()
        return [n for n in divisors(mesh.copies) if 1 < n <= self.experts]

    def keeps(self, candidate: Candidate) -> bool:
        """Return True if the optimizer allows the partitions, splits and offload of `candidate`."""
        split = candidate.mesh.shards > 1 or candidate.split_head or candidate.experts > 0
        return (
            (self.zero or not candidate.zero)
            and (self.offload or candidate.offload == "none")
            and (self.splits or not split)
        )

    def keepings(self, several: bool, highest: int) -> Iterator[tuple[int, str]]:
        """Yield the pairs (ZeRO stage, offload) that replicas may use. ZeRO stages go up to
        `highest`, and are 0 unless there are `several` replicas to partition over."""
        yield 0, "none"
        for zero in range(1, highest + 1) if several and self.zero else ():
            yield zero, "none"
            if self.offload:
                yield zero, "optimizer"
                if zero == 3:
                    yield zero, "all"


def divisors(number: int) -> Sequence[int]:
    """Return the divisors of a number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def space_of(
    cluster: Cluster,
    devices: Devices,
    findings: ModelAnalysis,
    training: Training,
    can_offload: bool = True,
    use_all: bool = False,
) -> Space:
    """Return the space of candidates for a model on `devices` of `cluster`."""
    profile = findings.profile
    exported = profile.graph is not None
    normed = bool(profile.batch_norm_modules) and training.sync_batchnorm
    exchanges = bool(findings.samples.sums) and not training.samples_are_independent
    unsplittable = training.unlike_in_parts
    splits = exported and unsplittable is None
    refused: list[Fault] = []
    refuse_shared_batch(findings, training, 1, refused)
    measured = is_measured(cluster, training.precision)
    unlike = frozenset(
        number
        for number, fewer in cluster.fewer.items()
        if is_measured(fewer, training.precision) != measured
    )
    return Space(
        cluster,
        devices,
        places=_stages_at_most(findings) if exported else 1,
        global_batch=training.global_batch,
        exported=exported and training.accumulate == 1,
        shared=not refused,
        zero=not training.needs_norms and unsplittable is None and not profile.perhaps_unused,
        offload=can_offload and not training.optimizers,
        split_head=splits and bool(findings.heads),
        experts=min(findings.experts.sharded.axes.values()) if splits and findings.experts else 0,
        sole_micro_batch=normed or exchanges,
        splits=unsplittable is None,
        use_all=use_all,
        unlike=unlike,
    )


def left_out(space: Space, findings: ModelAnalysis, training: Training) -> Mapping[str, str]:
    """Return the families of which `space` has no candidate on any devices, with the reason for
    which the resolver would refuse each."""
    profile, reasons = findings.profile, dict[str, str]()
    pipelines = ["pipeline", "split", "split by sequence", "pipeline of splits"]
    if len(space.devices) > 1:
        pipelines.append("pipeline by kind of device")
    several = space.available > 1
    if profile.graph is None and several:
        reason = f"needs the model's graph, and {profile.name} cannot be exported"
        reasons |= dict.fromkeys([*pipelines, "copies beside a split head"], reason)
    elif not space.exported and several:
        reason = f"not looked at: train.accumulate={training.accumulate} cuts the batch of copies, "
        reason += "and the micro-batches of these are their own; use train.accumulate=1"
        reasons |= dict.fromkeys(pipelines, reason)
    unlike = training.unlike_in_parts
    if unlike is not None and several:
        reason = f"{unlike.key}={unlike.target} needs whole parameters: {unlike.unlike_in_parts}"
        split = ("split", "split by sequence", "pipeline of splits", "copies beside a split head")
        reasons = {**dict.fromkeys(split, reason), **reasons}
        reasons |= {f"copies, ZeRO {zero}": reason for zero in (1, 2, 3)}
    elif not space.zero and several:
        reason = (
            f"optimizer={training.optimizer} needs the norm of each parameter, which ZeRO "
            "partitions anywhere"
            if training.needs_norms
            else f"whether {profile.perhaps_unused[0]} gets a gradient is another thing in every "
            f"call of {profile.name}, and ZeRO needs to know"
        )
        reasons |= {f"copies, ZeRO {zero}": reason for zero in (1, 2, 3)}
    return reasons


def _stages_at_most(findings: ModelAnalysis) -> int:
    """Return the largest number of stages that each have a parameter to train."""
    return sum(before < after for before, after in pairwise(findings.order.weights))
