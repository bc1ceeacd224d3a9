"""The engine of copies that partition what they have in common: DeepSpeed's ZeRO and offload."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from whale_train.models.export.regions import inference_as_no_grad
from whale_train.runtime.base.autocast import NARROW, in_precision
from whale_train.runtime.base.copies import Copies
from whale_train.runtime.cpu.malloc_trim import given_back
from whale_train.runtime.engines.accelerator import use_accelerator
from whale_train.runtime.engines.base import ParameterState, set_learning_rate, without_scale
from whale_train.runtime.engines.deepspeed_norm import StepNorm
from whale_train.runtime.engines.deepspeed_zero3 import (
    one_master_copy,
    partition,
    partitions_by_dtype,
    unchecked_norms,
    without_broadcast,
)
from whale_train.runtime.engines.grad_reduce import Reduction
from whale_train.runtime.engines.narrow_weights import NarrowWeights
from whale_train.runtime.engines.reached_alike import ReachedAlike
from whale_train.runtime.optim.optimizers import makes_late, state_of
from whale_train.strategies.resolver.deepspeed_config import for_processes


class DeepSpeedEngine:
    """Copies that partition what they have in common: ZeRO 1 to 3, offload. A `precision` of 16
    bits is autocast; of `copies.narrow` the engine holds what autocast would make of them, and
    accumulates and reduces every gradient in fp32 (docs/adr/007). Where another engine runs these
    parameters, their gradients are made `excess` times too large. `reached` sees to it that every
    copy has a gradient of the same parameters, where their forwards may differ."""

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
    ) -> None:
        deepspeed = import_deepspeed()
        use_accelerator(device)
        if device.type == "cpu":
            config = for_processes(config)
        self.holders = copies
        self.copies = copies.size
        self.counts_norm = copies.is_first and copies.index == 0
        self.on_gradients: Callable[[], None] | None = None
        self._is_first_copy = copies.is_first
        self._stage = config["zero_optimization"]["stage"]
        self._excess, self._reached = excess, reached
        # DeepSpeed will average what is then the same on all copies.
        self._shared = Reduction((), None, copies.shared, copies.shards * copies.size)
        for parameter in module.parameters():
            # What DeepSpeed's own norm goes by.
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
            # What ZeRO 3 gathers inside of inference mode would be an inference tensor, which no
            # backward can save, wherever the parameter is read next.
            self._modes.enter_context(inference_as_no_grad())
        # Without one, all ranks are copies.
        is_world = copies.shard_group is None and copies.size == dist.get_world_size()
        topology = None if is_world else _Topology(copies)
        with given_back() if self._stage == 3 else nullcontext():
            if self._stage == 3:
                assert copies.group is not None
                place = (copies.group.rank(), copies.size)
                partition(module, topology, config, weights, place)
            with one_master_copy(), partitions_by_dtype(), without_broadcast():
                # DeepSpeed takes the dtype of its buckets from the first parameter it is given.
                self._engine, self._optimizer, _, _ = deepspeed.initialize(
                    model=module,
                    model_parameters=[{"params": found} for found in (wide, narrow) if found],
                    config=config,
                    dist_init_required=False,
                    mpu=topology,
                )
        if self._stage < 3 and "offload_optimizer" in config["zero_optimization"]:
            _accumulate_in_fp32(self._optimizer)
        weights.give_masters(self._optimizer, self._stage)
        self.module = self._engine.module
        offloads = "offload_optimizer" in config["zero_optimization"]
        self._devices = device, torch.device("cpu") if offloads else device

    @property
    def scale(self) -> int:
        return self.copies

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        # Only a scalar through the engine's own backward is right at every stage: an
        # `output.backward(gradient)` is refused at 0, crashes at 2, and is silently wrong at 2
        # with offload.
        scalars = [(_wide(x) * g).sum() for x, g in zip(outputs, gradients, strict=True)]
        if self._reached is not None:
            scalars += self._reached.missing(scalars)
        self._engine.backward(sum(scalars[1:], scalars[0]) * self.copies)

    def input_gradient(self, value: Tensor) -> Tensor | None:
        return None if value.grad is None else value.grad / self.copies

    def accumulating(self) -> AbstractContextManager[Any]:
        return nullcontext()  # ZeRO 1 reduces in the step, 2 and 3 partition every gradient

    def finish_backward(self) -> None:
        if self._excess is not None:  # DeepSpeed will average them over the copies
            gradients = [p.grad for p in self._trained if p.grad is not None]
            torch._foreach_mul_(gradients, self.copies / self._excess)
        self._shared.finish()

    def set_learning_rate(self, lr: float) -> None:
        set_learning_rate(self._optimizer, lr)

    def step(self, global_norm: Callable[[Tensor], Tensor] | None, skips: bool = False) -> None:
        """Reduce and update, clipping by what `global_norm` makes of this engine's own squared
        norm; where that is not finite, the step changes nothing if it `skips`.

        DeepSpeed would read the norm on the host to skip by itself; it may where its optimizer's
        kernel cannot.
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
        # Not safe_get_full_grad: under ZeRO 1 that is this copy's own, before the reduction.
        for parameter in self._trained:
            if self._stage == 3:
                whole = self._optimizer.get_fp32_grad_for_param(parameter)
            else:
                whole = parameter.get_full_hp_grad()  # type: ignore[attr-defined]
            found = without_scale(whole, self.loss_scale) if self._is_first_copy else None
            yield parameter, found

    def values(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        for parameter in self._trained:
            if self._stage < 3 and parameter.dtype == torch.float32:
                yield parameter, parameter.detach()  # every copy has it
            else:
                whole = import_deepspeed().utils.safe_get_full_fp32_param(parameter)
                yield parameter, whole if self._is_first_copy else None

    def states(self) -> Iterator[ParameterState]:
        for parameter in self._trained:
            fragment = self._fragment(parameter)
            if fragment is None:
                continue
            flat, at, start, size = fragment
            slots, kept = state_of(self._optimizer.optimizer, flat)
            yield ParameterState(
                parameter,
                flat.detach().narrow(0, at, size),
                {name: slot.narrow(0, at, size) for name, slot in slots.items()},
                kept if "step" in kept else None,
                start,
                self.holders.counts(parameter),
            )

    def _fragment(self, parameter: nn.Parameter) -> tuple[Tensor, int, int, int] | None:
        """Return the fp32 partition that has elements of the flattened `parameter`, where in it
        they start, which of them is the first, and how many it has; None if it has none."""
        optimizer = self._optimizer
        if self._stage == 3:
            group, at, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start, held = self._part(parameter)
            assert held <= size
            return (
                (optimizer.fp32_partitioned_groups_flat[group], at, start, held) if held else None
            )
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        held, own = mapping.lp_fragment_address, mapping.hp_fragment_address
        flat = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        return flat, own.start, held.start, held.numel

    def _part(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return which elements of the flattened `parameter` ZeRO 3 leaves to this rank: the first,
        and how many. Parts are equal, the last are padded or empty."""
        whole = parameter.ds_numel  # type: ignore[attr-defined]
        size = -(-whole // self.copies)
        assert self.holders.group is not None
        start = min(size * self.holders.group.rank(), whole)
        return start, min(size, whole - start)

    def constant(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        if self._stage < 3 or not isinstance(tensor, nn.Parameter):
            return tensor.detach(), None
        start, held = self._part(tensor)
        return tensor.ds_tensor.detach()[:held], start  # type: ignore[attr-defined]

    def computed_with(self) -> Iterator[nn.Parameter]:
        if self._stage < 3:
            yield from self._trained

    def read_states(self) -> None:
        if self._stage < 3:
            return
        for state in self.states():
            part = state.parameter.ds_tensor  # type: ignore[attr-defined]
            part.detach()[: state.value.numel()].copy_(state.value)
        always_whole = self._optimizer.persistent_parameters
        if always_whole:
            always_whole[0].partition(always_whole)
            always_whole[0].all_gather(always_whole)


class _Topology:
    """The groups of an engine, as DeepSpeed asks for them (Megatron's `mpu`)."""

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
    """DeepSpeed, without the shared-memory all-reduce it would compile (20 s of g++) and
    initialise at its first process group, whose only use is inference."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _by_width(
    trained: Sequence[nn.Parameter], narrow: frozenset[nn.Parameter]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split `trained` into parameters held in fp32 and those of `narrow`. Where all are narrow, the
    smallest is held in fp32 as well: DeepSpeed's buckets have the dtype of one parameter, and must
    be fp32."""
    wide = [p for p in trained if p not in narrow]
    if not wide and trained:
        wide = [min(trained, key=lambda p: p.numel())]
    held = {id(p) for p in wide}
    return wide, [p for p in trained if id(p) not in held]


def _accumulate_in_fp32(optimizer: Any) -> None:
    """Give `optimizer`, of ZeRO 1 or 2 with offload, fp32 tensors on the host to add gradients up
    in; DeepSpeed 0.19.8 would make them of the parameter's dtype."""
    sums = optimizer.accumulated_grads_in_cpu
    for parameter in (p for group in optimizer.params_in_partition for p in group):
        zeros = torch.zeros(parameter.numel(), device=optimizer.device)
        sums[optimizer.get_param_id(parameter)] = zeros


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _run_within(module: nn.Module, context: AbstractContextManager[Any]) -> None:
    """Run its forwards in `context`, from inside: DeepSpeed turns off an autocast around it."""

    def enter(*_: object) -> None:
        context.__enter__()

    def leave(*_: object) -> None:
        context.__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
