"""The engines of a strategy's stages: the parameters of each, and the ranks that reduce its
gradients.

A stage has one engine, or two where a part (a head, experts, other modules) is split and the rest
replicated. Every member of the shard group then holds all of the rest, and a shard of that part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from whale_train.strategies.grammar.nodes import Replicate
from whale_train.strategies.layouts.propagation import Layout, Shard
from whale_train.strategies.memory.engine_memory import frozen_bytes
from whale_train.strategies.stages.placement import (
    AxisIntervals,
    PlanningContext,
    StageChunk,
    equivalent_ranks,
)


@dataclass(frozen=True)
class StageEngine:
    """One engine of a stage.

    elements: elements of the parameters that each member of a shard group holds.
    groups: groups of ranks that hold the same parameters and sum their gradients.
    keeper: ZeRO and offload settings of these groups; None where every rank holds all state on its
        device.
    """

    elements: tuple[float, ...]
    groups: tuple[tuple[int, ...], ...]
    keeper: Replicate | None = None

    @property
    def streams(self) -> bool:
        """Return True if the weights are streamed from the host when they are read."""
        return self.keeper is not None and self.keeper.streams


def engines_of_stages(
    job: PlanningContext, chunks: Sequence[StageChunk], axes: AxisIntervals
) -> Sequence[Sequence[StageEngine]]:
    """Return the engines of every stage: the first holds the whole stage or the replicated rest,
    the second, if any, the split part."""
    engines_by_stage = []
    for stage, form in enumerate(job.form.stages):
        stage_chunks = [chunk for chunk in chunks if chunk.stage == stage]
        cut = [axis for chunk in stage_chunks for axis in chunk.axes]
        alike = equivalent_ranks(cut, axes) or [0] * form.shards
        held_by = {member: _held(job, stage_chunks, axes, member) for member in set(alike)}
        split = {x for chunk in stage_chunks if chunk.shares_samples for x in chunk.shards}
        in_rest, beside = (
            {
                m: sum(n for x, n in held.items() if (x in split) is own)
                for m, held in held_by.items()
            }
            for own in (False, True)
        )
        rest = [in_rest[member] for member in alike]
        engines = [StageEngine(tuple(rest), job.copies_of_rest[stage], job.form.keeper)]
        if form.body:
            own = [beside[member] for member in alike]
            run_by_rest = any(chunk.beside is not None for chunk in stage_chunks)
            keeper = job.keeper_beside(stage) if run_by_rest else None
            engines.append(StageEngine(tuple(own), job.data_parallel[stage], keeper))
        engines_by_stage.append(engines)
    return engines_by_stage


def held_elements(
    job: PlanningContext, chunk: StageChunk, axes: AxisIntervals, member: int
) -> dict[str, float]:
    """Return the elements of each of a chunk's parameters that one member of the shard group holds,
    by path."""
    paths, by_path = chunk.slice.parameters, job.profile.parameter_by_path
    full_elements = job.findings.once(
        ("elements", paths), lambda: {path: float(by_path[path].elements) for path in paths}
    )
    cut = {
        path: full_elements[path] * fraction(layout, axes, member)
        for path, layout in chunk.shards.items()
        if path in full_elements
    }
    return full_elements | cut


def frozen_of_member(
    job: PlanningContext, chunk: StageChunk, axes: AxisIntervals, member: int
) -> dict[str, float]:
    """Return the bytes of each of a chunk's frozen weights that one member of the shard group
    holds, by path."""
    full_bytes = job.findings.once("frozen bytes", partial(frozen_bytes, job.profile, job.training))
    return {
        path: full_bytes[path] * fraction(chunk.shards.get(path), axes, member)
        for path in chunk.slice.frozen
    }


def fraction(layout: Layout | None, axes: AxisIntervals, index: int) -> float:
    """Return the fraction of a tensor of `layout` that member `index` of a shard group holds; 1.0
    where the tensor is not cut along one of `axes`."""
    if not isinstance(layout, Shard) or layout.axis not in axes:
        return 1.0
    start, stop = axes[layout.axis][index]
    return (stop - start) / axes[layout.axis][-1][1]


def _held(
    job: PlanningContext, chunks: Sequence[StageChunk], axes: AxisIntervals, member: int
) -> Mapping[str, float]:
    """Return the elements of all parameters of `chunks` that `member` holds, by path."""
    held: dict[str, float] = {}  # a parameter that several chunks of a stage read is held once
    for chunk in chunks:
        held |= held_elements(job, chunk, axes, member)
    return held
