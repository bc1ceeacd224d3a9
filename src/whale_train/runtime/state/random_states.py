"""Read and write the random states that a rank's steps draw from, as plain data."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whale_train.runtime.graph.shard_rng import SharedRandom


class RandomStates:
    """The random states of this process's default generators and of its shard groups (`shared`)."""

    def __init__(self, shared: Sequence[SharedRandom]) -> None:
        self._shared = shared

    def read(self) -> dict[str, Any]:
        """Return the states for a checkpoint: hexadecimal text by generator."""
        states: dict[str, Any] = {"cpu": _text(torch.get_rng_state())}
        if torch.cuda.is_available():
            states["cuda"] = _text(torch.cuda.get_rng_state())
        return states | {"shared": [_text(random.state) for random in self._shared]}

    def write(self, states: dict[str, Any]) -> None:
        """Set all generators to `states`, a result of `read`."""
        torch.set_rng_state(_tensor(states["cpu"]))
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(_tensor(states["cuda"]))
        for random, text in zip(self._shared, states["shared"], strict=True):
            random.state = _tensor(text)


def _text(state: Tensor) -> str:
    return bytes(state.tolist()).hex()


def _tensor(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
