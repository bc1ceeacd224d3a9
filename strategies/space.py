"""The strategies that `graph: auto` chooses from, each a file one could have written.

An arrangement says which devices do the same: copies of a pipeline, whose stages come in parts of
one kind of device each, every stage being copies of shard groups. A candidate is an arrangement
with all else a strategy says: micro-batches, schedule, ZeRO, offload. Owns what there is to choose
from; `auto.py` chooses.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations, product
from math import gcd, inf
from typing import Any

from whale_train.strategies.calibration import is_measured
from whale_train.strategies.cluster import Cluster
from whale_train.strategies.findings import Findings
from whale_train.strategies.staging import VIRTUAL_STAGES
from whale_train.strategies.training import Training

# Beyond so many micro-batches a stage, a pipeline's bubble is under a ninth of its step.
_MOST_PER_STAGE = 8


@dataclass(frozen=True, order=True)
class Part:
    """`stages` stages one after another, each of them `copies` of `shards` devices of one `kind`
    (empty: whichever come next)."""

    kind: str
    stages: int
    copies: int
    shards: int

    @property
    def width(self) -> int:
        return self.stages * self.copies * self.shards


@dataclass(frozen=True, order=True)
class Arrangement:
    """`copies` of a pipeline of `parts`, on the first `devices` of the inventory."""

    devices: int
    copies: int
    parts: tuple[Part, ...]

    @property
    def stages(self) -> int:
        return sum(part.stages for part in self.parts)

    @property
    def shards(self) -> int:
        """Devices of a shard group, which are as many in all parts."""
        return self.parts[0].shards

    @property
    def widest(self) -> int:
        """The most copies of a stage in one pipeline."""
        return max(part.copies for part in self.parts)

    @property
    def by_kind(self) -> bool:
        return bool(self.parts[0].kind)

    @property
    def family(self) -> str:
        """What candidates of it are compared as, as far as it says."""
        if self.stages == 1:
            return "split" if self.shards > 1 else "copies"
        kind = " by kind of device" if self.by_kind else ""
        return f"pipeline{' of splits' if self.shards > 1 else ''}{kind}"


@dataclass(frozen=True, order=True)
class Candidate:
    """A strategy. `micro_batches` 0: it is no pipeline, not even of one stage. `offload` is what
    is kept on the host: `none`, `optimizer`, or `all` (parameters too)."""

    arrangement: Arrangement
    micro_batches: int = 0
    schedule: str = "1f1b"
    zero: int = 0
    offload: str = "none"
    split_head: bool = False

    @property
    def family(self) -> str:
        """What it is compared as."""
        shape = self.arrangement
        if self.split_head:
            return "copies beside a split head"
        if shape.stages == 1 and shape.shards == 1 and self.zero:
            return f"copies, ZeRO {self.zero}" if self.offload == "none" else "copies, offload"
        return shape.family

    @property
    def described(self) -> str:
        """All of it, in words."""
        shape, words = self.arrangement, []
        for part in shape.parts:
            number = "1 stage" if part.stages == 1 else f"{part.stages} stages"
            each = [number] if shape.stages > 1 else []
            each += [f"{part.copies} copies"] if part.copies > 1 else []
            each += [f"splits of {part.shards}"] if part.shards > 1 else []
            on = f" on {part.kind}" if part.kind else ""
            words += [f"{' of '.join(each)}{on}"] if each else []
        copies = "1 copy" if shape.copies == 1 else f"{shape.copies} copies"
        words = [f"{shape.copies} x {' + '.join(words)}" if words else copies]
        words += ["split head"] if self.split_head else []
        if self.micro_batches:
            words.append(f"{self.micro_batches} micro-batches")
        words += [self.schedule] if shape.stages > 1 else []
        words += [f"ZeRO {self.zero}"] if self.zero else []
        words += [] if self.offload == "none" else ["offload"]
        return ", ".join(words)

    def graph(self) -> Any:
        """As a strategy file has it."""
        node: Any = {"replicate": self._keeping()}
        if self.split_head:
            node = [node, {"split": {"modules": "head"}}]
        elif self.micro_batches:
            node = {"replicate": {**self._keeping(), "of": self._pipeline()}}
        elif self.arrangement.shards > 1:
            split = {"split": {"degree": self.arrangement.shards}}
            node = {"replicate": {**self._keeping(), "of": split}}
        return node

    def _keeping(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if not self.split_head and (self.arrangement.shards > 1 or self.micro_batches):
            found["degree"] = self.arrangement.copies
        if self.zero:
            found["zero"] = self.zero
        if self.offload != "none":
            parameters = {"parameters": "cpu"} if self.offload == "all" else {}
            found["offload"] = {"optimizer": "cpu", **parameters}
        return found

    def _pipeline(self) -> dict[str, Any]:
        stages = []
        for part in self.arrangement.parts:
            stage: dict[str, Any] = {"recompute": "auto"}
            if part.kind:
                stage["device"] = part.kind
            split = {"split": {"degree": part.shards}} if part.shards > 1 else None
            if part.copies > 1:
                copies = {"degree": part.copies}
                stage["of"] = {"replicate": {**copies, "of": split} if split else copies}
            elif split:
                stage["of"] = split
            stages += [{"stage": stage}] * part.stages
        pipeline = {"micro_batches": self.micro_batches, "schedule": self.schedule}
        return {"pipeline": {**pipeline, "stages": stages}}


@dataclass(frozen=True, order=True)
class Opening:
    """The candidates of an arrangement that cut the model alike: those of interleaved stages
    (`rounds` 2), or all others. Unless it is `ordered`, its parts may come in any order."""

    arrangement: Arrangement
    rounds: int = 1
    ordered: bool = True

    @property
    def family(self) -> str:
        """What they are compared as, as far as it says."""
        return self.arrangement.family


@dataclass(frozen=True, order=True)
class Batched:
    """Those of an opening that cut its samples into as many micro-batches (0: none)."""

    arrangement: Arrangement
    micro_batches: int
    rounds: int = 1

    @property
    def family(self) -> str:
        """What its candidates are compared as, as far as it says."""
        return self.arrangement.family


@dataclass(frozen=True)
class Space:
    """All that may be chosen for a model of which `places` parts have parameters of their own, in
    steps of `global_batch` samples. `exported`: its graph is known, and so can be cut;
    `wide_splits`: shard groups may leave a node; `zero`: optimizers may be partitioned, and
    `offload`ed; `split_head`: it has an output projection to split; `sole_micro_batch`: a copy's
    samples may not be taken in pieces; `use_all`: no device may stay idle; `unlike` are the
    numbers of devices whose times cannot be compared with those of all."""

    cluster: Cluster
    places: int
    global_batch: int
    exported: bool = True
    wide_splits: bool = False
    zero: bool = True
    offload: bool = True
    split_head: bool = False
    sole_micro_batch: bool = False
    use_all: bool = False
    unlike: frozenset[int] = frozenset()

    @property
    def available(self) -> int:
        return len(self.cluster.devices)

    def arrangements(self) -> Iterator[Arrangement]:
        """Every arrangement once, the simplest first; parts of kinds of devices in one order."""
        found: dict[Arrangement, None] = {}
        for devices in self._numbers_of_devices():
            kinds = self._kinds(devices)
            found |= dict.fromkeys(self._alike(devices, kinds))
            if len(kinds) > 1 and self.exported:
                found |= dict.fromkeys(self._by_kind(devices, kinds))
        yield from found

    def openings(self) -> Iterator[Opening]:
        """Of every arrangement."""
        for shape in self.arrangements():
            ordered = not shape.by_kind
            yield Opening(shape, 1, ordered)
            if 1 < shape.stages <= self.places // VIRTUAL_STAGES and self.exported:
                yield Opening(shape, VIRTUAL_STAGES, ordered)

    def orders(self, opening: Opening) -> Iterator[Opening]:
        """Those of every order of its parts."""
        shape = opening.arrangement
        for parts in permutations(shape.parts):
            yield Opening(replace(shape, parts=parts), opening.rounds)

    def batched(self, opening: Opening) -> Iterator[Batched]:
        """The ways to cut the samples of one that is ordered."""
        shape = opening.arrangement
        if shape.stages == shape.widest == 1 and shape.copies <= self.global_batch:
            yield Batched(shape, 0)
        copied = shape.stages == shape.widest == shape.shards == 1
        for micro_batches in self._micro_batches(shape) if self.exported else ():
            # Copies of the model that take their samples at once are no pipeline, and run as it is.
            if not copied or micro_batches > 1:
                yield Batched(shape, micro_batches, opening.rounds)

    def candidates(self, batched: Batched) -> Iterator[Candidate]:
        """Every candidate of those."""
        shape, pieces = batched.arrangement, batched.micro_batches
        several = shape.copies * min(part.copies for part in shape.parts) > 1
        if not pieces:
            for zero, offload in self._keepings(several, 3):
                yield Candidate(shape, 0, "1f1b", zero, offload)
            if self.split_head and shape.shards == 1 and shape.copies > 1:
                for zero, offload in self._keepings(several, 3):
                    yield Candidate(shape, 0, "1f1b", zero, offload, split_head=True)
            return
        schedules = ["1f1b", "zero_bubble"] if shape.stages > 1 else ["1f1b"]
        if batched.rounds > 1:
            schedules = ["interleaved_1f1b"]
        for schedule, (zero, offload) in product(schedules, self._keepings(several, 1)):
            yield Candidate(shape, pieces, schedule, zero, offload)

    def _keepings(self, several: bool, highest: int) -> Iterator[tuple[int, str]]:
        """How copies may keep their optimizer's state: (ZeRO, offload)."""
        yield 0, "none"
        for zero in range(1, highest + 1) if several and self.zero else ():
            yield zero, "none"
            if self.offload:
                yield zero, "optimizer"
                if zero == 3:
                    yield zero, "all"

    def _micro_batches(self, arrangement: Arrangement) -> list[int]:
        """1, 2, 4, 8 ... and multiples of the widest stage's copies, as far as samples go."""
        widest = arrangement.widest
        most = min(
            self.global_batch // arrangement.copies,
            max(_MOST_PER_STAGE * arrangement.stages, 4 * widest),
            1 if self.sole_micro_batch else self.global_batch,
        )
        powers = [2**power for power in range(most.bit_length())]
        return sorted({n for p in powers for n in (p, p * widest) if widest <= n <= most})

    def _numbers_of_devices(self) -> list[int]:
        """All devices, all but the last kinds of them, and one, which waits for nobody; as many as
        there are samples, where these are fewer. Of processes that share processors, of which
        fewer have more each: as many as there are processors, and powers of two. Not those in
        `unlike`."""
        return sorted(self._worth_trying() - self.unlike, reverse=True)

    @property
    def left_out(self) -> Sequence[int]:
        """Numbers of devices that `unlike` alone keeps from being looked at."""
        return sorted(self._worth_trying() & self.unlike)

    def _worth_trying(self) -> set[int]:
        devices, processors = self.cluster.devices, self.cluster.processors
        if self.use_all:
            return {len(devices)}
        ends = [i + 1 for i, (a, b) in enumerate(pairwise(devices)) if a.name != b.name]
        found = {1, len(devices), *ends, self.global_batch}
        if processors < inf:
            found |= {int(processors), *(2**power for power in range(len(devices).bit_length()))}
        return {n for n in found if 0 < n <= len(devices)}

    def _kinds(self, devices: int) -> Mapping[str, int]:
        return Counter(device.name for device in self.cluster.devices[:devices])

    def _shard_numbers(self, devices: int) -> list[int]:
        """Of devices in a group: as many as divide every node's, so that groups stay in one; where
        they may be wider, whole nodes too."""
        sizes = [len(node.devices) for node in self.cluster.first(devices).nodes]
        common = gcd(*sizes)
        found = [n for n in range(1, common + 1) if common % n == 0]
        if self.wide_splits:
            found += [n for n in _divisors(devices) if n > common and n % common == 0]
        return found if self.exported else [1]

    def _alike(self, devices: int, kinds: Mapping[str, int]) -> Iterator[Arrangement]:
        """Copies that follow each other, each of one kind of device."""
        names = [device.name for device in self.cluster.devices[:devices]]
        runs = 1 + sum(a != b for a, b in pairwise(names))
        for shards in self._shard_numbers(devices):
            for stages in _divisors(devices // shards) if devices % shards == 0 else ():
                width = stages * shards
                mixed = width > 1 and len(kinds) > 1
                if mixed and (runs > len(kinds) or any(n % width for n in kinds.values())):
                    continue
                if stages > 1 and (stages > self.places or not self.exported):
                    continue
                copies = devices // width
                if copies <= self.global_batch:
                    yield Arrangement(devices, copies, (Part("", stages, 1, shards),))

    def _by_kind(self, devices: int, kinds: Mapping[str, int]) -> Iterator[Arrangement]:
        """Pipelines with stages on every kind of device."""
        for copies in _divisors(gcd(*kinds.values())):
            if copies > self.global_batch:
                continue
            for shards in self._shard_numbers(devices):
                parts = [
                    list(self._parts(kind, count // copies, shards, copies))
                    for kind, count in kinds.items()
                ]
                for chosen in product(*parts):
                    if sum(part.stages for part in chosen) > self.places:
                        continue
                    if gcd(*(part.copies for part in chosen)) > 1:
                        continue  # more copies of the whole do the same
                    yield Arrangement(devices, copies, chosen)

    def _parts(self, kind: str, devices: int, shards: int, copies: int) -> Iterator[Part]:
        """The ways for so many devices of a kind to be stages."""
        if devices % shards:
            return
        for stages in _divisors(devices // shards):
            each = devices // shards // stages
            if stages < self.places and each <= self.global_batch // copies:
                yield Part(kind, stages, each, shards)


def _divisors(number: int) -> Sequence[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def space_of(
    cluster: Cluster, findings: Findings, training: Training, can_offload: bool = True
) -> Space:
    """What there is to choose from."""
    profile = findings.profile
    exported = profile.graph is not None
    normed = bool(profile.batch_norm_modules) and training.sync_batchnorm
    measured = is_measured(cluster, training.precision)
    unlike = (
        number
        for number, each in cluster.fewer.items()
        if is_measured(each, training.precision) != measured
    )
    return Space(
        cluster,
        places=_stages_at_most(findings) if exported else 1,
        global_batch=training.global_batch,
        exported=exported and training.accumulate == 1,
        zero=training.optimizer != "lamb" and not profile.perhaps_unused,
        offload=can_offload,
        split_head=exported and bool(findings.heads),
        sole_micro_batch=normed,
        unlike=frozenset(unlike),
    )


def _stages_at_most(findings: Findings) -> int:
    """Into so many parts the model can be cut that each has a parameter to train."""
    return sum(before < after for before, after in pairwise(findings.order.weights))
