"""What a model is and what it costs, measured on the meta device: no weights, no devices.

The model is exported once with a batch of unknown size (`torch.export`, design §7); its
graph becomes the torch-free `OperationGraph` all planning works on, and is kept for the ranks
that run a rewritten part of it. A model that cannot be exported is measured as it is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from whale_train.errors import ConfigError
from whale_train.models.build import build_model
from whale_train.models.export import EXPORT_BATCH, example_batch, export, on_meta
from whale_train.models.loss import LossModule
from whale_train.models.operation_graph import operation_graph
from whale_train.models.options import ModelOptions
from whale_train.strategies.operations import InputField, ModelProfile, OperationGraph, Parameter


def profile_model(options: ModelOptions, name: str, fields: tuple[InputField, ...]) -> ModelProfile:
    """Build on the meta device, export, and measure one training step.

    Raises ConfigError for a class that cannot be built or does not take the data's fields.
    """
    module, inputs = on_meta(options, fields)
    batch = example_batch(inputs, EXPORT_BATCH)
    exported, error = export(module, batch)
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
