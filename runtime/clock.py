"""The time on a device that is done with all it was asked for, and figures that ranks agree on."""

import time
from statistics import median

import torch
from torch import distributed as dist


def now(device: torch.device) -> float:
    """Seconds on a clock of this rank's own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def agreed(figure: float) -> float:
    """The median of all ranks' figures, the same on all of them."""
    figures: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(figures, figure)
    return median(figures)
