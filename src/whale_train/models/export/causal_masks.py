"""Replace causal attention masks by attention's `is_causal`.

A model of transformers computes its mask from positions, and an export has it as a tensor [batch,
1, queries, keys]. Kernels that skip the hidden half of a causal mask take no mask (FlashAttention,
Dao 2023, arXiv 2307.08691). With a mask, attention runs in another kernel, does twice the work, and
reads a dense mask in every layer. A mask that depends only on the batch size is a constant. It is
computed here, and where it is the lower triangle, attention gets `is_causal` in its place.
"""

from typing import Any

import torch
from torch import SymInt, Tensor, fx

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_SIZE = torch.ops.aten.sym_size.int
_BATCH = 2
# The most elements of a mask that is computed: 16,384 tokens.
_MOST_ELEMENTS = 1 << 28


def say_causal(module: fx.GraphModule) -> int:
    """Replace masks that are proven causal in the graph of `module` by `is_causal`.

    Nodes that only these masks needed are erased. Returns the number of attention calls that were
    changed.
    """
    proven: dict[fx.Node, bool] = {}
    made: dict[fx.Node, Any] = {}
    num_replaced = 0
    for node in list(module.graph.nodes):
        mask = _mask_of(node)
        if mask is None or (len(node.args) > 5 and node.args[5]):
            continue
        if mask not in proven:
            proven[mask] = _is_lower_triangle(mask, node, made)
        if proven[mask]:
            query, key, value = node.args[:3]
            dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
            node.args = (query, key, value, None, dropout, True)
            left_out = ("attn_mask", "dropout_p", "is_causal")
            node.kwargs = {k: v for k, v in node.kwargs.items() if k not in left_out}
            num_replaced += 1
    for mask in (mask for mask, is_causal in proven.items() if is_causal):
        _erase(module.graph, mask)
    return num_replaced


def _mask_of(node: fx.Node) -> fx.Node | None:
    """Return the mask of an attention call, or None for a call without a mask and for any other
    node."""
    if node.target is not _ATTENTION:
        return None
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    return mask if isinstance(mask, fx.Node) else None


def _is_lower_triangle(mask: fx.Node, attention: fx.Node, made: dict[fx.Node, Any]) -> bool:
    """Return whether the mask of an attention is the lower triangle for every batch.

    Every query then sees the keys up to its own place and no others. `made` has the known values of
    nodes; newly computed values are added.
    """
    value = mask.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype != torch.bool or value.dim() < 2:
        return False
    queries, keys = value.shape[-2:]
    query, key = (x.meta["val"].shape[-2] for x in attention.args[:2] if isinstance(x, fx.Node))
    if not isinstance(queries, int) or queries != keys or (query, key) != (queries, keys):
        return False
    if queries * keys > _MOST_ELEMENTS:
        return False
    try:
        computed = _computed(mask, made)
    except _NoConstant:
        return False
    triangle = torch.ones(queries, keys, dtype=torch.bool).tril()
    return bool((computed == triangle).all())


class _NoConstant(Exception):
    """The value of a node depends on the values of the batch."""


def _computed(node: fx.Node, made: dict[fx.Node, Any]) -> Any:
    """Return the value of `node` for a batch of two samples, on the CPU.

    `made` has the known values of nodes; newly computed values are added. Raises _NoConstant where
    the value depends on the values of the batch.
    """
    waiting = [node]
    while waiting:
        current = waiting[-1]
        if current in made:
            waiting.pop()
            continue
        if current.target is _SIZE:
            size = current.meta.get("val")
            # The batch size is the only size that is not a number.
            made[current] = _BATCH if isinstance(size, SymInt) else size
            continue
        if current.op != "call_function" or not _is_pure(current.target):
            raise _NoConstant(current.name)
        missing = [x for x in current.all_input_nodes if x not in made]
        if missing:
            waiting += missing
            continue

        def argument(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return made[value]
            return torch.device("cpu") if isinstance(value, torch.device) else value

        args = fx.node.map_aggregate(current.args, argument)
        kwargs = fx.node.map_aggregate(current.kwargs, argument)
        try:
            made[current] = current.target(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:  # operations raise errors of many kinds for such values
            raise _NoConstant(current.name) from error
    return made[node]


def _is_pure(target: Any) -> bool:
    """Return whether an operation is deterministic and writes to none of its arguments."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    is_random = torch.Tag.nondeterministic_seeded in target.tags
    return not (is_random or target._schema.is_mutable)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node that no other node reads, and then the nodes that only it read."""
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current.users or current.op != "call_function" or current._erased:
            continue
        read = list(current.all_input_nodes)
        graph.erase_node(current)
        waiting += read
