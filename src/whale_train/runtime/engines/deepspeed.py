"""The engine of copies that partition state among them: DeepSpeed's ZeRO and offload."""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

from whale_train.models.export.regions import inference_as_no_grad
from whale_train.optimizers.together import Together
from whale_train.runtime.base.autocast import NARROW, in_precision
from whale_train.runtime.base.copies import Copies
from whale_train.runtime.cpu.malloc_trim import given_back
from whale_train.runtime.engines.accelerator import use_accelerator
from whale_train.runtime.engines.base import ParameterState, set_learning_rate, without_scale
from whale_train.runtime.engines.deepspeed_norm import StepNorm
from whale_train.runtime.engines.deepspeed_zero3 import (
    gather_copies,
    one_master_copy,
    partition,
    partitions_by_dtype,
    unchecked_norms,
    with_weight_buffers,
    without_broadcast,
)
from whale_train.runtime.engines.grad_reduce import Reduction
from whale_train.runtime.engines.gradient_files import without_gradient_buffer
from whale_train.runtime.engines.narrow_weights import NarrowWeights
from whale_train.runtime.engines.reached_alike import ReachedAlike
from whale_train.runtime.engines.swap_folder import SwapFolder, nvme_paths, within
from whale_train.runtime.engines.swapped_state import SwappedState
from whale_train.runtime.optim.optimizers import in_groups, makes_late, state_of
from whale_train.strategies.resolver.deepspeed_config import for_processes


