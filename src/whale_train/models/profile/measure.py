"""Measure a model's structure and cost on the meta device: no weights, no devices.

The model is exported once with a symbolic batch size (`torch.export`). The exported graph becomes
the torch-free `OperationGraph`, on which all planning works. A model that cannot be exported is
measured by calling it.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from whale_train.errors import ConfigError, Fault
from whale_train.models.adapters import stacked_additions
from whale_train.models.build import build_model
from whale_train.models.class_dim import read_logits
from whale_train.models.export.batch_bounds import ANY, Sizes, sizes_of
from whale_train.models.export.custom_backward import Watch
from whale_train.models.export.export import (
    EXPORT_BATCH,
    example_batch,
    export,
    module_path,
    on_meta,
)
from whale_train.models.export.to_operation_graph import operation_graph
from whale_train.models.linear_layers import linear_layers
from whale_train.models.loss_module import LossModule
from whale_train.models.nf4 import BYTES_PER_ELEMENT, quantised_layers
from whale_train.models.options import ModelOptions
from whale_train.models.profile.block_folding import CannotUnfold, Fold, folded, folds_of, unfold
from whale_train.models.profile.counters import AHEAD, counters
from whale_train.models.profile.python_draws import PythonDraws
from whale_train.models.profile.repeated_calls import RecordedCall, first_difference, record_calls
from whale_train.models.profile.sparse_gradients import SparseCalls, may_be_sparse
from whale_train.models.profile.unseen_losses import SeenLosses
from whale_train.models.seeded_draws import private_seed
from whale_train.strategies.graph.operation_graph import (
    INSIDE,
    OWN,
    InputField,
    ModelProfile,
    OperationGraph,
    Parameter,
)
from whale_train.strategies.graph.saved_tensors import View, kept

Samples = Callable[[int], Mapping[str, NDArray[Any]]]
"""Function that returns at most n samples: arrays `[n, *field.shape]` of the fields' dtypes."""


def profile_model(
    options: ModelOptions,
    name: str,
    fields: tuple[InputField, ...],
    samples: Samples | None = None,
    *,
    by_folding: bool = False,
) -> ModelProfile:
    """Return the profile of a model: build it on the meta device, export it, and measure one step.

    name: the model's name in the profile and in faults.
    samples: training samples, for a model that reads values; None takes zeros.
    by_folding: whether only three of equal blocks are exported (`models/profile/block_folding.py`).
        That is for plans that are not run, because a model might treat its blocks differently in a
        way that does not show in them.

    Raises ConfigError for a class that cannot be built or does not take the data's fields and for
    sparse gradients, and the errors of the model's forward and of `samples`.
    """
    module, inputs = on_meta(options, fields)
    batch = example_batch(inputs, EXPORT_BATCH)
    shapes: list[tuple[int, ...]] = []  # of the logits, from all calls of the forward
    module.on_logits = shapes.append
    folds = folds_of(module.model) if by_folding else ()
    graph, sizes = _folded_graph(module, folds, batch, name) if folds else (None, ANY)
    if folds and graph is None:
        module, _ = on_meta(options, fields)  # a forward may have changed its modules
        module.on_logits = shapes.append
    error, varies, own_draws = "", False, ""
    if graph is None:
        graph, sizes, error = _exported_graph(module, batch, name)
    stacks = stacked_additions(module.model) if graph is None else ()
    if stacks:
        said = (
            f"model.adapters adds to stacks of experts, as {stacks[0]}: name target_modules that "
        )
        error = f"{said}are none; {error}"
    if graph is None:
        looks = not _runs(module, batch)
        if looks:  # it reads values, which the meta device does not have
            module = LossModule(build_model(options), options)
            module.on_logits = shapes.append
            batch = _values(batch, samples)
        losses: list[Tensor] = []
        generators, watch = PythonDraws(), Watch(module)
        with SparseCalls() as sparse, private_seed(), watch.watching():
            flops, activation_bytes = _measure(
                lambda batch: losses.append(module(**batch)), batch, module
            )
        sparse.refuse(name, sparse.targets)
        count = len(next(iter(batch.values())))
        flops, activation_bytes = flops / count, activation_bytes / count
        own_draws = generators.drawn() or watch.draws
        varies = looks or bool(own_draws) or error.startswith(_CHANGES)
        unused = _without_gradient(module.model, losses[0])
    else:
        flops = sum(operation.flops for operation in graph)
        activation_bytes = sum(kept(View(graph), [op.name for op in graph]).values())
        unused = _unused(module.model, graph)
    model = module.model
    return ModelProfile(
        name=name,
        parameters=_parameters(model),
        frozen=_frozen(model, options),
        inputs=inputs,
        forward_flops=flops,
        activation_bytes=activation_bytes,
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        graph=graph,
        export_error=error,
        batch_norm_modules=tuple(
            path
            for path, child in model.named_modules()
            if isinstance(child, nn.modules.batchnorm._BatchNorm)
        ),
        linear_weights=() if options.quantize is not None else tuple(linear_layers(model)),
        unused_parameters=() if varies else unused,
        perhaps_unused=unused if varies else (),
        varies=varies,
        own_draws=own_draws,
        logits=read_logits(shapes, batch, options.class_dim),
        batch_sizes=sizes,
    )


