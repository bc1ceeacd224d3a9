"""Export a model on the meta device, with a symbolic batch size (`torch.export`).

Planning and the ranks' rewritten parts share the flat graph: the same model gives the same graph,
in any process.
"""

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx, nn
from torch._C import DispatchKey
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from whale_train.errors import ConfigError
from whale_train.models.build import build_model
from whale_train.models.export.batch_bounds import ANY, KEY, said_of, suggested
from whale_train.models.export.causal_masks import say_causal
from whale_train.models.export.custom_backward import Watch
from whale_train.models.export.functionalize import CannotReplace, out_of_place
from whale_train.models.export.regions import inference_as_no_grad, keeping_regions
from whale_train.models.loss_module import MODEL_PREFIX, LossModule, forward_fields
from whale_train.models.options import ModelOptions
from whale_train.models.seeded_draws import private_seed
from whale_train.strategies.graph.operation_graph import InputField, Size

# Any batch size but 0 and 1, which torch.export would take for constants. An odd size, so that
# traced code does not mistake a multiple of the batch for something else.
EXPORT_BATCH = 3

# torch.export's name for the module of operations outside of all modules.
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"

# Checks and bookkeeping of torch.export in the graph, which compute nothing.
_BOOKKEEPING = ("_assert", "sym_constrain_range", "_guards_fn")


def export_model(
    options: ModelOptions, fields: tuple[InputField, ...]
) -> tuple[fx.GraphModule | None, str]:
    """Return the flat exported graph and '', or None and the reason why there is no graph.

    Operations of a profile have the names of the graph's nodes. The graph's tensors are on the meta
    device. The same model gives the same graph, in any process.
    """
    module, inputs = on_meta(options, fields)
    return export(module, example_batch(inputs, EXPORT_BATCH))


def on_meta(
    options: ModelOptions, fields: tuple[InputField, ...]
) -> tuple[LossModule, tuple[InputField, ...]]:
    """Return the model without weights, as a LossModule, and those of `fields` that it takes.

    Raises ConfigError for a model that cannot be built or does not take the fields.
    """
    model = model_on_meta(options)
    taken = forward_fields(model, options, fields)
    return LossModule(model, options), tuple(f for f in fields if f.name in taken)


def model_on_meta(options: ModelOptions) -> nn.Module:
    """Return the model on the meta device, without weights.

    A model whose constructor reads values is built with weights, which are then dropped. Raises
    ConfigError for a model that cannot be built.
    """
    try:
        with torch.device("meta"):
            model = build_model(options)
    except ConfigError:
        model = build_model(options)
    _leave_no_values(model)
    return model


def _leave_no_values(model: nn.Module) -> None:
    """Replace the parameters and buffers of `model` by meta tensors of the same shapes.

    Some constructors ignore the default device, as the old `torch.Tensor(2, 3)` does. Meta tensors
    are kept, and tied tensors stay tied.
    """
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        owned: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in owned:
            for name, x in held.items():
                if x is None or x.is_meta:
                    continue
                if x not in made:
                    empty = torch.empty_like(x, device="meta")
                    is_parameter = isinstance(x, nn.Parameter)
                    made[x] = nn.Parameter(empty, x.requires_grad) if is_parameter else empty
                held[name] = made[x]


