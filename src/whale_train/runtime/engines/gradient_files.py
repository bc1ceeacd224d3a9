"""Keep the gradients of ZeRO 3 in files from the backward that makes them on.

DeepSpeed 0.19.8 writes each partition of a gradient to a file, for an optimizer in files, and keeps
it in a flat buffer of all partitions as well, for further backwards of the step to add to. A step
with one backward needs the files alone. DeepSpeed's `managed_gradient_accumulation`, with one
micro-batch, writes them while the backward runs.
"""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class NewPartitions(Mapping[int, Tensor]):
    """A new tensor for a partition of a gradient, at every access.

    sizes: number of elements of the partition of each parameter, by the parameter's id.
    dtype, device: those of the tensors.
    """

    def __init__(self, sizes: Mapping[int, int], dtype: torch.dtype, device: str) -> None:
        self._sizes, self._dtype, self._device = sizes, dtype, device

    def __getitem__(self, number: int) -> Tensor:
        return torch.empty(self._sizes[number], dtype=self._dtype, device=self._device)

    def __iter__(self) -> Iterator[int]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)


@contextmanager
def without_gradient_buffer() -> Iterator[None]:
    """Make engines of ZeRO 3 that are built in this context keep no buffer of all gradients.

    Their optimizer must be in files, and a step must have one backward.
    """
    from deepspeed.runtime.zero import stage3

    optimizer_class = stage3.DeepSpeedZeroOptimizer_Stage3
    setup = optimizer_class._setup_for_real_optimizer

    def setup_without(optimizer: Any) -> None:
        # The buffer is made for all parameters that this call lists, and listed nowhere else.
        stage3.itertools = SimpleNamespace(
            chain=SimpleNamespace(from_iterable=lambda groups: iter(()))
        )
        try:
            setup(optimizer)
        finally:
            stage3.itertools = itertools
        sizes = {p.ds_id: p.partition_numel() for group in optimizer.fp16_groups for p in group}
        kind = (optimizer.gradient_accumulation_dtype, optimizer.device)
        name = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
        assert hasattr(optimizer, name)
        setattr(optimizer, name, NewPartitions(sizes, *kind))
        _release_with_remainders(optimizer.optimizer_swapper)

    optimizer_class._setup_for_real_optimizer = setup_without
    try:
        yield
    finally:
        optimizer_class._setup_for_real_optimizer = setup


def _release_with_remainders(swapper: Any) -> None:
    """Make `swapper` copy the last elements of a gradient that it keeps in memory, because files
    have whole sectors: as a view, they would keep the memory of the gradient."""
    swap_out = swapper.swap_out_gradients

    def swap_out_all(parameter: Tensor, **gradients: Any) -> None:
        swap_out(parameter=parameter, **gradients)
        in_memory = swapper._get_param_swap_info(parameter).unswapped_gradients
        for offset, tensor in in_memory.items():
            if tensor.nbytes < tensor.untyped_storage().nbytes():
                in_memory[offset] = tensor.clone()

    swapper.swap_out_gradients = swap_out_all
