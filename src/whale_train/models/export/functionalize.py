"""Rewrite an exported graph so that no value is changed in place.

A forward may write into a tensor that it has made: an activation in place, a residual added to a
product, an assignment to a slice. A rank cannot always run such a write. A value received from
another stage is a leaf of autograd. A value made by an autograd Function of ours may be a view. A
value whose layout the write does not take would be copied, and the write would change the copy
alone. The same operation out of place computes the same result. Readers of the changed value,
directly or through a view, get the new value.

Writes to parameters and buffers stay. So do writes without an out-of-place form to memory without a
gradient.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from whale_train.models.export.op_schemas import written_arguments

_aten = torch.ops.aten
_SAME_ELEMENTS = (  # views with the same elements in the same order
    *("view", "_unsafe_view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "ravel"),
    *("unsqueeze", "squeeze", "alias", "contiguous", "to", "type_as", "float", "dropout"),
)
_OTHER_VIEWS = ("slice", "select", "transpose", "t", "permute")
_SETS = ("copy_", "fill_", "zero_")  # writes that read nothing of the old value

Writes = Mapping[fx.Node, fx.Node]  # calls, and the values they write to


class CannotReplace(Exception):
    """A write has no out-of-place form. The message names the operation, `node` is the write."""

    def __init__(self, node: fx.Node, message: str) -> None:
        super().__init__(message)
        self.node = node


def out_of_place(module: fx.GraphModule) -> None:
    """Replace the writes in the graph of `module`. A graph without writes is unchanged.

    Raises CannotReplace for a write that cannot be replaced and whose memory has a gradient.
    """
    graph = module.graph
    writes = _replaceable(module)
    values = _Values(graph, writes)
    for node in list(graph.nodes) if writes else ():
        with graph.inserting_before(node):
            node.args = fx.node.map_arg(node.args, values.latest)
            node.kwargs = fx.node.map_arg(node.kwargs, values.latest)
            if node in writes:
                values.write(node)
    for node in reversed(list(graph.nodes)):
        if node in writes or (node in values.parents and not node.users):
            graph.erase_node(node)


class _Values:
    """The latest values of a graph while its writes are replaced, from the first to the last.

    `parents` maps every view of written memory to its base value. A view that was made before a
    write to its memory is made again where it is read.
    """

    def __init__(self, graph: fx.Graph, writes: Writes) -> None:
        self.parents = _parents(graph, writes)
        self._graph, self._writes = graph, writes
        self._version = dict.fromkeys(map(_memory, writes), 0)
        self._made: dict[fx.Node, tuple[fx.Node, int]] = {}

    def latest(self, node: fx.Node) -> fx.Node:
        """Return the node with the value of `node` at this place of the graph."""
        version = self._version.get(_memory(node), 0)
        if not version:
            return node
        node = _named(node, self._writes)
        value, made = self._made.get(node, (node, 0))
        # A value that is not a view was replaced when it was written.
        if made != version and node in self.parents:
            value = self._graph.node_copy(node, self.latest)
            self._made[node] = value, version
        return value

    def write(self, node: fx.Node) -> None:
        """Insert the new value of the write `node` at this place of the graph.

        The arguments of `node` must be the latest values.
        """
        chain = list(_chain(node, self._writes, self.parents))
        before = [self.latest(value) for value in chain]
        self._version[_memory(node)] += 1
        version = self._version[_memory(node)]
        new = _without_writing(self._graph, node)
        self._made[chain[0]] = new, version
        for (view, parent), base in zip(pairwise(chain), before[1:], strict=True):
            new = _put_back(self._graph, view, base, new)
            new.meta = dict(node.meta) | {"val": parent.meta["val"]}
            self._made[parent] = new, version


def _replaceable(module: fx.GraphModule) -> Writes:
    """Return the writes that are to be replaced: of the writes to one memory, all or none.

    Raises CannotReplace for a write without an out-of-place form to memory with a gradient.
    """
    parameters = {
        path for path, p in module.named_parameters(remove_duplicate=False) if p.requires_grad
    }
    held: set[int] = set()
    trained: set[fx.Node] = set()
    with_gradient: set[int] = set()
    writes: dict[fx.Node, fx.Node] = {}
    problems: dict[int, CannotReplace] = {}  # by memory
    for node in module.graph.nodes:
        memory = _memory(node)
        if node.op == "get_attr":
            held.add(memory)
            if node.target in parameters:
                trained.add(node)
            continue
        for target in _written(module, node):
            if target is node.args[0] and _memory(target) == memory:
                writes[node] = target
            else:
                problems[_memory(target)] = CannotReplace(node, str(node.target))
        reached = memory in with_gradient or any(x in trained for x in node.all_input_nodes)
        if reached and _can_have_gradient(node):
            trained.add(node)
            with_gradient |= {memory} - {0}
    parents = _parents(module.graph, writes)
    for node in writes:
        views = [x for x in _chain(node, writes, parents) if x in parents]
        unknown = [x for x in views if _name(x) not in (*_SAME_ELEMENTS, *_OTHER_VIEWS)]
        if unknown or _function(node) is None:
            said = f"{node.target} of {unknown[0].target}" if unknown else str(node.target)
            problems.setdefault(_memory(node), CannotReplace(node, said))
    left = {_memory(node) for node in writes} & problems.keys() - held
    for memory in left & with_gradient:
        raise problems[memory]
    return {node: x for node, x in writes.items() if _memory(node) not in held | left}


def _memory(node: fx.Node) -> int:
    """Return a number that identifies the memory of a node's value; 0 for a value that is not a
    tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else 0