def export(module: nn.Module, batch: dict[str, Tensor]) -> tuple[fx.GraphModule | None, str]:
    """Return the flat graph of `module` and '', or None and the reason why there is no graph.

    The module is called with tensors like `batch`, by name. There is no graph of a model with a
    backward that is not the derivative of the forward, with operations on all samples of a
    `torch.vmap` at once, with an in-place write that has no out-of-place form, with shapes that
    depend on the values of a tensor or not linearly on the batch size, or with computations on
    numbers read from tensors. The graph of a forward that asks for its batch size may be valid for
    some sizes only (`batch_bounds.sizes_of`).
    """
    if isinstance(module, LossModule):
        module.name(batch)
    watch = Watch(module)
    # Tensors that the forward makes without naming a device go to the batch's device.
    where = next((x.device for x in batch.values()), torch.device("cpu"))
    with (
        warnings.catch_warnings(),
        _true_shapes_of_losses(),
        keeping_regions(),
        inference_as_no_grad(),
        private_seed(),
        where,
        watch.watching(),
    ):
        warnings.simplefilter("ignore")
        sizes, program = ANY, None
        while program is None:
            bounds = {"min": sizes[0]} if sizes[0] > 1 else {}
            bounds |= {"max": sizes[1]} if sizes[1] else {}
            samples = Dim("batch", **bounds)
            try:
                program = torch.export.export(
                    module,
                    (),
                    batch,
                    dynamic_shapes={name: {0: samples} for name in batch},
                    strict=False,
                )
            except Exception as error:  # the user's forward may raise anything while traced
                if watch.draws:
                    return None, f"torch.export would lose the state of {watch.draws}"
                narrower = suggested(error, sizes)
                if narrower is None:
                    return None, said_of(error)
                sizes = narrower

    def run() -> None:
        with where:
            module(**batch)

    lost = watch.lost(run)
    if lost:
        return None, f"torch.export would lose {lost}"
    mapped = next((node for node in program.graph.nodes if _is_mapped(node)), None)
    if mapped is not None:
        return None, f"{module_path(mapped) or 'its forward'} uses torch.vmap"
    try:
        graph = flat_module(program)
    except CannotReplace as error:
        return None, f"{module_path(error.node) or 'its forward'} changes in place: {error}"
    for reads, said in (
        (_follows_values, "makes tensors whose shapes follow values of others"),
        (_is_not_linear, "makes tensors of all pairs of samples, or of a part of the batch"),
        (_is_a_value, "computes with numbers that it reads from tensors"),
    ):
        reading = next((node for node in graph.graph.nodes if reads(node)), None)
        if reading is not None:
            return None, f"{module_path(reading) or 'its forward'} {said}"
    graph.meta[KEY] = sizes
    return graph, ""


# Losses whose kernel for meta tensors is a Python function with other arguments: it takes the
# number of the reduction for the old `size_average` (torch._refs.nn.functional.nll_loss), so that
# an unreduced loss is traced as a scalar. Without this kernel torch composes the loss of other
# operations, whose shapes are right.
_MISTAKEN = (
    torch.ops.aten.nll_loss.default,
    torch.ops.aten.hinge_embedding_loss.default,
    torch.ops.aten.margin_ranking_loss.default,
)


@contextmanager
def _true_shapes_of_losses() -> Iterator[None]:
    """Trace losses on meta tensors with their true shapes inside of the context."""
    kernels = [operation.py_kernels.pop(DispatchKey.Meta, None) for operation in _MISTAKEN]
    for operation in _MISTAKEN:
        operation._dispatch_cache.clear()
    try:
        yield
    finally:
        for operation, kernel in zip(_MISTAKEN, kernels, strict=True):
            if kernel is not None:
                operation.py_kernels[DispatchKey.Meta] = kernel
            operation._dispatch_cache.clear()


def _is_mapped(node: fx.Node) -> bool:
    """Return whether a node's value stands for all samples of a `torch.vmap`.

    torch.export records such calls as for one sample. They have no meaning outside of the vmap.
    """
    values = tree_leaves(node.meta.get("val"))
    return any(isinstance(x, Tensor) and is_functorch_wrapped_tensor(x) for x in values)


def _follows_values(node: fx.Node) -> bool:
    """Return whether a node's shape has numbers read from a tensor (`tolist`, `nonzero`)."""
    values = tree_leaves(node.meta.get("val"))
    return any(isinstance(x, Tensor) and free_unbacked_symbols(x.shape) for x in values)


def size_of(extent: int | SymInt) -> Size | None:
    """Return an exported extent as a linear function of the batch size.

    Return None for an extent that is not linear in the batch size, as the number of all pairs of
    samples or half the batch.
    """
    if isinstance(extent, int):
        return Size(extent)
    expression = extent.node.expr
    if not expression.free_symbols:
        return Size(int(expression))
    if len(expression.free_symbols) > 1:
        return None
    (symbol,) = expression.free_symbols
    at = [int(expression.subs(symbol, batch)) for batch in range(8)]
    size = Size(at[0], at[1] - at[0])
    return size if at == [size.at(batch) for batch in range(8)] else None


