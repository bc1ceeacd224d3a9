"""What a model is and what it costs, measured on the meta device: no weights, no devices.

The model is exported once with a batch of unknown size (`torch.export`, design §7); its
graph becomes the torch-free `OperationGraph` all planning works on, and is kept for the ranks
that run a rewritten part of it. A model that cannot be exported is measured as it is.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.utils.flop_counter import FlopCounterMode

from whale_train.errors import ConfigError
from whale_train.models.build import build_model
from whale_train.models.loss import MODEL_PREFIX, LossModule, forward_fields
from whale_train.models.options import ModelOptions
from whale_train.strategies.operations import (
    Argument,
    InputField,
    ModelProfile,
    Operation,
    OperationGraph,
    Parameter,
    Ref,
    Shape,
    Size,
)

# Any batch but 0 and 1, which torch.export would take for constants. Odd sizes, so that a
# multiple of the batch is not mistaken for something else by the code being traced.
EXPORT_BATCH = 3

# Checks and bookkeeping that torch.export leaves in the graph: they compute nothing.
_BOOKKEEPING = ("_assert", "sym_constrain_range", "_guards_fn")


def profile_model(options: ModelOptions, name: str, fields: tuple[InputField, ...]) -> ModelProfile:
    """Build on the meta device, export, and measure one training step.

    Raises ConfigError for a class that cannot be built or does not take the data's fields.
    """
    module, inputs = _on_meta(options, fields)
    batch = example_batch(inputs, EXPORT_BATCH)
    exported, error = _export(module, batch)
    if exported is None:
        branches = not _runs(module, batch)
        if branches:  # it looks at values, which the meta device has none of
            module = LossModule(build_model(options), options)
            batch = {name: torch.zeros_like(x, device="cpu") for name, x in batch.items()}
        losses: list[Tensor] = []
        flops, activation_bytes = _measure(
            lambda batch: losses.append(module(**batch)), batch, module
        )
        graph, unused = None, _without_gradient(module.model, losses[0])
    else:
        interpreter = _CountingInterpreter(exported)
        flops, activation_bytes = _measure(interpreter.run_batch, batch, exported)
        graph = operation_graph(exported, interpreter.flops)
        branches, unused = False, _unused(module.model, graph)
    model = module.model
    return ModelProfile(
        name=name,
        parameters=_parameters(model),
        inputs=inputs,
        forward_flops=flops / EXPORT_BATCH,
        activation_bytes=activation_bytes / EXPORT_BATCH,
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        graph=graph,
        export_error=error,
        batch_norm_modules=tuple(
            path
            for path, child in model.named_modules()
            if isinstance(child, nn.modules.batchnorm._BatchNorm)
        ),
        unused_parameters=() if branches else unused,
        perhaps_unused=unused if branches else (),
    )


def export_model(
    options: ModelOptions, fields: tuple[InputField, ...]
) -> tuple[fx.GraphModule | None, str]:
    """The flat exported graph a profile's operations name, its tensors on the meta device; or
    None and the reason. The same model gives the same graph, in any process."""
    module, inputs = _on_meta(options, fields)
    return _export(module, example_batch(inputs, EXPORT_BATCH))


def with_constants(
    graph: fx.GraphModule, module: LossModule, inputs: tuple[InputField, ...]
) -> fx.GraphModule:
    """`graph` with the constants of the forward (`x[:, [0, 2]]`), which have no values on the meta
    device: found by exporting `module`, the same model with its weights. A graph that has none
    is returned as it is."""
    held = {
        path for path, _ in (*module.named_parameters(remove_duplicate=False),
                             *module.named_buffers(remove_duplicate=False))
    }  # fmt: skip
    lost = [
        str(node.target)
        for node in graph.graph.nodes
        if node.op == "get_attr" and node.target not in held and _is_lost(graph, str(node.target))
    ]
    if not lost:
        return graph
    taken = {str(node.target) for node in graph.graph.nodes if node.op == "placeholder"}
    fields = tuple(field for field in inputs if field.name in taken)
    batch = {
        name: torch.zeros_like(x, device="cpu")
        for name, x in example_batch(fields, EXPORT_BATCH).items()
    }
    found, error = _export(module, batch)
    assert found is not None, error
    for path in lost:
        owner, _, name = path.rpartition(".")
        parent = graph.get_submodule(owner)
        delattr(parent, name)
        parent.register_buffer(name, _fetched(found, path).detach().clone())
    return graph


def _is_lost(graph: fx.GraphModule, path: str) -> bool:
    value = _fetched(graph, path)
    return isinstance(value, Tensor) and value.is_meta and value.numel() > 0


def _fetched(module: nn.Module, path: str) -> Any:
    owner: Any = module
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


def example_batch(inputs: tuple[InputField, ...], samples: int) -> dict[str, Tensor]:
    """Meta tensors shaped like a batch. Each its own: export takes aliased inputs for one."""
    return {
        field.name: torch.empty(
            (samples, *field.shape), dtype=getattr(torch, field.dtype), device="meta"
        )
        for field in inputs
    }


def flat_module(program: ExportedProgram) -> fx.GraphModule:
    """The exported graph with parameters as attributes, without torch.export's bookkeeping."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = program.module()
    assert isinstance(module, fx.GraphModule)
    for node in reversed(list(module.graph.nodes)):
        if any(mark in str(node.target) for mark in _BOOKKEEPING) and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return module


