"""Compare training on a batch with training on parts of it, for models whose graph does not prove
that both are equal.

models/batch_parts/compare_parts.py makes the comparison. This file owns the occasion and the size
of the comparison, and the plan's note about it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whale_train.config import Request
from whale_train.data.dataset import Dataset
from whale_train.data.stream import looked_at
from whale_train.errors import Fault, PlanError
from whale_train.machine.limits import cores, memory_bytes
from whale_train.quantities import in_bytes, in_seconds
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.plan.plan import Decision, Plan
from whale_train.strategies.resolver.shared_batch import (
    COMPARED,
    VOUCHED,
    refuse_unlike_copies,
    refuse_written_parameters,
)

_PARTS = ((8, 4), (4, 2), (2, 1))
_POOL = 64  # number of samples, evenly spaced in the data, from which batches are drawn
_MOST_COPIES = 4  # the plan's own parts are compared for at most this many replicas
_SORTED = 3  # samples are sorted into parts by at most this many fields
# FLOPs of a few seconds on a slow core, which reaches some 10 GFLOP/s in fp32.
_FLOPS_PER_CORE = 5e10
# A training step takes the work of three forwards. Every batch is trained whole and in parts, and
# the forwards of the parts run once more to count targets.
_FORWARDS = 7 * (1 + _SORTED)


def must_compare(request: Request, plan: Plan) -> bool:
    """Return whether a training under `plan` needs the comparison before the first step."""
    return request.mode == "train" and is_unknown(plan)


def is_unknown(plan: Plan) -> bool:
    """Return whether `plan` splits a batch without proof from the graph that the batch may be
    split."""
    return any(decision.chosen == COMPARED for decision in plan.decisions)


def compared(
    request: Request, dataset: Dataset, profile: ModelProfile, plan: Plan
) -> tuple[ModelProfile, Plan]:
    """Compare training on a batch with training on the parts of the batch, which are replicas or
    micro-batches as in `plan`.

    Returns the profile and the plan. If batch and parts train equally, the plan gets a note; if
    not, the profile's `unequal_parts` says why.

    Raises PlanError where the model is too large for the comparison, where the forward changes a
    parameter that ZeRO would restore, and where the samples of only some replicas reach a module
    whose statistics or order all replicas share.
    """
    parts = _affordable(profile, dataset, plan)
    # Torch is imported here and not before: a request that is wrong is answered at once.
    from whale_train.launcher.planning.profile_cache import quiet_exports
    from whale_train.models.batch_parts.compare_parts import TOGETHER, compare_parts

    fields = {field.name for field in profile.inputs} | {"labels"}
    pool = dataset.samples(looked_at(dataset, _POOL))
    batches = list(_batches({k: x for k, x in pool.items() if k in fields}, parts))
    one_copy = any(rank.micro_batches > 1 for rank in plan.ranks)
    with quiet_exports():
        comparison = compare_parts(
            request.model, batches, parts, one_copy=one_copy, seed=request.seed
        )
    faults: list[Fault] = []
    zero = max(task_graph.zero for task_graph in plan.task_graphs)
    refuse_written_parameters(profile, zero, faults, comparison.written)
    if len(plan.task_graphs[0].replicas) > 1:
        norm = comparison.unlike_norm if request.model.sync_batchnorm else ""
        refuse_unlike_copies(profile, zero, norm, comparison.unlike, faults)
    if faults:
        raise PlanError(faults)
    took = in_seconds(comparison.seconds)
    sizes = " and ".join(map(str, parts))
    if comparison.different:
        doubt = next(d.reason for d in plan.decisions if d.chosen == COMPARED)
        said = f"{comparison.different} (samples in parts of {sizes}, compared in {took}; {doubt})"
        remedy = comparison.remedy
        if profile.graph is None and remedy == TOGETHER:  # there is no plan of one copy to split
            remedy = "use strategy=single"
        return replace(profile, unequal_parts=said, unequal_remedy=remedy), plan
    reason = f"loss and gradients of {sum(parts)} samples and of parts of {sizes} are equal "
    reason += (
        f"({comparison.loss:.6g} and {comparison.of_parts:.6g}), {len(batches)} times; "
        f"compared in {took}"
    )
    decisions = [d for d in plan.decisions if d.chosen != COMPARED]
    return profile, replace(plan, decisions=(*decisions, Decision("model", "equal", "", reason)))


def _batches(
    pool: Mapping[str, NDArray[Any]], parts: tuple[int, ...]
) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield batches of samples from `pool`, each to be split into `parts`.

    The first batch has the order of the pool. Every other batch is sorted by the mean of one field,
    with the smallest samples in the first part and the largest in the others. A divisor of the
    loss, such as the number of targets, then differs between the parts.

    pool: arrays `[samples, ...]`, by field.
    parts: number of samples in each part.
    """
    count = len(next(iter(pool.values())))
    yield {k: x[np.linspace(0, count - 1, sum(parts)).round().astype(int)] for k, x in pool.items()}
    unlike = []
    for array in pool.values():
        means = array.reshape(count, -1).astype(np.float64).mean(1)
        if np.ptp(means):
            unlike.append(means)
    for means in unlike[-_SORTED:]:
        order = means.argsort(kind="stable")
        last = sum(parts) - parts[0]
        chosen = np.concatenate([order[: parts[0]], order[count - last :]])
        yield {k: x[chosen] for k, x in pool.items()}


