"""Put one node of a graph in the place of others."""

from collections.abc import Sequence

from torch import fx


def put_in_place(new: fx.Node, old: Sequence[fx.Node]) -> None:
    """Have all readers of the last of the nodes `old` read `new` instead, and erase `old`.

    old: nodes of the graph of `new`, in the order they run; none but the last is read by others.
    """
    *_, last = old
    new.meta = dict(last.meta)
    last.replace_all_uses_with(new)
    for node in reversed(old):
        node.graph.erase_node(node)
