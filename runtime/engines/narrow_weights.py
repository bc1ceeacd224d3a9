"""Weights that ZeRO holds in 16 bits, of which the optimizer has an fp32 master partition.

A weight that nothing reads but what autocast lowers is held as the 16-bit value autocast would make
of it: what is computed is the same, and a rank has 2 bytes of it instead of 4 and a copy of 2. Its
gradient is fp32 from the backward that makes it on (`Tensor.grad_dtype`). DeepSpeed 0.19.8 makes
the fp32 master of the 16-bit value; here it gets the value it is to have.
"""

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn


class NarrowWeights:
    """`parameters` held in `dtype`, and their fp32 values until the optimizer has them; of `frozen`
    ones, which have no optimizer, nothing else is held."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        frozen: Set[nn.Parameter],
        dtype: torch.dtype | None,
    ) -> None:
        self.parameters = frozenset(parameters)
        self._frozen, self._dtype = frozen, dtype
        self._exact: dict[nn.Parameter, Callable[[], Tensor]] = {}
        for parameter in parameters:
            parameter.grad_dtype = torch.float32

    def narrow(
        self,
        parameter: nn.Parameter,
        rank: int = 0,
        ranks: int = 1,
        again: Callable[[], Tensor] | None = None,
    ) -> None:
        """Give `parameter`, if it is one of these, its 16-bit value, and remember of its fp32 value
        the part that ZeRO 3 leaves to `rank` of `ranks`: equal parts of the flat tensor, of which
        the last is padded; or how to have the value `again`, where that can be."""
        if parameter in self._frozen:
            parameter.data = parameter.data.to(self._dtype)
        if parameter not in self.parameters:
            return
        if again is not None:
            self._exact[parameter] = lambda: _part(again(), rank, ranks)
        elif ranks > 1:
            part = _part(parameter.detach(), rank, ranks).clone()
            self._exact[parameter] = lambda: part
        else:  # beside what a GPU is about to hold, the whole value were too much
            whole = parameter.detach().cpu()
            self._exact[parameter] = lambda: whole
        parameter.data = parameter.data.to(self._dtype)

    def give_masters(self, optimizer: Any, stage: int) -> None:
        """Write the fp32 values that were remembered into the partitions of `optimizer`."""
        for parameter, remembered in self._exact.items():
            if stage == 3:
                exact = remembered().flatten()
                master, _ = optimizer._get_fp32_opt_state_partition(
                    parameter, release_swap_buffers=False
                )
                master[: exact.numel()].data.copy_(exact)
                continue
            own = parameter._hp_mapping  # type: ignore[attr-defined]
            if own is None:  # another rank has all of it
                continue
            address = own.lp_fragment_address
            part = remembered().flatten().narrow(0, address.start, address.numel)
            own.hp_fragment.data.copy_(part)
        self._exact = {}


def _part(value: Tensor, rank: int, ranks: int) -> Tensor:
    """Return the part of a flat tensor that ZeRO 3 leaves to `rank` of `ranks`."""
    size = -(-value.numel() // ranks)
    return value.flatten()[size * rank : size * (rank + 1)]
