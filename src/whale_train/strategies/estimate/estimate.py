"""Estimate candidates by formulas, so that the search simulates only the best of many.

The time of a pipeline's step is the sum of its slowest stage, busy with all micro-batches, the fill
and drain of the other stages, gradient reductions that no backward hides, and the update. The
formulas ignore the order of instructions and messages in flight, which the simulator models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf

from whale_train.errors import PlanError
from whale_train.strategies.estimate.block_costs import BlockMemory, Seconds
from whale_train.strategies.estimate.candidate_costs import CandidateCosts, EqualCopies
from whale_train.strategies.estimate.candidates import Candidate, Estimate, Mesh, Part
from whale_train.strategies.estimate.pipeline_times import in_flight_of, pipeline_s
from whale_train.strategies.estimate.stage_dp import (
    StageCosts,
    StageLink,
    StagePartition,
    cut,
    short_of_room,
)
from whale_train.strategies.estimate.whole_copies import (
    beside_experts,
    beside_split_head,
    unexported,
)
from whale_train.strategies.hardware.cluster import Device
from whale_train.strategies.memory.engine_memory import ROUNDED_UP
from whale_train.strategies.simulate.tasks import PIECES

_COARSE = 1e6  # bytes: a smaller shortfall is a rounding error of the sum
_UNHIDDEN = 1 - 1 / PIECES  # the part of a backward in which gradients are ready to reduce


@dataclass(frozen=True)
class Estimator:
    """Estimator of candidates. It caches the costs that their estimates share.

    costs: costs of candidates for one model on one cluster.
    """

    costs: CandidateCosts
    _stages: dict[object, StageCosts] = field(default_factory=dict)
    _cuts: dict[Candidate, StagePartition | None] = field(default_factory=dict)
    _with_sums: dict[object, Sequence[float]] = field(default_factory=dict)

    def of(self, candidate: Candidate) -> Estimate:
        """Return the estimate of a candidate that uses all devices of the cluster.

        The seconds are infinite where the candidate does not fit, or where no layout exists.
        """
        short = self.costs.needs.short_on_hosts(candidate)
        if short > 0:
            return Estimate(inf, short)
        try:
            if candidate.split_head:
                return beside_split_head(self.costs, candidate)
            if candidate.experts:
                return beside_experts(self.costs, candidate)
            if self.costs.blocks.findings.profile.graph is None:
                return unexported(self.costs, candidate)
            return self._pipeline(candidate)
        except PlanError:  # no layout: the resolver says why
            return Estimate(inf)

    def rough_s(self, mesh: Mesh, micro_batches: int, dim: str) -> float:
        """Return a rough estimate of a pipeline's step, in seconds, as if the model could be cut
        anywhere.

        The order of the mesh's parts does not matter. Raises PlanError where no layout exists for
        `dim`.
        """
        samples = -(-self.costs.training.global_batch // (mesh.copies * micro_batches))
        rate, widths, speeds = 0.0, 0, list[float]()
        for part in mesh.parts:
            total = self.costs.total_s(part, dim, samples)
            speeds.append(part.copies / total if total else inf)
            rate += part.stages * speeds[-1]
            widths += part.stages * part.copies
        pace, shown = 1 / rate, 0.0
        elements = self.costs.blocks.findings.trained_elements / mesh.shards
        for part, speed in zip(mesh.parts, speeds, strict=True):
            share = speed * pace
            summed = self.costs.sums.element_s(mesh.copies, part) * elements * share
            shown = max(shown, summed / PIECES, summed - _UNHIDDEN * part.copies * pace * 2 / 3)
        return (micro_batches - 1 + 2 * widths / 3) * pace + shown

    def uncut_s(self, candidate: Candidate) -> float:
        """Return the seconds of a pipeline's step as if the model could be cut anywhere. Memory is
        ignored."""
        mesh, pieces = candidate.mesh, candidate.micro_batches
        parts = [part for part in mesh.parts for _ in range(part.stages)]
        slowest = 0.0
        for alike in self.costs.copies_of(mesh):
            size = -(-alike.samples // pieces)
            of_part: dict[Part, tuple[float, float, float, float]] = {}
            rate = 0.0
            for part, device in zip(parts, alike.devices, strict=True):
                if part not in of_part:
                    of_units = self.costs.seconds(device, part, candidate.dim, size)
                    full_times = (
                        of_units.forward[-1],
                        of_units.backward_input[-1],
                        of_units.backward_weight[-1],
                    )
                    of_part[part] = (*full_times, part.copies / max(sum(full_times), 1e-30))
                rate += of_part[part][3]
            times = []
            for part in parts:
                forward, of_input, of_weight, speed = of_part[part]
                share = speed / rate
                times.append((share * forward, share * of_input, share * of_weight))
            crossing = self.costs.crossing(mesh.shards, size)
            middle = crossing[len(crossing) // 2]
            sent = [hop.latency_s + hop.byte_s * middle for hop in self._hops(mesh, parts)]
            copies = [part.copies for part in parts]
            flights = [
                in_flight_of(candidate.schedule, copies, number, pieces)
                for number in range(len(parts))
            ]
            done = pipeline_s(candidate.schedule, times, copies, flights, sent, pieces)
            step, before, known = 0.0, 0.0, set[Part]()
            elements = self.costs.blocks.findings.trained_elements / mesh.shards
            for number, part in enumerate(parts):
                backward = times[number][1] + times[number][2]
                if part not in known:  # the first of equal stages ends last
                    known.add(part)
                    held = elements * of_part[part][3] / rate
                    device = alike.devices[number]
                    after = self.costs.sums.after_s(candidate, part, held, backward, device)
                    step = max(step, done - before + after)
                before += backward * (0.5 if candidate.schedule == "zero_bubble" else 1.0)
            slowest = max(slowest, step)
        return max(slowest, self._shared_s(candidate, size))

    def _shared_s(self, candidate: Candidate, size: int) -> float:
        """Return a lower bound on the seconds of a pipeline's step whose ranks share processors; 0
        where they do not. `size` is the number of samples of a micro-batch."""
        part, mesh = candidate.mesh.parts[0], candidate.mesh
        total = self.costs.total_s(part, candidate.dim, size)
        return self.costs.by_processors(mesh, candidate.micro_batches, total)

    def _hops(self, mesh: Mesh, parts: Sequence[Part]) -> Sequence[StageLink]:
        """Return the cost of a send between neighbouring stages, for each neighbouring pair."""
        if mesh.widest > 1 and not mesh.by_kind:
            return self.costs.transfers.hops(mesh)
        known: dict[tuple[Part, Part], StageLink] = {}
        hops = []
        for pair in pairwise(parts):
            if pair not in known:
                known[pair] = self.costs.transfers.hop(mesh, *pair)
            hops.append(known[pair])
        return hops

    # --- Pipelines, of one stage or more ---

    def _pipeline(self, candidate: Candidate) -> Estimate:
        """Return the estimate of a pipeline of one stage or more."""
        mesh, pieces = candidate.mesh, max(1, candidate.micro_batches)
        parts = [part for part in mesh.parts for _ in range(part.stages)]
        copies = self.costs.copies_of(mesh)
        hops = self._hops(mesh, parts)
        ends: tuple[int, ...] = ()
        slowest, recomputed = 0.0, False
        for alike in copies:
            size = -(-alike.samples // pieces)
            stages = self._stages_of(candidate, parts, alike, size, pieces)
            crossing = self.costs.crossing(mesh.shards, size)
            if not ends:
                alone = candidate  # schedules with equal micro-batches in flight share a cut
                if candidate.schedule == "zero_bubble":
                    alone = replace(candidate, schedule="1f1b")
                if alone not in self._cuts:
                    self._cuts[alone] = cut(stages, hops, crossing, pieces)
                best_cut = self._cuts[alone]
                if best_cut is None:
                    return Estimate(inf, self._short(stages, len(crossing) - 1))
                ends = best_cut.ends
            again = (s.recomputes(*at) for s, at in zip(stages, pairwise(ends), strict=True))
            recomputed = recomputed or any(again)
            seconds = self._step(candidate, parts, alike, size, stages, hops, crossing, ends)
            slowest = max(slowest, seconds)
        if candidate.recompute and not recomputed:
            return Estimate(inf)  # it fits without
        slowest = max(slowest, self._shared_s(candidate, size))
        units = self.costs.blocks.units(mesh.shards)
        is_cut = mesh.stages > 1 and candidate.schedule != "interleaved_1f1b"
        return Estimate(slowest, 0.0, tuple(units[end] for end in ends) if is_cut else ())

    def _stages_of(
        self,
        candidate: Candidate,
        parts: Sequence[Part],
        copies: EqualCopies,
        size: int,
        pieces: int,
    ) -> Sequence[StageCosts]:
        """Return the costs of a replica's stages, for the dynamic program that cuts the model.

        size: samples of a micro-batch.
        pieces: number of micro-batches.
        """
        mesh, stages = candidate.mesh, list[StageCosts]()
        for number, (part, device) in enumerate(zip(parts, copies.devices, strict=True)):
            flight = in_flight_of(candidate.schedule, [p.copies for p in parts], number, pieces)
            key = (mesh.copies, part, id(device), size, candidate.micro_batches, flight,
                   candidate.zero, candidate.offload, candidate.dim,
                   candidate.recompute)  # fmt: skip
            if key not in self._stages:
                self._stages[key] = self._stage(candidate, part, device, size, pieces, flight)
            stages.append(self._stages[key])
        return stages

    def _stage(
        self, candidate: Candidate, part: Part, device: Device, size: int, pieces: int, flight: int
    ) -> StageCosts:
        """Return the costs of one stage with `flight` micro-batches of `size` samples in flight."""
        of_units = self.costs.seconds(device, part, candidate.dim, size)
        holding = self.costs.blocks.holding(part.shards, candidate.dim)
        mesh = candidate.mesh
        key = (mesh.copies, part, id(device), candidate.dim, size, pieces, candidate.zero > 0)
        if key not in self._with_sums:
            self._with_sums[key] = self._seconds_with_sums(
                candidate, part, of_units, holding, pieces
            )
        return StageCosts(
            self._with_sums[key],
            of_units.forward,
            holding.elements,
            holding.saved,
            holding.entering,
            element_bytes=self.costs.needs.element_bytes(candidate, mesh.copies * part.copies),
            samples=ROUNDED_UP * size,
            in_flight=flight,
            room=device.room_bytes - self.costs.needs.standing_bytes(candidate),
            copies=part.copies,
            can_recompute=candidate.micro_batches > 0 or candidate.recompute,
        )

    def _seconds_with_sums(
        self, candidate: Candidate, part: Part, of_units: Seconds, holding: BlockMemory, pieces: int
    ) -> Sequence[float]:
        """Return the prefix sums of the units' seconds, including gradient reductions that no
        backward hides.

        A stage reduces its gradients once a step; each of the `pieces` micro-batches is charged an
        equal part.
        """
        group = self.costs.transfers.group(candidate.mesh.copies, part)
        if group.members == 1:
            return of_units.total
        element_s = self.costs.sums.element_s(candidate.mesh.copies, part)
        hidden = 0.0 if candidate.zero else _UNHIDDEN
        with_sums, total = [0.0], of_units.total
        for unit in range(len(total) - 1):
            forward = of_units.forward[unit + 1] - of_units.forward[unit]
            time = total[unit + 1] - total[unit]
            elements = holding.elements[unit + 1] - holding.elements[unit]
            shown = max(0.0, element_s * elements - hidden * (time - forward))
            with_sums.append(with_sums[-1] + time + part.copies * shown / pieces)
        return with_sums

    def _step(
        self,
        candidate: Candidate,
        parts: Sequence[Part],
        copies: EqualCopies,
        size: int,
        stages: Sequence[StageCosts],
        hops: Sequence[StageLink],
        crossing: Sequence[float],
        ends: Sequence[int],
    ) -> float:
        """Return the seconds of a step of the replicas, with stages that end at `ends`."""
        pieces = max(1, candidate.micro_batches)
        times, backwards = [], []
        for number, (part, device) in enumerate(zip(parts, copies.devices, strict=True)):
            first, last = ends[number : number + 2]
            of_units = self.costs.seconds(device, part, candidate.dim, size)
            forward, of_input, of_weight = (
                prefix[last] - prefix[first]
                for prefix in (of_units.forward, of_units.backward_input, of_units.backward_weight)
            )
            recomputes = candidate.micro_batches or candidate.recompute
            if recomputes and stages[number].recomputes(first, last):
                of_input += forward
            gathers = self.costs.sums.gathers_s(candidate, part, device)
            forward, of_input = forward + gathers[0], of_input + gathers[1]
            times.append((forward, of_input, of_weight))
            backwards.append(of_input + of_weight)
        sent = [
            hop.latency_s + hop.byte_s * crossing[end]
            for hop, end in zip(hops, ends[1:-1], strict=True)
        ]
        done = pipeline_s(
            candidate.schedule, times, [part.copies for part in parts],
            [int(stage.in_flight) for stage in stages], sent, pieces,
        )  # fmt: skip
        step, before = 0.0, 0.0
        waits = candidate.schedule != "zero_bubble"  # which computes weight gradients later
        for number, part in enumerate(parts):
            first, last = ends[number : number + 2]
            elements = self.costs.blocks.holding(part.shards, candidate.dim).elements
            summed = self.costs.sums.after_s(candidate, part, elements[last] - elements[first],
                                    backwards[number], copies.devices[number])  # fmt: skip
            step = max(step, done - before + summed)
            before += backwards[number] * (1.0 if waits else 0.5)
        return step + self.costs.sums.norm_s

    # --- Memory ---

    def _short(self, stages: Sequence[StageCosts], units: int) -> float:
        """Return a lower bound on the bytes that a pipeline's devices, together, are short of.

        The bytes are the shortfall of the sum over all devices. Where the sum fits, they are the
        further bytes that each device would need for some cut.
        """
        needs = sum(s.copies * s.element_bytes * s.elements[-1] for s in stages) / len(stages)
        saved = min(stage.samples * stage.entering[-1] for stage in stages)
        together = needs + saved - sum(stage.copies * stage.room for stage in stages)
        return together if together > _COARSE else short_of_room(stages, units)
