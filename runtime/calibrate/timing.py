"""The time on a device that is done with all it was asked for, and figures that ranks agree on."""

import time
from collections.abc import Iterable
from statistics import median, quantiles

import torch
from torch import distributed as dist


def now(device: torch.device) -> float:
    """Return the seconds on a clock of this rank's own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def undisturbed(seconds: Iterable[float]) -> float:
    """Return the lower quartile of two or more: what is not in it is what others did on the
    machine, for as much as three quarters of the time."""
    return quantiles(seconds, n=4, method="inclusive")[0]


def agreed(figure: float, group: dist.ProcessGroup | None = None) -> float:
    """Return the median of the figures of a group's members (None: of all ranks), the same on all
    of them."""
    figures: list[float] = [0.0] * dist.get_world_size(group)
    dist.all_gather_object(figures, figure, group)
    return median(figures)
