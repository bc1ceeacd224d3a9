"""Overlap the return of rows from their experts with products that do not need these rows.

A mixture with a shared expert, which all tokens go to (DeepSeek-V3, Qwen2-MoE), computes the shared
expert from the layer's input, before the routed experts or after them, and adds it last. In the
exported graph the operations on the routed rows follow the combine directly. Here these operations
move behind all independent products of the block, and the independent products move behind the
start of the combine. The backward runs in reverse, so the same products overlap with the gradients
of the rows on their way to the experts.
"""

from collections.abc import Sequence, Set

from torch import fx

from whale_train.runtime.base.node_meta import BLOCK
from whale_train.runtime.comms.expert_rows import combine, combine_begin, combine_end
from whale_train.runtime.graph.value_types import ancestors
from whale_train.strategies.graph.operation_graph import LOWERED


def delay_combines(graph: fx.GraphModule, changing: Set[fx.Node]) -> None:
    """Split each combine in `graph` into a start and a wait, with other work between.

    `changing` are the nodes that change a value in place.
    """
    for node in [node for node in graph.graph.nodes if _function(graph, node) is combine]:
        _delay(graph, node, changing)
    graph.recompile()


def _delay(graph: fx.GraphModule, node: fx.Node, changing: Set[fx.Node]) -> None:
    """Split the combine `node`, if an operation of its block reads its rows and other work.

    The graph stays as it is where no operation reads both. It stays, too, where an operation of the
    block writes a value in place before that reader: the order of operations is then fixed.
    """
    block = [x for x in graph.graph.nodes if x.meta.get(BLOCK) == node.meta.get(BLOCK)]
    place = block.index(node)
    working = _working(block[:place], ancestors([node]))
    made, waiting = {node}, list[fx.Node]()
    # Operations that may run while rows travel: independent products and their dependents.
    after = set(working)
    for reader in block[place + 1 :]:
        if made.isdisjoint(reader.all_input_nodes):
            if _is_product(reader) or not after.isdisjoint(reader.all_input_nodes):
                after.add(reader)
            continue
        if not after.isdisjoint(reader.all_input_nodes):
            break  # this reader needs both
        made.add(reader)
        waiting.append(reader)
    else:
        return
    if not changing.isdisjoint(block[: block.index(reader)]):
        return  # writes in place fix the order
    rows, where = node.args
    owned = graph.get_submodule(str(node.target))
    begun, ended = f"{node.name}_begun", f"{node.name}_ended"
    graph.add_module(begun, type(owned)(combine_begin))
    graph.add_module(ended, type(owned)(combine_end))
    with graph.graph.inserting_before(node):
        on_its_way = graph.graph.call_module(begun, (rows, where))
    with graph.graph.inserting_before(reader):
        came = graph.graph.call_module(ended, (on_its_way,))
    on_its_way.meta, came.meta = dict(node.meta), dict(node.meta)
    node.replace_all_uses_with(came)
    for moved in working:
        node.prepend(moved)
    for moved in waiting:
        reader.prepend(moved)
    graph.graph.erase_node(node)


def _working(before: Sequence[fx.Node], leading: Set[fx.Node]) -> list[fx.Node]:
    """Return the products among the nodes `before` that are not in `leading`, and dependents.

    `leading` are the nodes that the combine depends on. Dependents are nodes of `before` that read
    one of the products, directly or not, and are not in `leading`.
    """
    independent: dict[fx.Node, None] = {}
    for node in before:
        made_of = any(x in independent for x in node.all_input_nodes)
        if node not in leading and (made_of or _is_product(node)):
            independent[node] = None
    return list(independent)


def _function(graph: fx.GraphModule, node: fx.Node) -> object:
    """Return the function that a `call_module` node calls, or None for other nodes."""
    if node.op != "call_module":
        return None
    return getattr(graph.get_submodule(str(node.target)), "function", None)


def _is_product(node: fx.Node) -> bool:
    parts = str(node.target).split(".")
    return node.op == "call_function" and parts[0] == "aten" and parts[1] in LOWERED
