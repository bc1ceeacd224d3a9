"""Seconds that replicas take to exchange values of the whole batch.

A sum over the batch is all-reduced, and so is its gradient if it has one. A synchronised BatchNorm
exchanges the values of runtime/kernels/sync_batch_norm.py. Forward: the counts, means and variances
of every replica's channels are all-gathered in fp64. Backward: two fp32 sums for each channel are
all-reduced, unless the normalised input has no gradient.
"""

from collections.abc import Iterable
from math import prod

from whale_train.strategies.cost.collectives import all_reduce_time_s, gather_time_s
from whale_train.strategies.cost.op_work import PartOfValue, whole
from whale_train.strategies.cost.roofline import Times
from whale_train.strategies.graph.operation_graph import Operation, OperationGraph
from whale_train.strategies.hardware.cluster import Link

_GATHERED, _SUMMED = 8, 4  # bytes of a number, forward and backward


def batch_sum_times(graph: OperationGraph, sums: Iterable[str], members: int, link: Link) -> Times:
    """Return the times of exchanging the values `sums`, which are sums over the batch, in one
    forward and one backward. Each of `members` replicas, joined by `link`, has a part of every
    sum."""
    total = Times()
    for name in sums if members > 1 else ():
        elements = prod(size.fixed for size in graph[name].shape or ())
        seconds = all_reduce_time_s(_SUMMED * elements, members, link)
        total += Times(seconds, seconds if name in graph.trained else 0.0)
    return total


def batch_norm_times(
    graph: OperationGraph,
    operations: Iterable[str],
    members: int,
    link: Link,
    channels: PartOfValue = whole,
) -> Times:
    """Return the times of the exchanges of the BatchNorms in `operations`, in one forward and one
    backward. They run between `members` replicas joined by `link`. `channels` gives the fraction of
    a norm's channels that a replica has."""
    if members == 1:
        return Times()
    forward = backward = 0.0
    for name in operations:
        operation = graph[name]
        if not _takes_statistics(operation):
            continue
        assert operation.shape is not None
        count = operation.shape[1].fixed * channels(name, None)
        forward += gather_time_s(_GATHERED * (2 * count + 1) * members, members, link)
        if operation.inputs[0] in graph.trained:
            backward += all_reduce_time_s(_SUMMED * 2 * count, members, link)
    return Times(forward, backward)


def _takes_statistics(operation: Operation) -> bool:
    """Return True if an operation is a BatchNorm that normalises by the statistics of its batch, as
    in training."""
    is_norm = operation.target == "aten.batch_norm.default"
    return is_norm and (operation.args + (None,) * 6)[5] is True
