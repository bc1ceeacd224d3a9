"""Describe the strategies that a search compares. Each can be written as a strategy file.

A mesh divides devices among replicas of a pipeline, whose stages come in parts, each on one kind of
device. A candidate is a mesh and all other settings of a strategy. Owns what a candidate is, how it
is written and what it is called; `space.py` owns which candidates exist.
"""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, order=True)
class Part:
    """Consecutive equal stages of a pipeline.

    kind: kind of the devices (empty: the next ones, of any kind).
    stages: number of stages.
    copies: copies of each stage in one pipeline.
    shards: devices of one copy of a stage, its shard group.
    beside: modules that are split over the shard group while it replicates all else (empty: all
        modules are split).
    """

    kind: str
    stages: int
    copies: int
    shards: int
    beside: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Return the number of devices of the part in one replica of the pipeline."""
        return self.stages * self.copies * self.shards


@dataclass(frozen=True, order=True)
class Mesh:
    """Replicas of a pipeline on a set of devices.

    devices: kinds of devices, and the number of each.
    copies: replicas of the pipeline.
    parts: the stages of the pipeline, part by part.
    """

    devices: tuple[tuple[str, int], ...]
    copies: int
    parts: tuple[Part, ...]

    @property
    def count(self) -> int:
        """Return the number of devices used."""
        return sum(count for _, count in self.devices)

    @property
    def stages(self) -> int:
        """Return the number of stages of one pipeline."""
        return sum(part.stages for part in self.parts)

    @property
    def shards(self) -> int:
        """Return the number of devices of the largest shard group. Estimates are of meshes whose
        shard groups are all as large."""
        return max(part.shards for part in self.parts)

    @property
    def widest(self) -> int:
        """Return the largest number of copies of any stage in one pipeline."""
        return max(part.copies for part in self.parts)

    @property
    def by_kind(self) -> bool:
        """Return True if stages name the kind of device that holds them."""
        return bool(self.parts[0].kind)


@dataclass(frozen=True, order=True)
class Candidate:
    """A strategy that a search compares with others.

    mesh: devices, replicas and stages.
    micro_batches: micro-batches of a replica's samples (0: no pipeline, not even one of one stage).
    schedule: pipeline schedule.
    zero: ZeRO stage of the replicas.
    offload: state on the host: `none`, `optimizer`, or `all` (parameters too).
    split_head: True if the head is split over the devices of all replicas.
    dim: dimension that splits divide, as in a strategy file.
    experts: devices that the experts of a mixture are spread over, while the rest is replicated (0:
        there are no experts, or every replica holds all).
    patterns: pairs (glob of weights, pattern) of splits, given by hand.
    recompute: True if replicas without a pipeline may recompute blocks. Stages of pipelines may.
    """

    mesh: Mesh
    micro_batches: int = 0
    schedule: str = "1f1b"
    zero: int = 0
    offload: str = "none"
    split_head: bool = False
    dim: str = "auto"
    experts: int = 0
    patterns: tuple[tuple[str, str], ...] = ()
    recompute: bool = False

    @property
    def family(self) -> str:
        """Return the name of the candidate's family. Estimates within one family have similar
        errors."""
        if self.recompute:
            return f"{replace(self, recompute=False).family}, recomputing blocks"
        mesh = self.mesh
        if self.split_head:
            return "copies beside a split head"
        if self.experts:
            return "copies beside experts"
        if mesh.stages == 1 and mesh.parts[0].beside:
            return "copies beside split parts"
        if mesh.stages == 1 and mesh.shards == 1:
            if self.offload != "none":
                return "copies, offload"
            return f"copies, ZeRO {self.zero}" if self.zero else "copies"
        by_sequence = " by sequence" if self.dim == "sequence" else ""
        if mesh.stages == 1:
            return f"split{by_sequence}"
        splits = f" of splits{by_sequence}" if mesh.shards > 1 else ""
        return f"pipeline{splits}{' by kind of device' if mesh.by_kind else ''}"

    @property
    def described(self) -> str:
        """Return the candidate in words."""
        mesh, words = self.mesh, []
        for part in mesh.parts:
            number = "1 stage" if part.stages == 1 else f"{part.stages} stages"
            of_part = [number] if mesh.stages > 1 else []
            of_part += [f"{part.copies} copies"] if part.copies > 1 else []
            split = f"{' and '.join(part.beside)} split over" if part.beside else "splits of"
            of_part += [f"{split} {part.shards}"] if part.shards > 1 else []
            on = f" on {part.kind}" if part.kind else ""
            words += [f"{' of '.join(of_part)}{on}"] if of_part else []
        copies = "1 copy" if mesh.copies == 1 else f"{mesh.copies} copies"
        words = [f"{mesh.copies} x {' + '.join(words)}" if words else copies]
        words += ["by sequence"] if self.dim == "sequence" else []
        words += ["split head"] if self.split_head else []
        words += [f"experts over {self.experts}"] if self.experts else []
        words += [f"{weight}: {pattern}" for weight, pattern in self.patterns]
        if self.micro_batches:
            words.append(f"{self.micro_batches} micro-batches")
        words += [self.schedule] if mesh.stages > 1 else []
        words += [f"ZeRO {self.zero}"] if self.zero else []
        words += [] if self.offload == "none" else ["offload"]
        words += ["recompute"] if self.recompute else []
        return ", ".join(words)

    def graph(self) -> Any:
        """Return the value of `graph` in the candidate's strategy file."""
        if self.split_head:
            return [{"replicate": self._keeping()}, {"split": {"modules": "head"}}]
        if self.experts:
            beside = [{"replicate": self._keeping()}, {"split": {"dim": "experts"}}]
            groups = self.mesh.copies // self.experts
            return beside if groups == 1 else {"replicate": {"degree": groups, "of": beside}}
        if self.micro_batches:
            inner: Any = {"of": self._pipeline()}
        elif self.mesh.shards > 1:
            inner = {"of": self._split(self.mesh.parts[0])}
        else:
            return {"replicate": self._keeping()}
        return {"replicate": {"degree": self.mesh.copies, **self._keeping(), **inner}}

    def _keeping(self) -> dict[str, Any]:
        """Return the `zero`, `offload` and `recompute` keys of the candidate's replicate."""
        settings: dict[str, Any] = {"zero": self.zero} if self.zero else {}
        if self.recompute:
            settings["recompute"] = "auto"
        if self.offload != "none":
            parameters = {"parameters": "cpu"} if self.offload == "all" else {}
            settings["offload"] = {"optimizer": "cpu", **parameters}
        return settings

    def _split(self, part: Part) -> Any:
        """Return the node of the split of a stage of `part`, or the nodes of its copies and of what
        is split beside them."""
        degree = {"degree": part.shards}
        if part.beside:
            splits = [{"split": {**degree, "modules": module}} for module in part.beside]
            return [{"replicate": {}}, *splits]
        dim = {} if self.dim == "auto" else {"dim": self.dim}
        patterns = {"patterns": dict(self.patterns)} if self.patterns else {}
        return {"split": {**degree, **dim, **patterns}}

    def _pipeline(self) -> dict[str, Any]:
        """Return the node of the pipeline, with one node for each stage."""
        stages = []
        for part in self.mesh.parts:
            stage: dict[str, Any] = {"recompute": "auto"}
            if part.kind:
                stage["device"] = part.kind
            split = self._split(part) if part.shards > 1 else None
            if part.copies > 1:
                copies = {"degree": part.copies}
                stage["of"] = {"replicate": {**copies, "of": split} if split else copies}
            elif split:
                stage["of"] = split
            stages += [{"stage": stage}] * part.stages
        pipeline = {"micro_batches": self.micro_batches, "schedule": self.schedule}
        return {"pipeline": {**pipeline, "stages": stages}}


@dataclass(frozen=True)
class Estimate:
    """The estimated time and memory of a candidate.

    seconds: seconds of a step (infinite: the candidate does not fit, or has no layout).
    short_bytes: bytes of memory that some device, or all together, are short of.
    cut: places where the pipeline is cut (empty: the resolver chooses them).
    """

    seconds: float
    short_bytes: float = 0.0
    cut: tuple[int, ...] = ()
