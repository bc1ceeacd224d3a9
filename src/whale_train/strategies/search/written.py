"""Write a candidate as a strategy file, which is read and resolved like any other."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from whale_train.strategies.estimate.candidates import Candidate
from whale_train.strategies.partition.pipeline_partition import Sequenced, is_inside


def to_strategy_file(
    candidate: Candidate, devices: Mapping[str, Any], balance: str
) -> Mapping[str, Any]:
    """Return the content of the strategy file of a candidate. `devices` is the file's `devices`
    entry, or empty."""
    balanced = {} if balance == "hardware" else {"balance": balance}
    return {**devices, **balanced, "graph": candidate.graph()}


def with_cut(
    mapping: Mapping[str, Any], cut: Sequence[int], order: Sequenced
) -> Mapping[str, Any] | None:
    """Return a strategy file whose stages name their first and last blocks, so that the pipeline is
    cut at the places `cut` of `order`.

    Returns None where names of blocks cannot express the cut, and where the file does not list one
    node for each stage.
    """
    names = [_ends(order, *interval) for interval in pairwise(cut)]
    if not all(names):
        return None
    for stage, named in enumerate(names):
        for other, (first, last) in enumerate(pairwise(cut)):
            inside = order.blocks[first:last]
            if other != stage and any(is_inside(b, n) for b in inside if b for n in named):
                return None
    graph = mapping["graph"]
    replicate = graph["replicate"]
    pipeline = replicate["of"]["pipeline"]
    if not isinstance(pipeline["stages"], list) or len(pipeline["stages"]) != len(names):
        return None
    stages = [
        {"stage": {"modules": list(named), **stage["stage"]}}
        for named, stage in zip(names, pipeline["stages"], strict=True)
    ]
    inner = {"pipeline": {**pipeline, "stages": stages}}
    return {**mapping, "graph": {"replicate": {**replicate, "of": inner}}}


def _ends(order: Sequenced, first: int, last: int) -> Sequence[str]:
    """Return the names of the first and the last named block between the places `first` and
    `last`."""
    named = [block for block in order.blocks[first:last] if block]
    return list(dict.fromkeys((*named[:1], *named[-1:])))
