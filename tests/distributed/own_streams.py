"""Streams as users write them, for `data._target_=own_streams....`."""

import random
from collections.abc import Iterator
from typing import Any

import torch
from tests.distributed.own_kinds import SAMPLES, SIZE, label, pixels
from torch.utils.data import IterableDataset, get_worker_info


class Endless(IterableDataset[Any]):
    """The images of `own_kinds`, rolled by chance, in an order of their own: without a state."""

    def __init__(self, rolls: bool = True) -> None:
        self.rolls, self.at = rolls, 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        shared = (info.id, info.num_workers) if info is not None else (0, 1)
        if torch.distributed.is_initialized() and info is not None:
            shared = (torch.distributed.get_rank(), torch.distributed.get_world_size())
        for number in range(self.at, SAMPLES):
            self.at = number + 1
            if number % shared[1] == shared[0]:
                by = random.randrange(SIZE) if self.rolls else 0
                image = torch.from_numpy(pixels(number)).roll(by, 1)
                yield (image.permute(2, 0, 1) / 255 - 0.5) / 0.25, label(number)


class Counted(Endless):
    """The same, with a length and a state."""

    def __len__(self) -> int:
        return SAMPLES

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Tupled(Counted):
    """The same, with a state that JSON would make another of."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": (self.at,)}


def streamed(rolls: bool = True) -> IterableDataset[Any]:
    return Counted(rolls)