def operation_graph(module: fx.GraphModule, flops: dict[str, float]) -> OperationGraph:
    """The torch-free image of `module.graph`; `flops` per operation are for the export batch."""
    # One that is frozen is a constant to all planning.
    parameters = {
        path: p for path, p in module.named_parameters(remove_duplicate=False) if p.requires_grad
    }
    changes = _changes_in_place(module.graph)
    return OperationGraph(
        tuple(
            Operation(
                name=node.name,
                target=_target(node, parameters),
                args=tuple(_argument(x) for x in node.args),
                kwargs=tuple((key, _argument(x)) for key, x in node.kwargs.items()),
                shape=_shape(node, module),
                dtype=_dtype(node, module),
                module=module_path(node),
                path=model_path(str(node.target)) if node.op == "get_attr" else "",
                flops=flops.get(node.name, 0.0) / EXPORT_BATCH,
                after=changes.get(node.name, ()),
            )
            for node in module.graph.nodes
        )
    )


def model_path(path: str) -> str:
    """A path inside `LossModule` as the user's model calls it."""
    return path.removeprefix(MODEL_PREFIX)


def _on_meta(
    options: ModelOptions, fields: tuple[InputField, ...]
) -> tuple[LossModule, tuple[InputField, ...]]:
    with torch.device("meta"):
        model = build_model(options)
    taken = forward_fields(model, options, fields)
    return LossModule(model, options), tuple(f for f in fields if f.name in taken)


def _export(module: nn.Module, batch: dict[str, Tensor]) -> tuple[fx.GraphModule | None, str]:
    samples = Dim("batch")
    # What the forward makes without saying where is made where the batch is.
    where = next((x.device for x in batch.values()), torch.device("cpu"))
    with warnings.catch_warnings(), where:
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(
                module,
                (),
                batch,
                dynamic_shapes={name: {0: samples} for name in batch},
                strict=False,
            )
        except Exception as error:  # whatever the user's forward raises while it is traced
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return None, f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    return flat_module(program), ""


def _measure(
    run: Callable[[dict[str, Tensor]], Any], batch: dict[str, Tensor], module: nn.Module
) -> tuple[float, float]:
    """(forward FLOPs, bytes kept for backward) of one call on `batch`."""
    with _counting_saved_tensors(module) as saved, FlopCounterMode(display=False) as counter:
        run(batch)
    return float(counter.get_total_flops()), float(sum(saved.values()))


