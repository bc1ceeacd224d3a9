"""The engines of a strategy's stages: what each holds, and who sums its gradients.

A stage has one engine, or two where a split head is beside copies of the rest: the rest is on every
member of the shard group, and of the head each has its own classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whale_train.strategies.layouts.propagation import Layout, Shard
from whale_train.strategies.stages.placement import AxisIntervals, StageChunk, Staging


@dataclass(frozen=True)
class StageEngine:
    """`elements` are how many parameters each member of the shard group holds of a copy; `groups`
    the ranks that hold the same ones, over which their gradients are summed."""

    elements: tuple[float, ...]
    groups: tuple[tuple[int, ...], ...]


def engines_of_stages(
    job: Staging, chunks: Sequence[StageChunk], axes: AxisIntervals
) -> Sequence[Sequence[StageEngine]]:
    """Return the engines of every stage: that of a split head comes after that of the rest."""
    found = []
    for stage, form in enumerate(job.form.stages):
        mine = [chunk for chunk in chunks if chunk.stage == stage]
        members = [_held(job, mine, axes, member) for member in range(form.shards)]
        of_head = {path for chunk in mine if chunk.head for path in chunk.shards}
        rest = [sum(n for path, n in held.items() if path not in of_head) for held in members]
        engines = [StageEngine(tuple(rest), job.copies_of_rest(stage))]
        if form.body:
            head = [sum(n for path, n in held.items() if path in of_head) for held in members]
            engines.append(StageEngine(tuple(head), job.data_parallel(stage)))
        found.append(engines)
    return found


def held_of_stages(
    job: Staging, chunks: Sequence[StageChunk], axes: AxisIntervals
) -> Sequence[Sequence[float]]:
    """Return how many parameters a rank holds of a copy, by stage and place in the shard group."""
    return [
        [sum(held) for held in zip(*(engine.elements for engine in engines), strict=True)]
        for engines in engines_of_stages(job, chunks, axes)
    ]


def held_elements(
    job: Staging, chunk: StageChunk, axes: AxisIntervals, member: int
) -> dict[str, float]:
    """Return how much of each of a chunk's parameters one member of its shard group holds."""
    return {
        path: job.profile.parameter_by_path[path].elements
        * fraction(chunk.shards.get(path), axes, member)
        for path in chunk.slice.parameters
    }


def fraction(layout: Layout | None, axes: AxisIntervals, index: int) -> float:
    """Return which part of what lies as `layout` the member `index` of a shard group has."""
    if not isinstance(layout, Shard) or layout.axis not in axes:
        return 1.0
    start, stop = axes[layout.axis][index]
    return (stop - start) / axes[layout.axis][-1][1]


def _held(
    job: Staging, chunks: Sequence[StageChunk], axes: AxisIntervals, member: int
) -> Mapping[str, float]:
    held: dict[str, float] = {}  # what several chunks of a stage read is there once
    for chunk in chunks:
        held |= held_elements(job, chunk, axes, member)
    return held
