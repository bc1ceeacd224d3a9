"""Rows come back from their experts while what needs none of them runs.

A mixture with an expert that all tokens go to (DeepSeek-V3, Qwen2-MoE) computes that one from the
layer's input, before the others or after them, and adds it last. In the graph the rows of the
others are wanted at once: here what is made of them is moved to after all products of the block
that are not, and these to after the rows have left. The backward runs in reverse, so that the same
products are under the gradients of the same rows on their way to the experts.
"""

from collections.abc import Sequence, Set

from torch import fx

from whale_train.runtime.base.node_meta import BLOCK
from whale_train.runtime.comms.expert_rows import combine, combine_begin, combine_end
from whale_train.runtime.graph.value_types import ancestors
from whale_train.runtime.loss.graph_losses import written_value
from whale_train.strategies.graph.operation_graph import LOWERED


def delay_combines(graph: fx.GraphModule) -> None:
    """Let rows be on their way in `graph` while there is other work in their block."""
    for node in [node for node in graph.graph.nodes if _function(graph, node) is combine]:
        _delay(graph, node)
    graph.recompile()


def _delay(graph: fx.GraphModule, node: fx.Node) -> None:
    block = [x for x in graph.graph.nodes if x.meta.get(BLOCK) == node.meta.get(BLOCK)]
    place = block.index(node)
    working = _working(block[:place], ancestors([node]))
    made, waiting = {node}, list[fx.Node]()
    after = set(working)  # of the rows' leaving: products that need none, and what is made of them
    for each in block[place + 1 :]:
        if made.isdisjoint(each.all_input_nodes):
            if _is_product(each) or not after.isdisjoint(each.all_input_nodes):
                after.add(each)
            continue
        if not after.isdisjoint(each.all_input_nodes):
            break  # which reads both
        made.add(each)
        waiting.append(each)
    else:
        return
    if any(written_value(x) is not None for x in (*block[: block.index(each)],)):
        return  # an order of its own
    rows, where = node.args
    owned = graph.get_submodule(str(node.target))
    begun, ended = f"{node.name}_begun", f"{node.name}_ended"
    graph.add_module(begun, type(owned)(combine_begin))
    graph.add_module(ended, type(owned)(combine_end))
    with graph.graph.inserting_before(node):
        on_its_way = graph.graph.call_module(begun, (rows, where))
    with graph.graph.inserting_before(each):
        came = graph.graph.call_module(ended, (on_its_way,))
    on_its_way.meta, came.meta = dict(node.meta), dict(node.meta)
    node.replace_all_uses_with(came)
    for moved in working:
        node.prepend(moved)
    for moved in waiting:
        each.prepend(moved)
    graph.graph.erase_node(node)


def _working(before: Sequence[fx.Node], leading: Set[fx.Node]) -> list[fx.Node]:
    """Return the products among the nodes `before` that are not `leading`, and what is made of
    them."""
    found: dict[fx.Node, None] = {}
    for node in before:
        made_of = any(x in found for x in node.all_input_nodes)
        if node not in leading and (made_of or _is_product(node)):
            found[node] = None
    return list(found)


def _function(graph: fx.GraphModule, node: fx.Node) -> object:
    if node.op != "call_module":
        return None
    return getattr(graph.get_submodule(str(node.target)), "function", None)


def _is_product(node: fx.Node) -> bool:
    parts = str(node.target).split(".")
    return node.op == "call_function" and parts[0] == "aten" and parts[1] in LOWERED
