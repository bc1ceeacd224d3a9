"""Determine the number of threads that a rank computes with.

Importing this module is fast, because it does not import torch.
"""

import os

from whale_train.machine.limits import cores


def num_threads(local_world_size: int) -> int:
    """Return the number of threads of each of `local_world_size` ranks on a host.

    It is OMP_NUM_THREADS if that is a positive number, else the rank's share of the cores, at least
    1.
    """
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdigit() and int(setting) > 0:
        return int(setting)
    return max(1, cores() // local_world_size)


def set_num_threads(count: int) -> None:
    """Make torch compute with `count` threads."""
    import torch

    torch.set_num_threads(count)
