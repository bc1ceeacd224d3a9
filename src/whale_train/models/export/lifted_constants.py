"""Find the values of tensors that a forward makes itself (`x[:, [0, 2]]`, `torch.tensor(scale)`).

A graph exported on the meta device has no such values. They are taken from a second export of the
same model, on the CPU. This file matches the constants of the two graphs.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, fx

from whale_train.models.export.export import EXPORT_BATCH, example_batch, export, fetched
from whale_train.models.loss_module import LossModule
from whale_train.strategies.graph.operation_graph import InputField

_LIFTED = "lifted_tensor_"  # the beginning of torch.export's names for constants of a forward


def with_constants(
    graph: fx.GraphModule, module: LossModule, inputs: tuple[InputField, ...]
) -> fx.GraphModule:
    """Give `graph` the values of the constants that its forward makes, and return it.

    The values come from an export of `module`, the same model with its weights. A graph whose
    constants all have values is returned unchanged. Raises LookupError for a constant without a
    match.
    """
    held = {name for name, _ in (*module.named_parameters(remove_duplicate=False),
                                 *module.named_buffers(remove_duplicate=False))}  # fmt: skip
    lost = []
    for path in _constants(graph):
        value = fetched(graph, path)
        if path in held or not isinstance(value, Tensor) or not value.is_meta:
            continue
        if value.numel():
            lost.append(path)
        else:  # an empty tensor, such as a cache before its first token
            _put(graph, path, torch.empty_like(value, device="cpu"))
    if not lost:
        return graph
    taken = {str(node.target) for node in graph.graph.nodes if node.op == "placeholder"}
    fields = tuple(field for field in inputs if field.name in taken)
    batch = {
        name: torch.zeros_like(x, device="cpu")
        for name, x in example_batch(fields, EXPORT_BATCH).items()
    }
    exported, error = export(module, batch)
    assert exported is not None, error
    same = dict(_same(graph, exported))
    for path in lost:
        _put(graph, path, fetched(exported, same.get(path, path)).detach().clone())
    return graph


def _constants(graph: fx.GraphModule) -> list[str]:
    """Return the paths of the attributes that `graph` reads, without repetitions."""
    return list(dict.fromkeys(str(node.target) for node in graph.graph.find_nodes(op="get_attr")))


class _Origin(NamedTuple):
    """Place of a lifted constant.

    line: number of the line of code that reads the constant.
    path: path of the constant in the graph.
    """

    line: str
    path: str


def _same(ours: fx.GraphModule, theirs: fx.GraphModule) -> Iterator[tuple[str, str]]:
    """Yield the path in `ours` and the path in `theirs` of each lifted constant of `ours`.

    The numbers in torch.export's names cannot be compared: on the CPU, an assigned number (`x[:, 0]
    = 1`) is lifted as well. Constants with equal module, function, shape and dtype are matched in
    their order. Where the two graphs have different numbers of them, only those of `theirs` count
    that are read in the same lines of code. Lines decide only then, because a call over several
    lines may be recorded at any of them. Raises LookupError where the numbers still differ.
    """
    others = _lifted(theirs)
    for kind, places in _lifted(ours).items():
        matches = others.get(kind, [])
        if len(matches) != len(places):
            lines = {place.line for place in places}
            matches = [place for place in matches if place.line in lines]
        if len(matches) != len(places):
            raise LookupError(f"the values of tensors made in {kind[1] or kind[0]} are not found")
        yield from ((a.path, b.path) for a, b in zip(places, matches, strict=True))


def _lifted(
    graph: fx.GraphModule,
) -> dict[tuple[str, str, torch.Size, torch.dtype], list[_Origin]]:
    """Return the lifted constants, in their order, by (module, function, shape, dtype)."""
    origins = defaultdict(list)
    readers: dict[str, fx.Node] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        readers.setdefault(str(node.target), node)
    for path, node in readers.items():
        owner, _, name = path.rpartition(".")
        if not name.startswith(_LIFTED):
            continue
        trace = next((user.stack_trace for user in node.users if user.stack_trace), "")
        # The last two lines of a trace: File "...", line 7, in forward; and the code.
        where = trace.splitlines()[-2] if trace.count("\n") else ""
        file, _, rest = where.strip().partition(", line ")
        line, _, function = rest.partition(", in ")
        value = fetched(graph, path)
        kind = owner, f"{function} of {file}" if file else "", value.shape, value.dtype
        origins[kind].append(_Origin(line, path))
    return origins


def _put(graph: fx.GraphModule, path: str, value: Tensor) -> None:
    """Replace the attribute of `graph` at `path` by a buffer with `value`."""
    owner, _, name = path.rpartition(".")
    parent = graph.get_submodule(owner)
    delattr(parent, name)
    parent.register_buffer(name, value)