def _own_parts(plan: Plan) -> list[tuple[int, ...]]:
    """Return a list with the sizes of the parts that the plan's replicas take, or an empty list for
    many replicas or micro-batches.

    These parts are compared first, since a forward may depend on their sizes.
    """
    shares = plan.task_graphs[0].shares
    shared = all(rank.micro_batches <= 1 for rank in plan.ranks) and sum(shares) <= _POOL
    return [shares] if shared and 1 < len(shares) <= _MOST_COPIES else []


def _across_bounds(profile: ModelProfile) -> list[tuple[int, ...]]:
    """Return the sizes of parts across a batch size at which the forward changes: the batch is on
    one side of that size, and the parts are on the other."""
    smallest, largest = profile.batch_sizes
    ends = [largest + 1] if largest else []
    ends += [smallest] if smallest > 1 else []
    return [(end - 1, 1) for end in ends if 1 < end <= _POOL]


def _affordable(profile: ModelProfile, dataset: Dataset, plan: Plan) -> tuple[int, ...]:
    """Return the sizes of the parts to compare: the plan's own if the comparison takes a few
    seconds, else the largest for which it does.

    Raises PlanError where even the smallest takes longer, and where the memory or the number of
    samples is too small.
    """
    wanted = [*_own_parts(plan), *_across_bounds(profile), *_PARTS]
    samples = [n for n in wanted if sum(n) <= dataset.num_samples]
    flops = _FORWARDS * profile.forward_flops
    affordable = [n for n in samples if flops * sum(n) <= _FLOPS_PER_CORE * cores()]
    # Bytes of a model for the whole batch and of one for each copy, all with gradients, in fp32.
    need = (1 + len(wanted[0])) * 8.0 * profile.parameter_elements
    if affordable and need <= memory_bytes() / 2:
        return affordable[0]
    if not samples:
        because = f"the data's {dataset.num_samples} samples are too few to compare it"
    elif not affordable:
        because = f"its {profile.forward_flops:.2g} FLOPs a sample are too many to compare it in "
        because += "seconds"
    else:
        because = f"comparing it needs {in_bytes(need)}, more than half of this machine's memory"
    rule = f"is not known to be trained equally in parts: its graph does not say it, and {because}"
    remedy = f"use {VOUCHED}=true if its loss is a mean over samples, or strategy=single"
    raise PlanError([Fault("model", profile.name, rule, remedy)])
