"""Read and write the random states that a rank's steps draw from, as plain data."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from whale_train.checkpoints.safetensors_files import read_json
from whale_train.checkpoints.url_path import Place
from whale_train.runtime.graph.shard_rng import SharedRandom
from whale_train.strategies.plan.plan import Plan


class RankRandom(Protocol):
    """The random states of a rank, in a checkpoint's `random/rank_N.json`."""

    def read(self) -> dict[str, Any]:
        """Return the states for a checkpoint, as JSON data."""

    def restore(self, checkpoint: Place, saved: Plan | None, plan: Plan, step: int) -> None:
        """Set the states to those of `checkpoint`, which was saved under the plan `saved` after
        `step` steps; None where the plan cannot be read. `plan` is that of the run."""


class RandomStates:
    """The random states of this process's default generators and of its shard groups (`shared`)."""

    def __init__(self, shared: Sequence[SharedRandom], rank: int) -> None:
        self._shared, self._rank = shared, rank

    def read(self) -> dict[str, Any]:
        """Return the states for a checkpoint: hexadecimal text by generator."""
        states: dict[str, Any] = {"cpu": bytes_text(torch.get_rng_state())}
        if torch.cuda.is_available():
            states["cuda"] = bytes_text(torch.cuda.get_rng_state())
        return states | {"shared": [bytes_text(random.state) for random in self._shared]}

    def restore(self, checkpoint: Place, saved: Plan | None, plan: Plan, step: int) -> None:
        """Set the states to those of a checkpoint that was saved under an equal plan.

        The states of another plan fit no rank, so the default generator is then seeded from this
        run's seed and the step.
        """
        drawn = random_file(checkpoint, self._rank)
        if saved is not None and _computed(saved) == _computed(plan) and drawn.is_file():
            self.write(read_json(drawn))
        else:
            torch.manual_seed(torch.initial_seed() + 7_368_787 * step)

    def write(self, states: dict[str, Any]) -> None:
        """Set all generators to `states`, a result of `read`."""
        torch.set_rng_state(tensor_of(states["cpu"]))
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensor_of(states["cuda"]))
        for random, text in zip(self._shared, states["shared"], strict=True):
            random.state = tensor_of(text)


def random_file(checkpoint: Place, rank: int) -> Place:
    """Return the file of a rank's random states in a checkpoint."""
    return checkpoint / "random" / f"rank_{rank}.json"


def bytes_text(tensor: Tensor) -> str:
    """Return the bytes of a tensor as hexadecimal text."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes().hex()


def tensor_of(text: str) -> Tensor:
    """Return the bytes of hexadecimal text, uint8 [n]."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _computed(plan: Plan) -> Plan:
    """Return the plan without the ids of its GPUs and without its decisions.

    No computation depends on them.
    """
    ranks = tuple(replace(rank, uuid=None) for rank in plan.ranks)
    return replace(plan, ranks=ranks, decisions=())
