"""Replace random numbers by fixed ones, so that a model's results can be compared."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from whale_train.models.seeded_draws import OwnSeed


class FixedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode in which draws from torch's default generator return fixed numbers.

    A real number becomes 0.5, a whole number the smallest one drawn. A random permutation of 0 to
    n-1 becomes the reverse order. Dropouts and attention are left to `DropoutOff`. Draws from a
    generator that the forward seeds are unchanged (`models/seeded_draws.py`).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        self._seed = OwnSeed()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **dict(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags or self._seed.is_seeded(kwargs or {}):
            return made
        if "dropout" in str(func) or "attention" in str(func):
            return made  # `DropoutOff` handles these
        return tree_map_only(Tensor, _fixed, made)


def _fixed(drawn: Tensor) -> Tensor:
    """Write the fixed numbers into `drawn` and return it."""
    if drawn.is_floating_point():
        return drawn.fill_(0.5)
    if drawn.dim() == 1 and len(drawn) and torch.equal(drawn.sort()[0], _numbers(drawn)):
        return drawn.copy_(_numbers(drawn).flip(0))
    return drawn.fill_(int(drawn.min())) if drawn.numel() else drawn


def _numbers(like: Tensor) -> Tensor:
    """Return 0 to n-1 as [n], with the length, dtype and device of `like`."""
    return torch.arange(len(like), dtype=like.dtype, device=like.device)
