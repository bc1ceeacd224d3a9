"""Gradient accumulation fusion: weights whose gradients no backward makes apart from their sum.

In a step of several backwards, products and lookups add to their weights' gradients in place
(`runtime/kernels/weight_gradients.py`). Autograd sums the gradients of all other parameters.
"""

from collections.abc import Mapping, Sequence, Set

from whale_train.strategies.graph.operation_graph import LOOKUP, PRODUCTS
from whale_train.strategies.stages.placement import PlanningContext, StageChunk


def added_in_place(job: PlanningContext, chunk: StageChunk) -> Mapping[str, Set[str]]:
    """Return the parameters of `chunk` whose gradients are accumulated in place, by path, with the
    targets of the operations that read them. Empty for a model that runs as it is, whose gradients
    autograd sums."""
    if job.as_is:
        return {}
    operations = chunk.slice.operations
    key = ("readers", operations[0], operations[-1], len(operations))
    readers = job.findings.once(key, lambda: _readers(job, operations))
    targets = {LOOKUP}
    if job.training.precision == "fp32":  # 16-bit values make 16-bit gradients, added in fp32
        targets.update(PRODUCTS)

    def adds(path: str, target: str) -> bool:
        shard = chunk.shards.get(path)
        # A member that holds some of the rows looks them up by runtime/kernels/vocab_parallel.py.
        own = target == LOOKUP and shard is not None and shard.dim == 0
        return target in targets and not own

    return {path: of for path, of in readers.items() if all(adds(path, target) for target in of)}


def named_in_place(job: PlanningContext, chunk: StageChunk) -> Set[str]:
    """Return the names in the graph of the parameters of `chunk` that `added_in_place` returns."""
    if job.as_is:
        return frozenset()
    graph, canonical = job.graph, job.profile.parameter_by_path
    paths = added_in_place(job, chunk)
    return {
        name
        for name in chunk.slice.operations
        if graph[name].target == "parameter" and canonical[graph[name].path].path in paths
    }


def _readers(job: PlanningContext, operations: Sequence[str]) -> Mapping[str, Set[str]]:
    """Return the targets of the `operations` that read each parameter, by path."""
    graph, canonical = job.graph, job.profile.parameter_by_path
    targets: dict[str, set[str]] = {}
    for name in operations:
        for source in graph[name].inputs:
            if graph[source].target == "parameter" and graph[source].path in canonical:
                path = canonical[graph[source].path].path
                targets.setdefault(path, set()).add(graph[name].target)
    return targets
