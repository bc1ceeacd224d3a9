"""Replace nodes of a graph."""

from collections.abc import Sequence

from torch import fx


def replace_nodes(new: fx.Node, old: Sequence[fx.Node]) -> None:
    """Replace the nodes `old` by `new`, which all readers of the last old node then read.

    old: nodes of the graph of `new`, in the order they run; only the last has readers outside
    `old`.
    """
    *_, last = old
    new.meta = dict(last.meta)
    last.replace_all_uses_with(new)
    for node in reversed(old):
        node.graph.erase_node(node)
