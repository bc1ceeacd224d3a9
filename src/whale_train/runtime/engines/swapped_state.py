"""Read and write the optimizer state that ZeRO 3 keeps in files, as tensors mapped from them.

DeepSpeed 0.19.8 holds each sub-group's fp32 values and moments in files of its own between updates,
and has empty tensors in their place. Sub-groups under 1 MB stay in memory.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whale_train.runtime.optim.optimizers import KeptState, state_of


class SwappedState:
    """The state of DeepSpeed's ZeRO 3 `optimizer` that is in files."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def has(self, group: int) -> bool:
        """Return True if the state of sub-group `group` is in files."""
        return bool(self._optimizer._swappable_optimizer_subgroup(group))

    def value(self, group: int) -> Tensor:
        """Return the fp32 values of sub-group `group`, mapped: writing to them changes the file."""
        return _mapped(self._info(group).tensors[0].swap_path, self._size(group))

    def state(self, group: int) -> KeptState:
        """Return the state of sub-group `group`, with mapped moments. A state that the first update
        would create is created."""
        flat, inner = self._optimizer.fp32_partitioned_groups_flat[group], self._optimizer.optimizer
        swapper, info = self._optimizer.optimizer_swapper, self._info(group)
        if not info.has_state_tensors:
            swapper.swap_in_optimizer_state(flat)
            state_of(inner, flat)
            # Gradients that were sent to files, or wait in memory, stay as they are.
            swapper.writeback_optimizer_state_and_gradients(flat, True, False)
            flat.grad = None
        own_state = state_of(inner, flat)
        files = {id(x.compute_tensor): x.swap_path for x in info.tensors[1:]}
        moments = {
            name: _mapped(files[id(tensor)], self._size(group))
            for name, tensor in own_state.moments.items()
        }
        return KeptState(moments, own_state.entries, own_state.apart)

    def flush(self) -> None:
        """Make what was written to mapped tensors visible to DeepSpeed's reads, which bypass the
        page cache."""
        for group in filter(self.has, range(len(self._optimizer.fp16_groups))):
            for tensor in self._info(group).tensors:
                _sync(tensor.swap_path)

    def write_weight(self, parameter: nn.Parameter, value: Tensor) -> bool:
        """Write this rank's part of a weight to its file, and return True; return False where the
        weight is in memory. `value` is flattened and without padding."""
        from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

        part = parameter.ds_tensor  # type: ignore[attr-defined]
        if part.status == PartitionedParamStatus.AVAILABLE:
            return False
        path = parameter.nvme_swapper.get_path(parameter, must_exist=True)  # type: ignore[attr-defined]
        _mapped(path, value.numel()).copy_(value)
        _sync(path)
        return True

    def _info(self, group: int) -> Any:
        """Return DeepSpeed's record of the files of sub-group `group`."""
        flat = self._optimizer.fp32_partitioned_groups_flat[group]
        return self._optimizer.optimizer_swapper._get_param_swap_info(flat)

    def _size(self, group: int) -> int:
        """Return the number of elements of sub-group `group` on this rank."""
        return int(self._optimizer.fp16_partitioned_groups_flat_numel[group])


def _mapped(path: str, size: int) -> Tensor:
    """Return the first `size` fp32 numbers of the file `path`, mapped for reading and writing."""
    return torch.from_file(path, shared=True, size=size, dtype=torch.float32)


def _sync(path: str) -> None:
    """Write the pages of the file `path` that were changed in memory."""
    descriptor = os.open(Path(path), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
