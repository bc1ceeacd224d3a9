"""How DeepSpeed's stage 3 takes over a module's parameters: one at a time, and each once.

`deepspeed.initialize` by itself takes the whole module: it sends all of it from the first copy to
the others, casts all of it under bf16, and keeps the partition twice. A rank would need far more
memory to begin than to train.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def partition(module: nn.Module, topology: Any, config: dict[str, Any]) -> None:
    """Leave this rank its part of every parameter of `module`, in the dtype of `config`. Where
    the first copy's values come from is let go of parameter by parameter."""
    import deepspeed

    # As its own launcher says it. On a CPU it otherwise starts `numactl` at every reduction.
    os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
    deepspeed.zero.Init(
        module=_Cast(module, torch.bfloat16 if config["bf16"]["enabled"] else None),
        data_parallel_group=topology and topology.get_data_parallel_group(),
        config_dict_or_path=config,
        mpu=topology,
    )


class _Cast(nn.Module):
    """A module whose floating-point parameters are of `dtype` by the time they are looked at."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._module = module
        self._dtype = dtype

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in self._module.parameters(recurse):
            if self._dtype is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(self._dtype)
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
