"""Compile the regions of a graph: runs of consecutive operations of one block.

A region ends before any node that is not an operation of torch: a collective, a split loss, a
product that computes its weight's gradient itself.
"""

import operator
from collections.abc import Container, Sequence
from typing import Any

from torch import fx
from torch._ops import OpOverload

from whale_train.runtime.base.node_meta import BLOCK, MODULE
from whale_train.runtime.compile.compiler import Compiler
from whale_train.runtime.kernels.rms_norm import rms_norm
from whale_train.strategies.graph.block_paths import is_repeated, unit_of

_FEWEST = 2  # the least number of computing operations for which a region is worth its call


def compile_regions(graph: fx.GraphModule, compiler: Compiler, *units: Container[str]) -> None:
    """Replace the regions of `graph` that are worth a call by calls of code of `compiler`, in
    place. A region is inside or outside of a module in one of `units`; of the first ones, where a
    module is in several."""
    for nodes in _regions(graph.graph, units):
        if sum(map(_computes, nodes)) >= _FEWEST:
            _replace(graph, nodes, compiler)
    graph.graph.lint()
    graph.recompile()


def _regions(graph: fx.Graph, units: Sequence[Container[str]]) -> list[list[fx.Node]]:
    """Return the regions of a graph, each a list of consecutive nodes of one block, or of one of
    the modules in `units`."""
    regions: list[list[fx.Node]] = [[]]
    last = None
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        block = node.meta.get(BLOCK, "")
        module = node.meta.get(MODULE, "")
        place = next((unit for x in units if (unit := unit_of(module, x))), "")
        place = place or (block if is_repeated(block) else "")
        if place != last or not _is_torchs(node):
            regions.append([])
        last = place
        if _is_torchs(node):
            regions[-1].append(node)
    return [nodes for nodes in regions if nodes]


def _is_torchs(node: fx.Node) -> bool:
    """Return whether torch.compile sees everything that `node` does.

    Such a node changes no tensor in place, and depends on no state of an object.
    """
    if node.op != "call_function":
        return False
    if isinstance(node.target, OpOverload):
        return not node.target._schema.is_mutable
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _is_torchs(source)
    return node.target is rms_norm or getattr(node.target, "__module__", "") == "_operator"


def _computes(node: fx.Node) -> bool:
    """Return whether a node makes a tensor that is not a view."""
    if isinstance(node.target, OpOverload):
        returns = node.target._schema.returns
        results = [x for x in returns if x.alias_info is None and "Tensor" in str(x.type)]
        return bool(results) and node.target._schema.name not in _OFTEN_VIEWS
    return node.target is rms_norm


# Composite operations that return views where they can, although their schemas do not declare it.
_OFTEN_VIEWS = frozenset(("aten::reshape", "aten::contiguous", "aten::to", "aten::flatten"))


def _replace(graph: fx.GraphModule, nodes: Sequence[fx.Node], compiler: Compiler) -> None:
    """Replace a region by a call of its compiled code; do nothing if nothing reads the region's
    values."""
    inside = set(nodes)
    takes = list(dict.fromkeys(x for n in nodes for x in n.all_input_nodes if x not in inside))
    gives = [node for node in nodes if any(user not in inside for user in node.users)]
    if not gives:
        return
    region = fx.Graph()
    copies = {x: region.placeholder(f"taken_{i}") for i, x in enumerate(takes)}
    for node in nodes:
        copies[node] = region.node_copy(node, lambda x: copies[x])
    region.output(tuple(copies[node] for node in gives))
    block = nodes[0].meta.get(BLOCK, "")
    module = compiler.compiled(fx.GraphModule({}, region), _text(region), block)
    name = f"region_{nodes[0].name}"
    graph.add_module(name, module)
    meta = {BLOCK: block, MODULE: nodes[0].meta.get(MODULE, "")}
    with graph.graph.inserting_after(nodes[-1]):
        call = graph.graph.call_module(name, tuple(takes))
    call.meta = dict(meta)
    after = call
    for number, node in enumerate(gives):
        with graph.graph.inserting_after(after):
            after = graph.graph.call_function(operator.getitem, (call, number))
        after.meta = dict(meta)
        outside = [user for user in node.users if user not in inside]
        for user in outside:
            user.replace_input_with(node, after)
    for node in reversed(nodes):
        graph.graph.erase_node(node)


def _text(region: fx.Graph) -> str:
    """Return a text that is equal for regions with the same computation on their arguments."""
    number = {node: i for i, node in enumerate(region.nodes)}

    def written(value: Any) -> Any:
        return f"%{number[value]}" if isinstance(value, fx.Node) else value

    lines = []
    for node in region.nodes:
        args = fx.node.map_aggregate((node.args, node.kwargs), written)
        target = "" if node.op == "placeholder" else node._pretty_print_target(node.target)
        lines.append(f"{node.op} {target} {args!r}")
    return "\n".join(lines)