def _is_not_linear(node: fx.Node) -> bool:
    """Return whether an extent of a node's value is not linear in the batch size."""
    values = [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
    return any(size_of(extent) is None for x in values for extent in x.shape)


def _is_a_value(node: fx.Node) -> bool:
    """Return whether a node's value is a number read from a tensor (`item`) or computed from
    one."""
    value = node.meta.get("val")
    return isinstance(value, SymInt | SymFloat | SymBool) and bool(free_unbacked_symbols(value))


def fetched(module: nn.Module, path: str) -> Any:
    """Return the attribute of `module` at a dotted `path`. Raises AttributeError where it does not
    exist."""
    owner: Any = module
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


def example_batch(inputs: tuple[InputField, ...], samples: int) -> dict[str, Tensor]:
    """Return a meta tensor `[samples, *field.shape]` for every field of `inputs`, by name.

    No two fields share a tensor, because export takes aliased inputs for one input.
    """
    return {
        field.name: torch.empty(
            (samples, *field.shape), dtype=getattr(torch, field.dtype), device="meta"
        )
        for field in inputs
    }


def canonical_names(operations: Iterable[tuple[str, str, bool]]) -> list[str]:
    """Return a unique name for each operation of a graph, in order.

    `operations` are (name, path, whether it is a call). A tensor is named by its path. Calls of one
    kind are numbered in order. Inputs and the output keep their names. torch.export's own names are
    not reproducible: they depend on operations that it traced and dropped.
    """
    entries = list(operations)
    taken = {name for name, path, call in entries if not path and not call}
    counts: dict[str, int] = {}
    names = []
    for name, path, call in entries:
        if not path and not call:
            names.append(name)
            continue
        kind = path.replace(".", "_") if path else re.sub(r"_\d+$", "", name)
        unique = kind
        while unique in taken or kind in counts:
            counts[kind] = counts.get(kind, 0) + 1
            unique = f"{kind}_{counts[kind]}"
            if unique not in taken:
                break
        counts.setdefault(kind, 0)
        taken.add(unique)
        names.append(unique)
    return names


def flat_module(program: ExportedProgram) -> fx.GraphModule:
    """Return the graph of an exported program as one module with the parameters as attributes.

    torch.export's bookkeeping is erased, writes to values with a gradient are replaced by
    out-of-place operations, causal masks are replaced by `is_causal`, and operations are named by
    `canonical_names`. Raises CannotReplace for a write to a value with a gradient that cannot be
    replaced.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = program.module()
    assert isinstance(module, fx.GraphModule)
    for graph in (
        submodule for submodule in module.modules() if isinstance(submodule, fx.GraphModule)
    ):
        _forget_bookkeeping(graph)
    out_of_place(module)
    say_causal(module)
    names = canonical_names(
        (
            node.name,
            model_path(str(node.target)) if node.op == "get_attr" else "",
            node.op.startswith("call"),
        )
        for node in module.graph.nodes
    )
    for node, name in zip(list(module.graph.nodes), names, strict=True):
        node.name = name
    module.recompile()
    return module


def _forget_bookkeeping(module: fx.GraphModule) -> None:
    """Erase torch.export's checks and bookkeeping, and numbers that nothing else reads."""
    for node in reversed(list(module.graph.nodes)):
        bookkeeping = any(mark in str(node.target) for mark in _BOOKKEEPING)
        # A number that an assertion read from a tensor is left behind as well.
        if not node.users and (bookkeeping or _is_a_value(node)):
            module.graph.erase_node(node)
    module.recompile()


def model_path(path: str) -> str:
    """Return the path in the user's model for a path in `LossModule`."""
    return path.removeprefix(MODEL_PREFIX)


def module_path(node: fx.Node) -> str:
    """Return the path, in the user's model, of the module whose forward contains a node.

    It is '' for the model itself, and for a node outside of all modules.
    """
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return "" if path in (MODEL_PREFIX.rstrip("."), _NO_MODULE) else model_path(path)