def _written(module: fx.GraphModule, node: fx.Node) -> Iterator[fx.Node]:
    """Yield the values that a call writes to.

    A call that runs a graph with writes counts as writing to all tensors that it reads.
    """
    if _runs_writes(module, node):
        yield from (x for x in node.all_input_nodes if _memory(x))
    yield from written_arguments(node)


def _runs_writes(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a call runs a graph that contains writes."""
    inner = [str(x.target) for x in node.all_input_nodes if x.op == "get_attr" and not _memory(x)]
    modules = dict(module.named_modules(remove_duplicate=False)) if inner else {}
    graphs = [x for x in map(modules.get, inner) if isinstance(x, fx.GraphModule)]
    return any(any(_written(graph, call)) for graph in graphs for call in graph.graph.nodes)


def _can_have_gradient(node: fx.Node) -> bool:
    """Return whether a node returns a floating-point tensor that autograd may track."""
    values = node.meta.get("val")
    outputs = values if isinstance(values, list | tuple) else [values]
    floating = any(isinstance(x, Tensor) and x.is_floating_point() for x in outputs)
    return floating and node.target is not _aten.detach.default


def _parents(graph: fx.Graph, writes: Writes) -> dict[fx.Node, fx.Node]:
    """Return the base value of each view of written memory, by the view."""
    memories = set(map(_memory, writes))
    parents = {}
    for node in graph.nodes:
        if _memory(node) in memories and node not in writes:
            same = [x for x in node.all_input_nodes if _memory(x) == _memory(node)]
            if same:
                parents[node] = _named(same[0], writes)
    return parents


def _named(node: fx.Node, writes: Writes) -> fx.Node:
    """Return the value that `node` writes to, or `node` itself where it is not a write."""
    while node in writes:
        node = writes[node]
    return node


def _chain(node: fx.Node, writes: Writes, parents: Mapping[fx.Node, fx.Node]) -> Iterator[fx.Node]:
    """Yield the value that `node` is or writes to, the base value of that, and so on."""
    node = _named(node, writes)
    yield node
    while node in parents:
        node = parents[node]
        yield node


def _function(write: fx.Node) -> Any:
    """Return the out-of-place operation with the result of `write`, or None where torch has none.

    A write that sets every element returns its own operation, which `_without_writing` replaces.
    """
    target: Any = write.target
    if _name(write) in _SETS:
        return target
    packet = getattr(_aten, _name(write).removesuffix("_"), None)
    if packet is None or torch.Tag.inplace_view in target.tags:
        return None
    return getattr(packet, target._overloadname, None)


def _without_writing(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Add calls to `graph` that compute the result of the write `node`, and return the new value.

    The new value has the dtype of the value that `node` writes to.
    """
    arguments: list[Any] = list(node.args)
    into, *others = arguments

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = _called(graph, target, *args, **kwargs)
        made.meta = dict(node.meta)
        return made

    name = _name(node)
    if name == "zero_":
        return call(_aten.zeros_like.default, into)
    if name == "fill_" and not isinstance(others[0], fx.Node):
        return call(_aten.full_like.default, into, others[0])
    if name in _SETS:
        made = call(_aten.type_as.default, others[0], into)
        is_wider = others[0].meta["val"].shape != into.meta["val"].shape
        return call(_aten.expand_as.default, made, into) if is_wider else made
    made = call(_function(node), *arguments, **node.kwargs)
    # In half precision, type promotion may choose another operand's dtype than when exported.
    operands = [x for x in node.all_input_nodes if x is not into]
    return call(_aten.type_as.default, made, into) if operands else made


def _put_back(graph: fx.Graph, view: fx.Node, base: fx.Node, new: fx.Node) -> fx.Node:
    """Return the value of `base` after its part `view` is replaced by `new`, as a node of
    `graph`."""
    kind, args = _name(view), list[Any](view.args[1:])
    part, shape = view.meta["val"].shape, base.meta["val"].shape
    if part == shape and kind in ("slice", *_SAME_ELEMENTS):
        return new
    match kind:
        case "slice":
            return _called(graph, _aten.slice_scatter.default, base, new, *args)
        case "select":
            return _called(graph, _aten.select_scatter.default, base, new, *args)
        case "transpose" | "t":
            return _called(graph, view.target, new, *args)
        case "permute":
            order = [dim % len(shape) for dim in args[0]]
            back = [order.index(dim) for dim in range(len(shape))]
            return _called(graph, _aten.permute.default, new, back)
    # At most one extent depends on the batch size.
    extents = [extent if isinstance(extent, int) else -1 for extent in shape]
    return _called(graph, _aten.reshape.default, new, extents)


def _called(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Add a call to `graph`, with torch.export's name for it, and return its node."""
    name = target._schema.name.partition("::")[2]
    return graph.create_node("call_function", target, args, kwargs, name)


def _name(node: fx.Node) -> str:
    """Return the name of a node's operation without its overload: `mul` for aten.mul.Tensor."""
    return str(node.target).removeprefix("aten.").partition(".")[0]