class DeepSpeedEngine:
    """The engine of copies under ZeRO 1 to 3 and offload, by DeepSpeed.

    It accumulates and reduces every gradient in fp32 (docs/adr/007).

    config: DeepSpeed's configuration.
    device: the device that the module computes on.
    precision: the precision of every forward; autocast if it has 16 bits. The engine holds the
        parameters of `copies.narrow` as the 16-bit values that autocast would make of them.
    excess: the factor by which gradients are too large, where another engine runs these parameters;
        None: this engine runs them.
    reached: ensures that every copy has gradients of the same parameters, where copies' forwards
        may differ; None: they do not differ.
    own: the optimizer options of the parameters that have their own.
    optimizer: makes the optimizer of a list of parameter groups; None: `config` names it.
    """

    loss_scale: Tensor | None = None
    reduction = None
    partitions = True

    def __init__(
        self,
        module: nn.Module,
        copies: Copies,
        config: dict[str, Any],
        device: torch.device,
        precision: str,
        excess: int | None = None,
        reached: ReachedAlike | None = None,
        own: Mapping[Tensor, dict[str, float]] | None = None,
        optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
    ) -> None:
        deepspeed = import_deepspeed()
        use_accelerator(device)
        if device.type == "cpu":
            config = for_processes(config)
        if parents := nvme_paths(config):
            folder = SwapFolder(next(iter(parents)))
            weakref.finalize(self, folder.remove)
            config = with_weight_buffers(within(config, folder.path), module, copies.size)
        self.holders = copies
        self.copies = copies.size
        self.counts_norm = copies.is_first and copies.index == 0
        self.on_gradients: Callable[[], None] | None = None
        self._is_first_copy = copies.is_first
        self._stage = config["zero_optimization"]["stage"]
        self._excess, self._reached = excess, reached
        # DeepSpeed will average these gradients, although they are already the same on all copies.
        self._shared = Reduction((), None, copies.shared, copies.shards * copies.size)
        for parameter in module.parameters():
            # DeepSpeed's own norm reads these two attributes.
            parameter.tensor_model_parallel = parameter in copies.sharded  # type: ignore[attr-defined]
            parameter.ds_pipe_replicated = parameter in copies.counted_elsewhere  # type: ignore[attr-defined]
        self._trained = [p for p in module.parameters() if p.requires_grad]
        wide, narrow = _by_width(self._trained, copies.narrow)
        frozen = copies.narrow.difference(self._trained)
        weights = NarrowWeights(narrow, frozen, NARROW.get(precision))
        if precision in NARROW:
            _run_within(module, in_precision(precision, device))
        self._modes = ExitStack()
        if self._stage < 3:
            for parameter in narrow:
                weights.narrow(parameter)
        else:
            # A parameter that ZeRO 3 gathers in inference mode becomes an inference tensor, which
            # no later backward can save.
            self._modes.enter_context(inference_as_no_grad())
        # Without a topology, DeepSpeed takes all ranks for copies.
        is_world = copies.shard_group is None and copies.size == dist.get_world_size()
        topology = None if is_world else _Topology(copies)
        with given_back() if self._stage == 3 else nullcontext():
            if self._stage == 3:
                assert copies.group is not None
                place = (copies.group.rank(), copies.size)
                partition(module, topology, config, weights, place)
            in_files = config["zero_optimization"].get("offload_param", {}).get("device") == "nvme"
            by_dtype = nullcontext() if in_files else partitions_by_dtype()
            is_once = config["managed_gradient_accumulation"]
            gradients = without_gradient_buffer() if is_once else nullcontext()
            with one_master_copy(), by_dtype, without_broadcast(), gradients:
                # DeepSpeed takes the dtype of its buckets from the first parameter it is given.
                self._engine, self._optimizer, _, _ = deepspeed.initialize(
                    model=module,
                    optimizer=optimizer,
                    model_parameters=[*in_groups(wide, own or {}), *in_groups(narrow, own or {})],
                    config=config,
                    dist_init_required=False,
                    mpu=topology,
                )
            if in_files and device.type == "cpu" and copies.size == 1:
                gather_copies(module)
        if self._stage < 3 and "offload_optimizer" in config["zero_optimization"]:
            _accumulate_in_fp32(self._optimizer)
        self._swapped = SwappedState(self._optimizer) if parents else None
        weights.give_masters(self._master)
        if self._swapped is not None:
            self._swapped.flush()
        self.module = self._engine.module
        offloads = "offload_optimizer" in config["zero_optimization"]
        self._devices = device, torch.device("cpu") if offloads else device

    @property
    def scale(self) -> int:
        """Return the number of copies, over which DeepSpeed averages gradients."""
        return self.copies

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Accumulate gradients by DeepSpeed's backward of a scalar.

        The scalar is the sum of outputs times gradients, times the number of copies.
        """
        # Only a scalar through the engine's own backward is right at every stage: an
        # `output.backward(gradient)` is refused at 0, crashes at 2, and is silently wrong at 2
        # with offload.
        scalars = [(_wide(x) * g).sum() for x, g in zip(outputs, gradients, strict=True)]
        if self._reached is not None:
            scalars += self._reached.missing(scalars)
        self._engine.backward(sum(scalars[1:], scalars[0]) * self.copies)

    def input_gradient(self, value: Tensor) -> Tensor | None:
        """Return the gradient that `backward` left in `value`, divided by the number of copies, or
        None if there is no gradient."""
        return None if value.grad is None else value.grad / self.copies

    def accumulating(self) -> AbstractContextManager[Any]:
        """Return a null context: ZeRO determines by itself when it reduces."""
        return nullcontext()  # ZeRO 1 reduces in the step, 2 and 3 partition every gradient

    def finish_backward(self) -> None:
        """Correct gradients that another engine made too large, and begin to sum the gradients of
        shared parameters."""
        if self._excess is not None:  # DeepSpeed will average them over the copies
            gradients = [p.grad for p in self._trained if p.grad is not None]
            torch._foreach_mul_(gradients, self.copies / self._excess)
        self._shared.finish()

    def set_learning_rate(self, lr: float) -> None:
        set_learning_rate(self._optimizer, lr)

    def step(self, global_norm: Callable[[Tensor], Tensor] | None, skips: bool = False) -> None:
        """Reduce the gradients, clip them and update the parameters.

        global_norm: maps this engine's squared norm to the squared norm over all engines, for
            clipping; None: this engine's own norm is used.
        skips: whether a step whose norm is not finite changes nothing.

        To skip by itself, DeepSpeed reads the norm on the host. It does so only where its
        optimizer's kernel cannot skip.
        """
        self._shared.wait()
        if global_norm is None:
            assert self.on_gradients is None, "gradients are seen where their norm is measured"
            with unchecked_norms():
                self._engine.step()
            return
        inner = self._optimizer.optimizer
        tells = skips and getattr(inner, "_step_supports_amp_scaling", False)

        def whole_norm(own: Tensor) -> Tensor:
            if self.on_gradients is not None:
                self.on_gradients()
            return global_norm(own)

        def tell(norm: Tensor) -> None:
            if tells:
                if makes_late(inner):
                    list(self.states())
                inner.found_inf = (~norm.isfinite()).float()

        norm = StepNorm(self._optimizer, self._stage, self._devices, whole_norm, self.loss_scale)
        try:
            with (
                norm.taking_over(tell),
                nullcontext() if skips and not tells else unchecked_norms(),
            ):
                self._engine.step()
        finally:
            if tells:
                inner.found_inf = None

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield every trained parameter with its summed gradient on the first copy, or None on the
        others."""
        # safe_get_full_grad would not do: under ZeRO 1 it returns this copy's unreduced gradient.
        for parameter in self._trained:
            if self._stage == 3:
                summed = self._optimizer.get_fp32_grad_for_param(parameter)
            else:
                summed = parameter.get_full_hp_grad()  # type: ignore[attr-defined]
            gradient = without_scale(summed, self.loss_scale) if self._is_first_copy else None
            yield parameter, gradient

    def values(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield every trained parameter with its fp32 value.

        Every copy gets the values that copies hold whole. The first copy alone gets partitioned
        values, and the others get None.
        """
        for parameter in self._trained:
            if self._stage < 3 and parameter.dtype == torch.float32:
                yield parameter, parameter.detach()  # every copy has it
            else:
                full_value = import_deepspeed().utils.safe_get_full_fp32_param(parameter)
                yield parameter, full_value if self._is_first_copy else None

    def states(self) -> Iterator[ParameterState]:
        """Yield the state of this rank's partition, for every trained parameter that has elements
        in the partition."""
        for parameter in self._trained:
            fragment = self._fragment(parameter)
            if fragment is None:
                continue
            flat, at, start, size = fragment
            group = self._group_in_files(parameter)
            if self._swapped is None or group is None:
                flat_state = state_of(self._optimizer.optimizer, flat)
            else:
                flat_state = self._swapped.state(group)
            yield ParameterState(
                parameter,
                flat.detach().narrow(0, at, size),
                {name: moment.narrow(0, at, size) for name, moment in flat_state.moments.items()},
                flat_state.entries,
                flat_state.apart,
                start,
                self.holders.counts(parameter),
            )

    def make_states(self, parameters: Collection[nn.Parameter]) -> None:
        """Create the state of the partitions that have elements of `parameters` and no state
        yet."""
        inner = self._optimizer.optimizer
        if isinstance(inner, Together):
            groups: Mapping[Tensor, int] = {}
            if self._stage == 3:  # between steps its partitions are in no group
                flats = enumerate(self._optimizer.fp32_partitioned_groups_flat)
                groups = {x: self._optimizer.sub_group_to_group_id[i] for i, x in flats}
            fragments = (self._fragment(p) for p in parameters if p.requires_grad)
            held = dict.fromkeys(x[0] for x in fragments if x is not None)
            inner.make_states({x: groups[x] for x in held} if groups else list(held))

    def _fragment(self, parameter: nn.Parameter) -> tuple[Tensor, int, int, int] | None:
        """Return the range of this rank's fp32 partition that holds elements of `parameter`, or
        None if the partition holds none.

        The result is the flat partition, the start of the range in the partition, the index of the
        range's first element in the flattened parameter, and the length of the range.
        """
        optimizer = self._optimizer
        if self._stage == 3:
            group, at, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start, held = self._part(parameter)
            assert held <= size
            flat = optimizer.fp32_partitioned_groups_flat[group]
            if self._swapped is not None and self._swapped.has(group):
                flat = self._swapped.value(group)
            return (flat, at, start, held) if held else None
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        held, own = mapping.lp_fragment_address, mapping.hp_fragment_address
        flat = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        return flat, own.start, held.start, held.numel

    def _group_in_files(self, parameter: nn.Parameter) -> int | None:
        """Return the sub-group of `parameter`, if ZeRO 3 keeps its state in files."""
        if self._swapped is None:
            return None
        group = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)][0]
        return group if self._swapped.has(group) else None

    def _master(self, parameter: nn.Parameter) -> tuple[Tensor, int] | None:
        """Return this rank's fp32 values of `parameter`, and the index of the first one in the
        flattened parameter; None where the rank holds none."""
        fragment = self._fragment(parameter)
        if fragment is None:
            return None
        flat, at, start, size = fragment
        return flat.detach().narrow(0, at, size), start

    def _part(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return the first index and the number of the elements of the flattened `parameter` that
        ZeRO 3 leaves to this rank.

        Parts are equal; the last ones are padded or empty.
        """
        num_elements = parameter.ds_numel  # type: ignore[attr-defined]
        size = -(-num_elements // self.copies)
        assert self.holders.group is not None
        start = min(size * self.holders.group.rank(), num_elements)
        return start, min(size, num_elements - start)

    def constant(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        """Return this rank's part of a buffer or of a frozen parameter, and the index of its first
        flattened element.

        Buffers are whole, and so are parameters below ZeRO 3; the index is then None.
        """
        if self._stage < 3 or not isinstance(tensor, nn.Parameter):
            return tensor.detach(), None
        start, held = self._part(tensor)
        return tensor.ds_tensor.detach()[:held], start  # type: ignore[attr-defined]

    def computed_with(self) -> Iterator[nn.Parameter]:
        """Yield all trained parameters below ZeRO 3: copies hold their data whole beside the
        partitioned state."""
        if self._stage < 3:
            yield from self._trained

    def read_states(self) -> None:
        """Copy the values in `states` into ZeRO 3's partitions, and gather the parameters that are
        always whole."""
        if self._stage < 3:
            return
        for state in self.states():
            if self._swapped is not None and self._swapped.write_weight(
                state.parameter, state.value
            ):
                continue
            part = state.parameter.ds_tensor  # type: ignore[attr-defined]
            part.detach()[: state.value.numel()].copy_(state.value)
        if self._swapped is not None:
            self._swapped.flush()
        always_whole = self._optimizer.persistent_parameters
        if always_whole:
            always_whole[0].partition(always_whole)
            always_whole[0].all_gather(always_whole)


class _Topology:
    """The groups of an engine, in the interface that DeepSpeed expects (Megatron's `mpu`)."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._copies.group

    def get_data_parallel_world_size(self) -> int:
        return self._copies.size

    def get_data_parallel_rank(self) -> int:
        return self._copies.group.rank() if self._copies.group is not None else 0

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._copies.shard_group

    def get_model_parallel_world_size(self) -> int:
        return self._copies.shards

    def get_model_parallel_rank(self) -> int:
        return self._copies.index

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank


def import_deepspeed() -> Any:
    """Return the module `deepspeed`, with its shared-memory all-reduce disabled.

    DeepSpeed would compile the all-reduce (20 s of g++) and initialise it at its first process
    group, only for inference. To find out whether it can, it would also run a compiler for every
    other DeepSpeed operation, in every rank.
    """
    import deepspeed

    backend = import_module("deepspeed.comm.torch")  # as an attribute, this name is torch itself
    assert callable(backend.build_shm_op)
    backend.build_shm_op = _no_shm_op  # type: ignore[attr-defined]
    return deepspeed


def _no_shm_op() -> None:
    """Return None, as DeepSpeed's `build_shm_op` does where the operation cannot be compiled."""


def _by_width(
    trained: Sequence[nn.Parameter], narrow: frozenset[nn.Parameter]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split `trained` into the parameters held in fp32 and the parameters of `narrow`, held in 16
    bits.

    Where all are narrow, the smallest is held in fp32 as well: DeepSpeed's buckets have the dtype
    of one parameter, and must be fp32.
    """
    wide = [p for p in trained if p not in narrow]
    if not wide and trained:
        wide = [min(trained, key=lambda p: p.numel())]
    held = {id(p) for p in wide}
    return wide, [p for p in trained if id(p) not in held]


def _accumulate_in_fp32(optimizer: Any) -> None:
    """Make `optimizer` (ZeRO 1 or 2 with offload) accumulate gradients in fp32 tensors on the host.

    DeepSpeed 0.19.8 would make the tensors in the parameter's dtype.
    """
    sums = optimizer.accumulated_grads_in_cpu
    for parameter in (p for group in optimizer.params_in_partition for p in group):
        zeros = torch.zeros(parameter.numel(), device=optimizer.device)
        sums[optimizer.get_param_id(parameter)] = zeros


def _wide(value: Tensor) -> Tensor:
    """Return `value` in at least fp32."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _run_within(module: nn.Module, context: AbstractContextManager[Any]) -> None:
    """Make the forwards of `module` run in `context`, by forward hooks.

    The hooks run inside DeepSpeed's wrapper, which turns off an autocast around it.
    """

    def enter(*_: object) -> None:
        context.__enter__()

    def leave(*_: object) -> None:
        context.__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
