"""Gradient accumulation fusion: weights whose gradients are added to the accumulated ones directly,
without a tensor of their own.

In a step of several backwards, products and lookups accumulate their weights' gradients in place
(`own_gradients` of strategies/graph/rewrites.py). Autograd sums the gradients of all other
parameters.
"""

from collections.abc import Mapping, Set

from whale_train.strategies.graph.operation_graph import LOOKUP, PRODUCTS
from whale_train.strategies.stages.placement import (
    PlanningContext,
    StageChunk,
    named_key,
    own_gradients_of,
)


def added_in_place(job: PlanningContext, chunk: StageChunk) -> Mapping[str, Set[str]]:
    """Return the parameters of `chunk` whose gradients are accumulated in place, by path, with the
    targets of the operations that read them. The mapping is empty for a model that runs as it is:
    autograd sums its gradients."""
    if job.as_is:
        return {}
    key = ("readers", *named_key(job, chunk))
    readers = job.findings.once(key, lambda: _readers(job, chunk))
    # 16-bit values make 16-bit gradients of products, which are added in fp32.
    targets = {LOOKUP, *PRODUCTS} if job.training.precision == "fp32" else {LOOKUP}
    return {path: of for path, of in readers.items() if of <= targets}


def named_in_place(job: PlanningContext, chunk: StageChunk) -> Set[str]:
    """Return the parameters of `added_in_place` by their names in the graph."""
    if job.as_is:
        return frozenset()
    graph, canonical = job.graph, job.profile.parameter_by_path
    paths = added_in_place(job, chunk)
    return {
        name
        for name in chunk.slice.operations
        if graph[name].target == "parameter" and canonical[graph[name].path].path in paths
    }


def _readers(job: PlanningContext, chunk: StageChunk) -> Mapping[str, Set[str]]:
    """Return the targets of the operations of `chunk` that read each parameter, by path. A
    parameter is left out unless all its readers compute its gradient themselves."""
    graph, canonical = job.graph, job.profile.parameter_by_path
    own = own_gradients_of(job, chunk)
    targets: dict[str, set[str]] = {}
    summed = set[str]()
    for name in chunk.slice.operations:
        for source in graph[name].inputs:
            if graph[source].target == "parameter" and graph[source].path in canonical:
                path = canonical[graph[source].path].path
                targets.setdefault(path, set()).add(graph[name].target)
                if name not in own:
                    summed.add(path)
    return {path: of for path, of in targets.items() if path not in summed}
