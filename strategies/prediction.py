"""The time of one step under a plan: each rank's work and each collective, priced by `cost.py`."""

from collections.abc import Sequence

from whale_train.strategies.cluster import Cluster
from whale_train.strategies.cost import (
    compute_time_s,
    gather_time_s,
    gradient_sync_time_s,
    optimizer_time_s,
    slowest_link,
)
from whale_train.strategies.grammar import Replicate
from whale_train.strategies.graph import StrategyGraph
from whale_train.strategies.operations import ModelProfile
from whale_train.strategies.plan import Prediction
from whale_train.strategies.sharing import Training


def predict(
    graph: StrategyGraph,
    cluster: Cluster,
    profile: ModelProfile,
    training: Training,
    samples: Sequence[int],
    classes: Sequence[int],
) -> Prediction:
    """The step's time: the slowest device's compute, then what is sent, then the update."""
    count, ranks = len(samples), range(len(samples))
    link = slowest_link(cluster, ranks)
    body = graph.task_graphs[0]
    assert isinstance(body.node, Replicate)
    elements = sum(profile.parameter_by_path[p].elements for p in body.parameters)
    compute, optimizer = 0.0, 0.0
    for rank in ranks:
        device = cluster.devices[rank]
        flops = body.flops * samples[rank]
        held = elements / count if body.node.zero else elements
        if classes and graph.head:
            part = classes[rank] / graph.head.classes
            flops += graph.task_graphs[1].flops * part * training.global_batch
            held += part * sum(
                profile.parameter_by_path[p].elements for p in graph.task_graphs[1].parameters
            )
        compute = max(compute, compute_time_s(flops, device, training.precision))
        states = training.optimizer_states
        optimizer = max(optimizer, optimizer_time_s(held, states, device))
    sync = gradient_sync_time_s(4.0 * elements, count, link, body.node.zero)
    for name in _bridged(graph):
        assert profile.graph is not None
        num_bytes = 4.0
        for size in profile.graph[name].shape or ():
            num_bytes *= size.at(training.global_batch)
        sync += 2 * gather_time_s(num_bytes, count, link)  # gathered forward, scattered back
    step = compute + sync + optimizer
    return Prediction(step, training.global_batch / step, compute, sync, optimizer)


def _bridged(graph: StrategyGraph) -> tuple[str, ...]:
    return () if graph.cut is None else tuple(n for s in graph.cut.segments for n in s.takes)
