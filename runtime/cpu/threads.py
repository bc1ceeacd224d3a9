"""How many threads a rank computes with. Importing this takes a moment: no torch."""

import os

from whale_train.machine.limits import cores


def num_threads(local_world_size: int) -> int:
    """Return a rank's share of the cores, or what OMP_NUM_THREADS asks for."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return max(1, cores() // local_world_size)


def set_num_threads(count: int) -> None:
    """Give torch `count` threads."""
    import torch

    torch.set_num_threads(count)