@contextmanager
def _counting_saved_tensors(module: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of each storage that autograd keeps, by storage. What `module` holds anyway, which a
    product saves as a view of its weight, is left out."""
    held = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    saved: dict[int, int] = {}
    alive: list[Tensor] = []  # a freed storage's number would be used again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in held:
            saved[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


class _CountingInterpreter(fx.Interpreter):
    """Runs a graph on meta tensors and notes the FLOPs each operation adds."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.flops: dict[str, float] = {}

    def run_batch(self, batch: dict[str, Tensor]) -> Any:
        # Placeholders are named after the arguments; the interpreter takes them in order.
        names = [str(node.target) for node in self.graph.nodes if node.op == "placeholder"]
        with FlopCounterMode(display=False) as self.counter:
            return self.run(*(batch[name] for name in names))

    def run_node(self, n: fx.Node) -> Any:
        before = self.counter.get_total_flops()
        value = super().run_node(n)
        self.flops[n.name] = float(self.counter.get_total_flops() - before)
        return value


def _parameters(model: nn.Module) -> tuple[Parameter, ...]:
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for path, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(path)
        tensors[id(tensor)] = tensor
    return tuple(
        Parameter(paths[0], tuple(tensors[i].shape), tensors[i].element_size(), tuple(paths[1:]))
        for i, paths in names.items()
        if tensors[i].requires_grad
    )


def _runs(module: LossModule, batch: dict[str, Tensor]) -> bool:
    """Whether it runs on the meta device."""
    try:
        module(**batch)
    except ConfigError:
        raise
    except Exception:  # whatever the user's forward raises without values to look at
        return False
    return True


def _without_gradient(model: nn.Module, loss: Tensor) -> tuple[str, ...]:
    """Parameters the loss does not depend on, as autograd sees it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    paths = [x.path for x in _parameters(model)]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return tuple(path for path, g in zip(paths, gradients, strict=True) if g is None)


def _unused(model: nn.Module, graph: OperationGraph) -> tuple[str, ...]:
    """Parameters the loss does not depend on."""
    loss = set(graph.operations[-1].inputs[:1])
    reached = {graph[name].path for name in graph.ancestors(loss)}
    return tuple(
        p.path for p in _parameters(model) if not reached.intersection((p.path, *p.aliases))
    )


def _target(node: fx.Node, parameters: dict[str, nn.Parameter]) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        if isinstance(node.meta.get("val"), nn.Module) or _is_graph(node):
            return "graph"
        return "parameter" if node.target in parameters else "buffer"
    if node.op == "output":
        return "output"
    return str(node.target)


def _argument(value: Any) -> Argument:
    if isinstance(value, fx.Node):
        return Ref(value.name)
    if isinstance(value, list | tuple):
        return tuple(_argument(x) for x in value)
    if isinstance(value, dict):
        return tuple(_argument(x) for x in value.values())
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _value(node: fx.Node, module: fx.GraphModule) -> Any:
    if node.op != "get_attr":
        return node.meta.get("val")
    return _fetched(module, str(node.target))


def _shape(node: fx.Node, module: fx.GraphModule) -> Shape | None:
    value = _value(node, module)
    return tuple(_size(extent) for extent in value.shape) if isinstance(value, Tensor) else None


def _size(extent: int | torch.SymInt) -> Size:
    """The one symbol is the batch, and every exported extent is linear in it."""
    if isinstance(extent, int):
        return Size(extent)
    expression = extent.node.expr
    (symbol,) = expression.free_symbols
    fixed = int(expression.subs(symbol, 0))
    return Size(fixed, int(expression.subs(symbol, 1)) - fixed)


def _dtype(node: fx.Node, module: fx.GraphModule) -> str:
    value = _value(node, module)
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else ""


def _is_graph(node: fx.Node) -> bool:
    """Whether a `get_attr` fetches a graph (for a region without autocast or gradients)."""
    assert node.graph.owning_module is not None
    return isinstance(_fetched(node.graph.owning_module, str(node.target)), fx.GraphModule)


def _changes_in_place(graph: fx.Graph) -> dict[str, tuple[str, ...]]:
    """For each node, the earlier ones that wrote in place to memory it reads, which it does not
    name: `x[1:] = y` is a copy into a view of x, and who reads x later must come after it."""
    memory: dict[fx.Node, set[fx.Node]] = {}  # whose memory a value may share
    writers: dict[fx.Node, list[fx.Node]] = {}
    found: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:
        shared = {node}
        read = {root for value in node.all_input_nodes for root in memory[value]}
        seen = [w for root in read for w in writers.get(root, ())]
        names = [w.name for w in dict.fromkeys(seen) if w not in node.all_input_nodes]
        if names:
            found[node.name] = tuple(names)
        schema = getattr(node.target, "_schema", None)
        if schema is not None:
            for argument, value in zip(schema.arguments, node.args, strict=False):
                if argument.alias_info is None or not isinstance(value, fx.Node):
                    continue
                shared |= memory[value]
                if argument.alias_info.is_write:
                    for root in memory[value]:
                        writers.setdefault(root, []).append(node)
        elif node.op == "call_function":  # getitem, of a list that may be views
            shared |= read
        memory[node] = shared
    return found


def module_path(node: fx.Node) -> str:
    """The path, in the user's model, of the module whose forward a node belongs to."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return "" if path + "." == MODEL_PREFIX else model_path(path)