_CHANGES = "its forward changes from call to call"


def _values(batch: dict[str, Tensor], samples: Samples | None) -> dict[str, Tensor]:
    """Return a batch like `batch` with values on the CPU: those of `samples`, or zeros."""
    if samples is None:
        return {name: torch.zeros_like(x, device="cpu") for name, x in batch.items()}
    arrays = samples(EXPORT_BATCH)
    return {name: torch.from_numpy(arrays[name]) for name in batch}


def _folded_graph(
    module: LossModule, folds: Sequence[Fold], batch: dict[str, Tensor], name: str
) -> tuple[OperationGraph | None, Sizes]:
    """Return the graph of the whole model from a few of its blocks, and the batch sizes for which
    it is valid.

    The graph is None where the folded model cannot be exported, or where its blocks' graphs differ.
    """
    with folded(module.model, folds):
        graph, sizes, _ = _exported_graph(module, batch, name)
    if graph is None:
        return None, ANY
    try:
        return unfold(graph, folds), sizes
    except CannotUnfold:
        return None, ANY


def _exported_graph(
    module: LossModule, batch: dict[str, Tensor], name: str
) -> tuple[OperationGraph | None, Sizes, str]:
    """Return the measured graph of a model, the batch sizes for which it is valid, and ''.

    Return None, any sizes and the reason for a model that cannot be exported, or whose calls
    differ. Raises ConfigError for a model with sparse gradients, and for a forward that changes
    which parameters are trained.
    """

    def run() -> None:
        with next(iter(batch.values())).device:
            module(**batch)

    trained, generators = _trained(module.model), PythonDraws()
    calls: list[list[RecordedCall] | None] = []
    losses = SeenLosses()
    with losses:
        moved_counters = counters(module.model, lambda: calls.append(record_calls(run)))
    for ahead in AHEAD if moved_counters and calls[0] is not None else ():
        for counter in moved_counters:
            counter.set(module.model, ahead)
        calls.append(record_calls(run))
        _refuse_other_parameters(module.model, trained, name)
    for counter in moved_counters:
        counter.set(module.model, 1)
    if drawn := generators.drawn():
        said = f"its forward draws numbers from {drawn}, of which a graph would hold one draw"
        return None, ANY, said
    exported, error = export(module, batch)
    _refuse_other_parameters(module.model, trained, name)
    if exported is None:
        return None, ANY, error
    unseen = losses.unseen(exported.graph) if calls[0] is not None else None
    if unseen is not None:
        where = module_path(unseen) or "its forward"
        return None, ANY, f"{where} calls {unseen.name} past torch.nn.functional"
    calls.append(record_calls(run))
    changes = (first_difference(calls[0], other) for other in calls[1:])
    changed = next((change for change in changes if change), "")
    if changed:
        return None, ANY, f"{_CHANGES}: {changed}"
    try:
        return _measured_graph(exported, batch, name), sizes_of(exported), ""
    except NotImplementedError as error:  # torch cannot run the operation without values
        return None, ANY, str(error).partition(": attempted")[0] + " cannot be run without values"


def _trained(model: nn.Module) -> dict[str, bool]:
    """Return whether each parameter is trained (requires_grad), by path."""
    return {path: parameter.requires_grad for path, parameter in model.named_parameters()}


def _refuse_other_parameters(model: nn.Module, trained: dict[str, bool], name: str) -> None:
    """Raise ConfigError where a call has changed which parameters are trained.

    trained: whether each parameter was trained before the call, by path.
    name: the model's name in the fault.
    """
    after = _trained(model)
    for path, was in trained.items():
        if after.get(path, was) != was:
            rule = f"changes in its forward whether the parameter {path} is trained (requires_grad)"
            raise ConfigError([Fault("model", name, rule, "set it where the model is built")])


def _measured_graph(
    exported: fx.GraphModule, batch: dict[str, Tensor], name: str
) -> OperationGraph:
    """Return the operations of an exported model, with the FLOPs and saved bytes of each.

    `name` is the model's name in the fault. Raises ConfigError for sparse gradients.
    """
    with _saved_tensors(exported) as saved:
        interpreter = _CountingInterpreter(exported, saved)
        interpreter.run_batch(batch)
    interpreter.sparse_calls.refuse(name, interpreter.sparse)
    return operation_graph(
        *(exported, interpreter.flops, interpreter.kept, interpreter.memory),
        interpreter.kept_on_cpu,
    )


