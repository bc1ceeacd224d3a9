"""Seconds of the casts between layouts that a split adds to a part of the model."""

from collections.abc import Iterable, Mapping, Sequence

from whale_train.strategies.cost.collectives import (
    all_reduce_time_s,
    all_to_all_time_s,
    gather_time_s,
)
from whale_train.strategies.cost.roofline import Times
from whale_train.strategies.graph.operation_graph import OperationGraph
from whale_train.strategies.hardware.cluster import Cluster, Link
from whale_train.strategies.layouts.propagation import Cast
from whale_train.strategies.layouts.types import COMBINE, DISPATCH, EXCHANGE


def cast_times(
    graph: OperationGraph,
    casts: Iterable[Cast],
    precision: str,
    members: int,
    samples: float,
    link: Link,
) -> Times:
    """Return the times of the collectives of `casts` in a shard group of `members` ranks, joined by
    `link`, for `samples` samples.

    Casts of one value with equal kinds and targets share a collective. A value that is no tensor
    takes no time.
    """
    total = Times()
    for value, kind, _ in dict.fromkeys((c.value, c.kind, c.target) for c in casts):
        if graph[value].shape is None:
            continue  # a number, which every member has
        num_bytes = moved_bytes(graph, value, samples, precision)
        gather = gather_time_s(num_bytes, members, link)
        reduce = all_reduce_time_s(num_bytes, members, link)
        # In an all-to-all a member sends its own part; in a gather it passes on all parts.
        exchange = gather_time_s(num_bytes / members, members, link)
        price = {"g": gather, "r": reduce, "x": exchange, "-": 0.0}
        forward, backward = _COLLECTIVES[kind]
        total += Times(price[forward], price[backward])
    return total


def routing_times(
    graph: OperationGraph,
    casts: Iterable[Cast],
    precision: str,
    cluster: Cluster,
    ranks: Sequence[int],
    samples: float,
) -> Times:
    """Return the times of sending the rows of `samples` samples to their experts among `ranks` and
    back, and of sending their gradients in the backward.

    Each value is sent once. The load of the experts is assumed to be balanced. A cast of kind
    EXCHANGE sends one int64 for each expert from every member to all others, and has no backward.
    """
    total = Times()
    for value, kind in dict.fromkeys((c.value, c.kind) for c in casts):
        if kind == EXCHANGE:  # each member sends all others a number for each expert
            (experts,) = graph[value].shape or ()
            told = _COUNT_BYTES * experts.fixed * len(ranks)
            counts_s = all_to_all_time_s(cluster, ranks, told)
            total += Times(counts_s, 0.0)
        else:
            rows_s = rows_time_s(graph, value, precision, cluster, ranks, samples)
            total += Times(rows_s, rows_s)
    return total


def rows_time_s(
    graph: OperationGraph,
    value: str,
    precision: str,
    cluster: Cluster,
    ranks: Sequence[int],
    samples: float,
) -> float:
    """Return the seconds of one all-to-all over `ranks` of the rows `value` of `samples`
    samples."""
    return all_to_all_time_s(cluster, ranks, moved_bytes(graph, value, samples, precision))


ROUTES = (DISPATCH, COMBINE, EXCHANGE)  # kinds of casts that send rows to and from experts
_COUNT_BYTES = 8  # int64 (runtime/comms/expert_rows.py)


def moved_bytes(graph: OperationGraph, value: str, samples: float, precision: str) -> float:
    """Return the bytes of a full value in a shard group's collective, for `samples` samples.

    An element has 4 bytes in fp32 and 2 otherwise: values that products read and give are sent in
    16 bits (`runtime/kernels/column_parallel.py`).
    """
    num_bytes = 4.0 if precision == "fp32" else 2.0
    for size in graph[value].shape or ():
        num_bytes *= size.fixed + size.per_sample * samples
    return num_bytes


# The collective of each cast, forward and backward. `r` is an all-reduce, `g` a gather (or a
# reduce-scatter, which moves as much), `x` an all-to-all, `-` none.
_COLLECTIVES: Mapping[str, tuple[str, str]] = {
    "enter": ("-", "r"),
    "reduce": ("r", "-"),
    "gather": ("g", "-"),
    "slice": ("-", "g"),
    "gather_enter": ("g", "g"),
    "reduce_scatter": ("g", "g"),
    "reduce_enter": ("r", "r"),
    "reduce_slice": ("r", "g"),
    "reshard": ("x", "x"),
    "once": ("-", "-"),
    "gather_once": ("g", "-"),
    "repeated": ("-", "-"),
    "repeated_slice": ("-", "-"),
    "repeated_once": ("-", "-"),
}
