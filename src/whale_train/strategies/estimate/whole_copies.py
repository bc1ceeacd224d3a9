"""Estimate replicas that are not cut into stages: of an unexported model, and next to a split head
or spread experts."""

from math import inf

from whale_train.strategies.cost.collectives import (
    gather_time_s,
    group_link,
    nic_contention,
    sum_time_s,
)
from whale_train.strategies.cost.resharding import routing_times
from whale_train.strategies.cost.roofline import fetch_time_s
from whale_train.strategies.estimate.candidate_costs import CandidateCosts
from whale_train.strategies.estimate.candidates import Candidate, Estimate
from whale_train.strategies.memory.engine_memory import ROUNDED_UP
from whale_train.strategies.simulate.tasks import sum_pieces


def unexported(of: CandidateCosts, candidate: Candidate) -> Estimate:
    """Return the estimate for replicas of a model that has no exported graph."""
    profile, mesh, part = of.blocks.findings.profile, candidate.mesh, candidate.mesh.parts[0]
    halved = 1.0 if of.training.precision == "fp32" else 0.5
    elements, slowest = of.blocks.findings.trained_elements, 0.0
    need = of.needs.element_bytes(candidate, mesh.copies) * elements + of.needs.standing_bytes(
        candidate
    )
    for alike in of.copies_of(mesh):
        device = alike.devices[0]
        saved = ROUNDED_UP * halved * profile.activation_bytes
        if need + saved > device.room_bytes:
            return Estimate(inf, need + saved - device.room_bytes)
        times = of.blocks.whole(device, alike.samples)
        gathers = sum(of.sums.gathers_s(candidate, part, device))
        summed = of.sums.after_s(candidate, part, elements, times.total - times.forward, device)
        slowest = max(slowest, times.total + gathers + summed)
    slowest = max(slowest, of.by_processors(mesh, 1, times.total))
    return Estimate(slowest + of.sums.norm_s)


def beside_split_head(of: CandidateCosts, candidate: Candidate) -> Estimate:
    """Return the estimate for a replicated backbone beside a split head."""
    findings, mesh, part = of.blocks.findings, candidate.mesh, candidate.mesh.parts[0]
    count, batch = len(of.cluster.devices), of.training.global_batch
    elements, head = findings.copied_elements(split_head=True), float(findings.head_elements)
    need = of.needs.element_bytes(candidate, count) * elements
    need += of.needs.standing_bytes(candidate)
    need += of.needs.element_bytes(Candidate(mesh), 1) * head / count
    crossing = of.crossing(1, batch)[-2]
    bridge = gather_time_s(crossing, count, group_link(of.cluster, range(count)))
    slowest = 0.0
    for alike in of.copies_of(mesh):
        device = alike.devices[0]
        if need > device.room_bytes:
            return Estimate(inf, need - device.room_bytes)
        of_own = of.seconds(device, part, "auto", alike.samples)
        of_all = of.seconds(device, part, "auto", batch)
        body = of_own.total[-2]
        split = (of_all.total[-1] - of_all.total[-2]) / count
        backward = body - of_own.forward[-2]
        gathers = sum(of.sums.gathers_s(candidate, part, device))
        summed = of.sums.after_s(candidate, part, elements, backward, device)
        slowest = max(slowest, body + split + 2 * bridge + gathers + summed)
    slowest = max(slowest, of.by_processors(mesh, 1, body + split))
    return Estimate(slowest + of.sums.norm_s)


def beside_experts(of: CandidateCosts, candidate: Candidate) -> Estimate:
    """Return the estimate for expert parallelism: experts spread over devices, the rest replicated.

    The router is assumed to be balanced: every device computes as many rows as it has. The seconds
    are infinite where there are no experts, or fewer than the devices to spread them over.
    """
    findings, mesh, part = of.blocks.findings, candidate.mesh, candidate.mesh.parts[0]
    count, spread = len(of.cluster.devices), candidate.experts
    if findings.experts is None or spread > min(findings.experts.sharded.axes.values()):
        return Estimate(inf)
    experts = findings.expert_elements
    elements = findings.trained_elements - experts
    need = of.needs.element_bytes(candidate, count) * elements
    need += of.needs.standing_bytes(candidate)
    held, streamed = experts / spread, 0.0
    if _streams(candidate):
        sent = of.blocks.findings.weight_width(1) * held
        streamed = fetch_time_s(sent, of.cluster.devices[:1], of.cluster.on_cpu)
    else:
        need += of.needs.element_bytes(_of_experts(candidate), count // spread) * held
    routing = routing_times(
        findings.graph,
        findings.experts.sharded.assignment.casts,
        of.training.precision,
        of.cluster,
        range(spread),
        of.training.global_batch * spread / count,
    ).total
    slowest, saved = 0.0, of.blocks.holding(1, "auto").saved[-1]
    for alike in of.copies_of(mesh):
        device = alike.devices[0]
        at_once = -(-alike.samples // of.training.accumulate)
        held_at_once = need + ROUNDED_UP * saved * at_once
        if held_at_once > device.room_bytes:
            return Estimate(inf, held_at_once - device.room_bytes)
        times = of.seconds(device, part, "auto", alike.samples)
        total_s, backward = times.total[-1], times.total[-1] - times.forward[-1]
        gathers = sum(of.sums.gathers_s(candidate, part, device, elements))
        summed = of.sums.after_s(candidate, part, elements, backward, device)
        left = max(0.0, backward - elements * of.sums.element_s(mesh.copies, part))
        summed += _summed_experts_s(of, candidate, held, left)
        slowest = max(slowest, total_s + routing + gathers + 3 * streamed + summed)
    slowest = max(slowest, of.by_processors(mesh, 1, total_s))
    return Estimate(slowest + of.sums.norm_s)


def _summed_experts_s(
    of: CandidateCosts, candidate: Candidate, elements: float, backward_s: float
) -> float:
    """Return the seconds of the reduction of experts' gradients that no backward hides. The
    reduction is over the groups that each hold all experts.

    elements: trained elements of experts on one device.
    backward_s: seconds of the backward that can still hide it.
    """
    count, spread = candidate.mesh.copies, candidate.experts
    if count == spread:
        return 0.0
    if spread not in of.expert_sums:
        groups = [range(member, count, spread) for member in range(spread)]
        crowd = nic_contention(of.cluster, groups)
        num_bytes = of.training.sent_width * elements
        of.expert_sums[spread] = (
            sum_time_s(of.cluster, groups[0], num_bytes, crowd),
            group_link(of.cluster, groups[0], crowd),
        )
    summed, link = of.expert_sums[spread]
    if candidate.zero:
        width = of.blocks.findings.weight_width(1)
        return summed + gather_time_s(width * elements, count // spread, link)
    pieces = sum_pieces(elements, of.training.bucket_elements)
    return max(summed / pieces, summed - (1 - 1 / pieces) * backward_s)


def _streams(candidate: Candidate) -> bool:
    """Return True if the experts, of which there is one copy, are streamed from the host."""
    return candidate.mesh.copies == candidate.experts and candidate.offload == "all"


def _of_experts(candidate: Candidate) -> Candidate:
    """Return a candidate with the ZeRO stage and offload of the experts, which follow
    `PlanningContext.keeper_beside`."""
    alone = candidate.mesh.copies == candidate.experts and candidate.offload == "none"
    zero = 0 if alone else min(candidate.zero, 1)
    offload = "none" if candidate.offload == "none" else "optimizer"
    return Candidate(candidate.mesh, zero=zero, offload=offload)
