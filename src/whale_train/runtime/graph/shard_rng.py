"""Draw random numbers that are equal on all members of a shard group.

A value that is replicated over a group must stay replicated after dropout: every member draws the
same mask, from a random state of the group. Where values are sharded, members draw from their
default generators, which differ.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SharedRandom:
    """The random state of one group of ranks, apart from the default generator's state.

    `seed` must be the same on all members and differ between groups. Members must call this object
    in the same order. `state` may be saved and set again, as recomputation of a forward does.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        generator = torch.Generator(device if device.type == "cuda" else "cpu")
        generator.manual_seed(seed)
        self.state: Tensor = generator.get_state()

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return `function(*args, **kwargs)`, which draws from the group's state."""
        rank_state = self._get()
        self._set(self.state)
        try:
            return function(*args, **kwargs)
        finally:
            self.state = self._get()
            self._set(rank_state)

    def _get(self) -> Tensor:
        if self._device.type == "cuda":
            return torch.cuda.get_rng_state(self._device)
        return torch.get_rng_state()

    def _set(self, state: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)
