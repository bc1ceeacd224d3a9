"""Make grouped-query attention read keys and values without repeating them.

A graph of grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) repeats each key and
value for all its queries before it attends. GPU kernels do not need these copies, which autograd
would save for the backward. On CPUs torch's fused kernel has no groups, and would not be used
(torch 2.13).
"""

from collections.abc import Iterable, Sequence

import torch
from torch import fx

_aten = torch.ops.aten


def group_keys(graph: fx.GraphModule, attentions: Iterable[Sequence[fx.Node]]) -> None:
    """Make `attentions` in `graph` read their keys and values unrepeated. Those that are torch's
    function get `enable_gqa=True`; modules see by the numbers of heads that keys are shared.

    Each item lists the operations that repeat the keys (a new dimension, its expansion, a reshape),
    the same operations for the values, and the attention itself (`Rewrite` in
    strategies/graph/rewrites.py).
    """
    for *repeating, attention in attentions:
        keys, values = repeating[:3], repeating[3:]
        shared = [_shared(graph, nodes[0], nodes[1]) for nodes in (keys, values)]
        attention.args = (attention.args[0], *shared, *attention.args[3:])
        if attention.op == "call_function":
            attention.kwargs = {**attention.kwargs, "enable_gqa": True}
        for node in dict.fromkeys((*reversed(keys), *reversed(values))):
            if not node.users:
                graph.graph.erase_node(node)


def _shared(graph: fx.GraphModule, inserted: fx.Node, expanded: fx.Node) -> fx.Node:
    """Return a key or value [batch, groups, tokens, width] before it is repeated.

    `inserted` [batch, groups, 1, tokens, width] adds the new dimension. `expanded` reads it
    directly, or after it was summed or concatenated.
    """
    (source,) = inserted.all_input_nodes
    (read,) = expanded.all_input_nodes[:1]
    if read is inserted:
        return source
    with graph.graph.inserting_after(read):
        squeezed = graph.graph.call_function(_aten.squeeze.dim, (read, 2))
    squeezed.meta = dict(read.meta)
    return squeezed
