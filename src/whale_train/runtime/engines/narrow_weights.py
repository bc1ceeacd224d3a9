"""Weights that ZeRO holds in 16 bits, with an fp32 master partition in the optimizer.

A weight that is read only by operations that autocast lowers is held as the 16-bit value that
autocast would make of it. The results are the same, and a rank needs 2 bytes for an element instead
of 4 bytes and a copy of 2. The backward already makes the gradient in fp32 (`Tensor.grad_dtype`).
DeepSpeed 0.19.8 makes the fp32 master from the 16-bit value; `NarrowWeights` replaces the master by
the exact value.
"""

from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor, nn


class NarrowWeights:
    """Weights to hold in 16 bits, and their fp32 values until the optimizer has them.

    parameters: the trained parameters.
    frozen: the frozen parameters, which have no optimizer and no fp32 value.
    dtype: the 16-bit dtype; may be None only if both are empty.
    """

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
        """Convert `parameter` to its 16-bit value, if it is one of these weights, and store the
        fp32 value.

        Only the part that ZeRO 3 leaves to `rank` of `ranks` is stored: equal parts of the
        flattened tensor, of which the last is padded. If `again` is given, nothing is stored;
        `again` computes the whole value once more when it is needed.
        """
        if parameter in self._frozen:
            parameter.data = parameter.data.to(self._dtype)
        if parameter not in self.parameters:
            return
        if again is not None:
            self._exact[parameter] = lambda: _part(again(), rank, ranks)
        elif ranks > 1:
            part = _part(parameter.detach(), rank, ranks).clone()
            self._exact[parameter] = lambda: part
        else:  # the whole value may not fit beside the GPU's other tensors
            on_host = parameter.detach().cpu()
            self._exact[parameter] = lambda: on_host
        parameter.data = parameter.data.to(self._dtype)

    def give_masters(self, master_of: Callable[[nn.Parameter], tuple[Tensor, int] | None]) -> None:
        """Write the stored fp32 values into the optimizer's, and drop the stored values.

        `master_of` returns this rank's fp32 values of a parameter and the index of the first one in
        the flattened parameter; None where another rank has all of it.
        """
        for parameter, remembered in self._exact.items():
            held = master_of(parameter)
            if held is None:
                continue
            master, start = held
            exact = remembered().flatten()
            # Under ZeRO 3 this rank's part alone was stored.
            first = 0 if exact.numel() == master.numel() else start
            master.copy_(exact.narrow(0, first, master.numel()))
        self._exact = {}


def _part(value: Tensor, rank: int, ranks: int) -> Tensor:
    """Return the flattened elements of `value` that ZeRO 3 leaves to `rank` of `ranks`."""
    size = -(-value.numel() // ranks)
    return value.flatten()[size * rank : size * (rank + 1)]
