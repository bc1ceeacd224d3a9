"""How DeepSpeed's stage 3 takes over a module's parameters: one at a time, and each once.

`deepspeed.initialize` by itself takes the whole module: it sends all of it from the first copy to
the others, casts all of it under bf16, and keeps the partition twice. A rank would need far more
memory to begin than to train.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from whale_train.models.weights.deferred import fill
from whale_train.runtime.engines.narrow_weights import NarrowWeights


def partition(
    module: nn.Module,
    topology: Any,
    config: dict[str, Any],
    narrow: NarrowWeights,
    place: tuple[int, int],
) -> None:
    """Leave this rank its part of every parameter of `module`, in 16 bits if `narrow` has it;
    `place` is the rank among the copies, and how many there are. Where the first copy's values come
    from is let go of parameter by parameter."""
    import deepspeed

    # As its own launcher says it. On a CPU it otherwise starts `numactl` at every reduction.
    os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
    deepspeed.zero.Init(
        module=_Cast(module, narrow, place),
        data_parallel_group=topology and topology.get_data_parallel_group(),
        config_dict_or_path=config,
        mpu=topology,
    )


class _Cast(nn.Module):
    """A module whose `narrow` parameters are of 16 bits by the time they are looked at."""

    def __init__(self, module: nn.Module, narrow: NarrowWeights, place: tuple[int, int]) -> None:
        super().__init__()
        self._module, self._narrow, self._place = module, narrow, place

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in self._module.parameters(recurse):
            again = fill(parameter)
            if parameter.dtype == torch.float32:  # it is looked at more than once
                self._narrow.narrow(parameter, *self._place, again)
            yield parameter


@contextmanager
def one_master_copy() -> Iterator[None]:
    """Engines made in here update an fp32 partition where it is.

    Stage 3 has a copy of the weights for the optimizer beside those that are gathered, but for
    those that are fp32 already and where the optimizer is. That they are it never finds, as it
    compares a `torch.device` with a device's name (DeepSpeed 0.19.8). For the time of the
    comparison it is given a device. What is offloaded is another copy by its nature.
    """
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    create = Stage3._create_fp32_partitions

    def create_once(optimizer: Any) -> None:
        name = optimizer.device
        if not (optimizer.offload_optimizer or optimizer.offload_param):
            optimizer.device = torch.device(name)
        try:
            create(optimizer)
        finally:
            optimizer.device = name

    Stage3._create_fp32_partitions = create_once
    try:
        yield
    finally:
        Stage3._create_fp32_partitions = create


@contextmanager
def partitions_by_dtype() -> Iterator[None]:
    """Let engines made in here partition parameters of several dtypes, each parameter group being
    of one.

    Stage 3 (DeepSpeed 0.19.8) moves all partitions into one flat tensor, and with parameters
    offloaded into one of the first parameter's dtype for each group. For the time of its
    initialisation it has one flat tensor for each dtype, and for each group one of its own dtype.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import stage3

    optimizer_class = stage3.DeepSpeedZeroOptimizer_Stage3
    names = ("_set_fp16_partitioned_groups_flat", "_create_param_groups_fp16_flat_cpu_memory")
    kept = {name: getattr(optimizer_class, name) for name in names}
    flatten = stage3.defragment

    def flat_of_each_dtype(tensors: Sequence[Tensor]) -> dict[torch.dtype, Tensor]:
        found: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            found.setdefault(tensor.dtype, []).append(tensor)
        return {dtype: flatten(listed) for dtype, listed in found.items()}

    def set_groups_flat(optimizer: Any) -> None:
        starts = dict.fromkeys(optimizer.lp_param_buffer, 0)
        for group in optimizer.fp16_groups:
            dtype, size = group[0].ds_tensor.dtype, sum(p.partition_numel() for p in group)
            flat = optimizer.lp_param_buffer[dtype].narrow(0, starts[dtype], size)
            optimizer.fp16_partitioned_groups_flat.append(flat)
            starts[dtype] += size

    def make_groups_on_host(optimizer: Any) -> None:
        for group in optimizer.trainable_param_groups:
            size = sum(p.partition_numel() for p in group["params"])
            made = torch.empty(size, dtype=group["params"][0].ds_tensor.dtype)
            pinned = get_accelerator().pin_memory(made)
            optimizer.param_groups_fp16_flat_cpu_memory.append(pinned)

    stage3.defragment = flat_of_each_dtype
    for name, made in zip(names, (set_groups_flat, make_groups_on_host), strict=True):
        setattr(optimizer_class, name, made)
    try:
        yield
    finally:
        stage3.defragment = flatten
        for name, own in kept.items():
            setattr(optimizer_class, name, own)


@contextmanager
def without_broadcast() -> Iterator[None]:
    """Engines made in here do not send the first copy's weights to the others: the same seed made
    them everywhere. DeepSpeed fails on parameters without dimensions there (0.19.8)."""
    from deepspeed import DeepSpeedEngine

    broadcast = DeepSpeedEngine._broadcast_model
    DeepSpeedEngine._broadcast_model = lambda engine: None
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = broadcast


@contextmanager
def unchecked_norms() -> Iterator[None]:
    """Steps taken in here do not ask whether their norm is a number: DeepSpeed would read it on the
    host for that, and wait for all that the device has to do (0.19.8)."""
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    modules = (stage3, stage_1_and_2)
    asked = [module.is_invalid_grad_norm for module in modules]
    for module in modules:
        module.is_invalid_grad_norm = lambda norm: False
    try:
        yield
    finally:
        for module, ask in zip(modules, asked, strict=True):
            module.is_invalid_grad_norm = ask


def gather_whole(blocks: Sequence[nn.Module]) -> None:
    """Have stage 3 gather the weights of each of `blocks` when that is called, and hang no hooks on
    what is inside it, at each of which torch.compile would end a region."""
    import deepspeed

    for block in blocks:
        deepspeed.utils.set_z3_leaf_module(block, True)
