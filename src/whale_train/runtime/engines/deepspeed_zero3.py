"""Adaptations of DeepSpeed, chiefly of the way stage 3 takes over a module: one parameter at a
time.

By itself `deepspeed.initialize` takes the whole module: it sends all weights from the first copy to
the others, casts all of them under bf16, and keeps the partition twice. A rank would need far more
memory to begin than to train.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
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
    """Replace every parameter of `module` by this rank's part, in 16 bits if `narrow` has the
    parameter.

    topology: the engine's groups, as DeepSpeed's `mpu`; None: all ranks are copies.
    config: DeepSpeed's configuration.
    place: the rank among the copies, and the number of copies.

    The source of the values is released parameter by parameter.
    """
    import deepspeed

    # DeepSpeed's own launcher sets this. Without it, DeepSpeed starts `numactl` at every reduction
    # on a CPU.
    os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
    deepspeed.zero.Init(
        module=_Cast(module, narrow, place),
        data_parallel_group=topology and topology.get_data_parallel_group(),
        config_dict_or_path=config,
        mpu=topology,
    )


def with_weight_buffers(config: dict[str, Any], module: nn.Module, ranks: int) -> dict[str, Any]:
    """Return `config` with host buffers for the weights of `module` that `ranks` ranks keep in
    files.

    A buffer has room for a rank's part of the largest weight. As many are needed at once as a
    module, or a block that is gathered whole, has weights; twice as many let the next one's arrive
    meanwhile. By default DeepSpeed (0.19.8) has 5 buffers of 1e8 elements, and fails where a module
    has more weights, or larger ones.
    """
    zero = config["zero_optimization"]
    if zero.get("offload_param", {}).get("device") != "nvme":
        return config
    deepspeed = import_module("deepspeed.utils")
    counts, largest = [1], 1
    for inner in module.modules():
        is_whole = deepspeed.z3_leaf_module(inner)
        sizes = [p.numel() for p in inner.parameters(recurse=is_whole)]
        counts.append(len(sizes))
        largest = max(largest, *sizes, 1)
    buffers = {"buffer_size": -(-largest // ranks), "buffer_count": 2 * max(counts)}
    zero = {**zero, "offload_param": {**zero["offload_param"], **buffers}}
    return {**config, "zero_optimization": zero}


class _Cast(nn.Module):
    """A module whose `narrow` parameters are converted to 16 bits when DeepSpeed iterates over
    them."""

    def __init__(self, module: nn.Module, narrow: NarrowWeights, place: tuple[int, int]) -> None:
        super().__init__()
        self._module, self._narrow, self._place = module, narrow, place

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters, each filled and converted just before DeepSpeed partitions it."""
        for parameter in self._module.parameters(recurse):
            again = fill(parameter)
            if parameter.dtype == torch.float32:  # DeepSpeed iterates more than once
                self._narrow.narrow(parameter, *self._place, again)
            yield parameter


def gather_copies(module: nn.Module) -> None:
    """Make a process that is its own copies alone compute with copies of the weights it reads from
    files.

    Such a process gathers nothing: DeepSpeed 0.19.8 gives a module a view of the buffer that the
    file was read into, and reads the next weight into the same buffer. What a forward that runs
    again saves for its backward would be that weight.
    """
    swappers = {id(x): x for p in module.parameters() if (x := getattr(p, "nvme_swapper", None))}
    for swapper in swappers.values():
        swapper.synchronize_reads = _copying(swapper, swapper.synchronize_reads)


def _copying(swapper: Any, synchronize: Callable[[], None]) -> Callable[[], None]:
    """Return `synchronize`, which waits for the reads of `swapper`, with a copy of what was read
    afterwards."""

    def synchronize_and_copy() -> None:
        arriving = list(swapper.inflight_params)
        synchronize()
        for parameter in arriving:
            parameter.ds_tensor.data = parameter.ds_tensor.data.clone()

    return synchronize_and_copy


@contextmanager
def one_master_copy() -> Iterator[None]:
    """Make engines that are built in this context update an fp32 partition in place.

    Stage 3 copies the weights for the optimizer, except weights that are fp32 and already on the
    optimizer's device. It never recognises these, as it compares a `torch.device` with a device's
    name (DeepSpeed 0.19.8). During the comparison this context replaces the name by a
    `torch.device`. Offloaded weights are a second copy in any case.
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
    """Let engines that are built in this context partition parameters of several dtypes; each
    parameter group has one dtype.

    Stage 3 (DeepSpeed 0.19.8) moves all partitions into one flat tensor. With offloaded parameters,
    it moves each group's into a flat tensor of the first parameter's dtype. During the
    initialisation, this context gives it one flat tensor for each dtype, and for each group a flat
    tensor of the group's dtype.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import stage3

    optimizer_class = stage3.DeepSpeedZeroOptimizer_Stage3
    names = ("_set_fp16_partitioned_groups_flat", "_create_param_groups_fp16_flat_cpu_memory")
    originals = {name: getattr(optimizer_class, name) for name in names}
    flatten = stage3.defragment

    def flat_of_each_dtype(tensors: Sequence[Tensor]) -> dict[torch.dtype, Tensor]:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        return {dtype: flatten(partitions) for dtype, partitions in by_dtype.items()}

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
            flat = torch.empty(size, dtype=group["params"][0].ds_tensor.dtype)
            pinned = get_accelerator().pin_memory(flat)
            optimizer.param_groups_fp16_flat_cpu_memory.append(pinned)

    stage3.defragment = flat_of_each_dtype
    for name, replacement in zip(names, (set_groups_flat, make_groups_on_host), strict=True):
        setattr(optimizer_class, name, replacement)
    try:
        yield
    finally:
        stage3.defragment = flatten
        for name, own in originals.items():
            setattr(optimizer_class, name, own)


@contextmanager
def without_broadcast() -> Iterator[None]:
    """Keep engines that are built in this context from sending the first copy's weights to the
    others.

    All copies initialise their weights from the same seed. DeepSpeed's broadcast fails on
    parameters without dimensions (0.19.8).
    """
    from deepspeed import DeepSpeedEngine

    broadcast = DeepSpeedEngine._broadcast_model
    DeepSpeedEngine._broadcast_model = lambda engine: None
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = broadcast


@contextmanager
def unchecked_norms() -> Iterator[None]:
    """Keep steps in this context from checking whether their norm is finite.

    DeepSpeed would read the norm on the host, and so wait for all work of the device (0.19.8).
    """
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    modules = (stage3, stage_1_and_2)
    checks = [module.is_invalid_grad_norm for module in modules]
    for module in modules:
        module.is_invalid_grad_norm = lambda norm: False
    try:
        yield
    finally:
        for module, ask in zip(modules, checks, strict=True):
            module.is_invalid_grad_norm = ask


def gather_whole(blocks: Sequence[nn.Module]) -> None:
    """Make stage 3 gather all weights of a block when the block is called, for each of `blocks`.

    Modules inside a block then have no hooks. torch.compile would end a region at each hook.
    """
    import deepspeed

    for block in blocks:
        deepspeed.utils.set_z3_leaf_module(block, True)
