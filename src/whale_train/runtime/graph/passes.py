"""The passes over one rank's graph, in the order they run.

The plan lists the operations that each pass replaces (`PlannedSegment.rewrites`, from
strategies/graph/rewrites.py). `shard_graph.py` runs earlier: it writes the graph, with layouts,
casts and the overlapped return of rows from experts. `segment.py` runs later: it adds streamed
weights, compiled regions and blocks.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

from torch import fx

from whale_train.runtime.kernels.column_parallel import join_products
from whale_train.runtime.kernels.grouped_attention import group_keys
from whale_train.runtime.kernels.matmul import scale_product, scale_products
from whale_train.runtime.kernels.rms_norm import join_rms_norms
from whale_train.runtime.kernels.weight_gradients import WeightGradients
from whale_train.strategies.graph.rewrites import (
    GATHERED_PRODUCTS,
    GROUPED_KEYS,
    JOINED_PRODUCTS,
    OWN_GRADIENTS,
    RMS_NORM,
    SCALED_PRODUCTS,
)
from whale_train.strategies.plan.program import PlannedRewrite


def run_passes(
    graph: fx.GraphModule,
    nodes: Mapping[str, fx.Node],
    rewrites: Sequence[PlannedRewrite],
    on_cpu: bool,
    owner: WeightGradients | None,
) -> None:
    """Carry out `rewrites` in `graph`.

    nodes: the node of each operation, by the operation's name.
    on_cpu: whether the graph runs on a CPU, perhaps in place of a GPU. CPUs have no kernel for
        grouped keys.
    owner: computes the gradients of weights; None for a graph that has no backward.
    """

    def of(kind: str) -> list[list[fx.Node]]:
        return [[nodes[name] for name in x.operations] for x in rewrites if x.kind == kind]

    scaled = list(chain.from_iterable(of(SCALED_PRODUCTS)))
    for node in scaled:
        scale_product(node)
    join_rms_norms(graph, of(RMS_NORM))
    # Attentions over divided positions are modules, which serve groups on any device.
    grouped = of(GROUPED_KEYS)
    group_keys(graph, [x for x in grouped if not on_cpu or x[-1].op == "call_module"])
    if owner is not None:
        join_products(graph, [*of(JOINED_PRODUCTS), *of(GATHERED_PRODUCTS)], owner)
        owner.replace(graph, chain.from_iterable(of(OWN_GRADIENTS)))
    remaining = set(graph.graph.nodes)
    scale_products(graph, [node for node in scaled if node in remaining])
    graph.recompile()