def _measure(
    run: Callable[[dict[str, Tensor]], Any], batch: dict[str, Tensor], module: nn.Module
) -> tuple[float, float]:
    """Return (forward FLOPs, bytes saved for backward) of one call on `batch`."""
    with _saved_tensors(module) as saved, _flop_counter() as counter:
        run(batch)
    storage_bytes = {_memory(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
    return float(counter.get_total_flops()), float(sum(storage_bytes.values()))


def _flop_counter() -> FlopCounterMode:
    """Return a counter of all FLOPs without a breakdown by module.

    The tracker of modules watches backwards too, and breaks forwards that compute gradients.
    """
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter


class _NoModules(nullcontext[None]):
    """Stand-in for the module tracker of a FlopCounterMode, which reports no running module."""

    parents = frozenset({"Global"})


@contextmanager
def _saved_tensors(module: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list to which every tensor that autograd saves in the context is added.

    Parameters and buffers of `module` are left out; a product saves them as views of its weight.
    """
    held = {_memory(tensor) for tensor in (*module.parameters(), *module.buffers())}
    saved: list[Tensor] = []  # keeps tensors alive, since the id of a freed storage is reused

    def pack(tensor: Tensor) -> Tensor:
        if _memory(tensor) not in held:
            saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _memory(tensor: Tensor) -> int:
    """Return the id of a tensor's storage."""
    number: int = tensor.untyped_storage()._cdata
    return number


class _CountingInterpreter(fx.Interpreter):
    """Interpreter that runs a graph on meta tensors and measures every operation.

    flops: FLOPs by operation name.
    kept: bytes that autograd saves, by operation name and then by place (`Operation.saved`).
    kept_on_cpu: `kept` on a CPU, of the operations that differ there.
    memory: the place of the value whose memory an operation's result shares, by operation name
        (`Operation.memory`).
    sparse: modules, or operations, with sparse gradients.
    """

    def __init__(self, module: fx.GraphModule, saved: list[Tensor]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._exported, self._saved = module, saved
        self.flops: dict[str, float] = {}
        self.kept: dict[str, dict[int, float]] = {}
        self.kept_on_cpu: dict[str, dict[int, float]] = {}
        self.memory: dict[str, int] = {}
        self.sparse: list[str] = []  # modules (or operations) with sparse gradients
        self.sparse_calls = SparseCalls()

    def run_batch(self, batch: dict[str, Tensor]) -> Any:
        """Return the graph's output for a batch on the meta device, by field name."""
        # Placeholders are named after the arguments; the interpreter takes them in order.
        names = [str(node.target) for node in self.graph.nodes if node.op == "placeholder"]
        watched = self.sparse_calls if may_be_sparse(self._exported) else nullcontext()
        with watched, _flop_counter() as self.counter:
            return self.run(*(batch[name] for name in names))

    def run_node(self, n: fx.Node) -> Any:
        """Return the value of node `n`, and record the node's FLOPs, saved bytes and memory."""
        before, known = self.counter.get_total_flops(), len(self._saved)
        sparse = len(self.sparse_calls.targets)
        value = super().run_node(n)
        if len(self.sparse_calls.targets) > sparse:
            self.sparse.append(module_path(n) or n.name)
        self.flops[n.name] = float(self.counter.get_total_flops() - before)
        places: dict[int, int] = {}
        for i, node in enumerate(n.all_input_nodes):
            for m in _memories(self.env[node]):
                places.setdefault(m, i)
        if n.target is _ATTENTION:
            # The meta device decomposes attention, and would save the full matrix of weights.
            unfused = self._saved_bytes(known, places, _memories(value))
            fused, drops = self._fused_attention(n, known)
            value = value if fused is None else fused
            if drops:
                self.kept_on_cpu[n.name] = unfused
        own = _memories(value)
        self.memory[n.name] = min((places[m] for m in own if m in places), default=OWN)
        self.kept[n.name] = self._saved_bytes(known, places, own)
        return value

    def _saved_bytes(
        self, known: int, places: Mapping[int, int], own: Container[int]
    ) -> dict[int, float]:
        """Return the bytes of the tensors saved since `known`, by place.

        places: the index of the input by the id of its memory.
        own: the ids of the memory of the operation's value.
        """
        saved_bytes: dict[tuple[int, int], float] = {}
        for tensor in self._saved[known:]:
            m = _memory(tensor)
            place = places.get(m, OWN if m in own else INSIDE)
            saved_bytes[place, m] = float(tensor.untyped_storage().nbytes())
        total: dict[int, float] = {}
        for (place, _), num_bytes in saved_bytes.items():
            total[place] = total.get(place, 0.0) + num_bytes
        return total

    def _fused_attention(self, n: fx.Node, known: int) -> tuple[Tensor | None, bool]:
        """Return the value of the attention `n` as a CPU's fused kernel computes it without
        dropout, or None where torch would choose no fused kernel; and whether it has dropout.

        The tensors that the kernel saves replace all tensors saved since `known`. A GPU's fused
        kernels save as much with dropout, whose mask they draw again.
        """
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        given = dict(zip(_ATTENTION_ARGUMENTS, args, strict=False)) | kwargs
        drops = bool(given.get("dropout_p", 0.0))
        given["dropout_p"] = 0.0
        if torch._fused_sdp_choice(**_small_on_cpu(given)) != _FLASH:
            return None, False
        given.pop("enable_gqa", None)
        del self._saved[known:]
        value: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(**given)[0]
        return value, drops


_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_ATTENTION_ARGUMENTS = tuple(argument.name for argument in _ATTENTION._schema.arguments)
_FLASH = torch.nn.attention.SDPBackend.FLASH_ATTENTION.value


_SMALL_EXTENT = 512


def _small_on_cpu(arguments: Any) -> Any:
    """Return `arguments` with small tensors on the CPU, for which torch chooses the same kernel.

    A mask over a long sequence has as many elements as the square of the length, which would not
    fit into memory while planning. Extents above _SMALL_EXTENT become the numbers after it, in
    ascending order: equal extents stay equal. Strides keep their order, and strides of 0 and 1
    stay.
    """
    tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    large = sorted({e for x in tensors for e in x.shape if e > _SMALL_EXTENT})
    extents = {e: _SMALL_EXTENT + 1 + number for number, e in enumerate(large)}

    def made(x: Tensor) -> Tensor:
        sizes, strides = [extents.get(e, e) for e in x.shape], [0] * x.dim()
        step = 1
        for dim in sorted(range(x.dim()), key=lambda dim: (x.stride(dim), x.shape[dim])):
            if x.stride(dim):
                step = max(step, min(x.stride(dim), 2))
                strides[dim] = step
                step *= sizes[dim]
        small = torch.empty_strided(sizes, strides, dtype=x.dtype, device="cpu")
        return small.requires_grad_(x.requires_grad)

    return tree_map_only(Tensor, made, arguments)


def _memories(value: Any) -> set[int]:
    """Return the ids of the storages of all tensors in `value`."""
    return {_memory(x) for x in tree_leaves(value) if isinstance(x, Tensor)}


def _parameters(model: nn.Module, trained: bool = True) -> tuple[Parameter, ...]:
    """Return the parameters of `model` that are trained, or the frozen ones."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for path, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(path)
        tensors[id(tensor)] = tensor
    return tuple(
        Parameter(paths[0], tuple(tensors[i].shape), tensors[i].element_size(), tuple(paths[1:]))
        for i, paths in names.items()
        if tensors[i].requires_grad == trained
    )


def _frozen(model: nn.Module, options: ModelOptions) -> tuple[Parameter, ...]:
    """Return the frozen parameters of `model`, with their bytes as ranks store them."""
    frozen = _parameters(model, trained=False)
    if options.quantize is None:
        return frozen
    layers = quantised_layers(model)
    return tuple(
        replace(x, bytes_per_element=BYTES_PER_ELEMENT)
        if x.path.endswith(".weight") and x.path.removesuffix(".weight") in layers
        else x
        for x in frozen
    )


def _runs(module: LossModule, batch: dict[str, Tensor]) -> bool:
    """Return whether `module` runs on `batch`, on the meta device.

    Raises ConfigErrors of the forward.
    """
    try:
        module(**batch)
    except ConfigError:
        raise
    except Exception:  # a user's forward may raise anything where it cannot read values
        return False
    return True


def _without_gradient(model: nn.Module, loss: Tensor) -> tuple[str, ...]:
    """Return the paths of the trained parameters that autograd gives no gradient for `loss`."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    paths = [x.path for x in _parameters(model)]
    # Reentrant checkpointing supports backward(), and not torch.autograd.grad.
    loss.backward()  # type: ignore[no-untyped-call]
    unused = [path for path, p in zip(paths, parameters, strict=True) if p.grad is None]
    model.zero_grad()
    return tuple(unused)


def _unused(model: nn.Module, graph: OperationGraph) -> tuple[str, ...]:
    """Return the paths of the trained parameters that the loss of `graph` does not depend on."""
    loss = set(graph.operations[-1].inputs[:1])
    reached = {graph[name].path for name in graph.ancestors(loss)}
    return tuple(
        p.path for p in _parameters(model) if not reached.intersection((p.path, *p.aliases))
    )
