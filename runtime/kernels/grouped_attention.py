"""Let attention whose queries share keys read the keys and values without repeating them.

A graph of grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) repeats each key and
value for all its queries before it attends. Kernels for GPUs need no such copies, which would be
kept for the backward. On CPUs torch's fused kernel knows no groups, and would be lost (torch 2.13).
"""

from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention.default


def group_keys(graph: fx.GraphModule) -> int:
    """Replace repeated keys and values of the attentions in `graph` by the unrepeated ones.

    Return the number of attentions changed; each gets `enable_gqa=True`.
    """
    num_replaced = 0
    for node in list(graph.graph.nodes):
        if node.target is not _ATTENTION or node.kwargs.get("enable_gqa"):
            continue
        key, value = (_before_repeating(x) for x in node.args[1:3])
        if key is None or value is None or key[1] != value[1]:
            continue
        repeated = node.args[1:3]
        node.args = (node.args[0], _shared(graph, key[0]), _shared(graph, value[0]), *node.args[3:])
        node.kwargs = {**node.kwargs, "enable_gqa": True}
        for old in repeated:
            _erase(graph.graph, old)
        num_replaced += 1
    graph.recompile()
    return num_replaced


def _before_repeating(node: Any) -> tuple[fx.Node, int] | None:
    """Return the unrepeated value behind `node`, and how many times each group is repeated.

    `node` is [batch, groups x times, tokens, width], and the unrepeated value [batch, groups, 1,
    tokens, width]. Return None where `node` is no such value.
    """
    if not isinstance(node, fx.Node) or node.target is not _aten.reshape.default:
        return None
    expanded, sizes = node.args[:2]
    if not isinstance(expanded, fx.Node) or expanded.target is not _aten.expand.default:
        return None
    inserted, wide = expanded.args[:2]
    made = inserted
    while isinstance(made, fx.Node) and made.op == "call_module":  # summed or joined meanwhile
        (made,) = made.all_input_nodes
    if not isinstance(made, fx.Node) or made.target is not _aten.unsqueeze.default:
        return None
    if made.args[1] != 2 or not isinstance(inserted, fx.Node):
        return None
    if not isinstance(wide, list | tuple) or not isinstance(sizes, list | tuple):
        return None
    if len(wide) != 5 or len(sizes) != 4:
        return None
    groups, times, merged = wide[1], wide[2], sizes[1]
    if not (isinstance(groups, int) and isinstance(times, int)) or groups * times != merged:
        return None
    return inserted, times


def _shared(graph: fx.GraphModule, inserted: fx.Node) -> Any:
    """Return `inserted` [batch, groups, 1, tokens, width] as [batch, groups, tokens, width]."""
    if inserted.op == "call_function":
        return inserted.args[0]
    with graph.graph.inserting_after(inserted):
        made = graph.graph.call_function(_aten.squeeze.dim, (inserted, 2))
    made.meta = dict(inserted.meta)
    return made


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase the repetition `node` and the operations before it that nothing else reads."""
    while not node.users and node.op == "call_function" and node.target in _REPEATING:
        (before, *_) = node.all_input_nodes
        graph.erase_node(node)
        node = before


_REPEATING = (_aten.reshape.default, _aten.expand.default, _aten.unsqueeze.default)
