"""The time on a device that is done with all it was asked for, and figures that ranks agree on."""

import time
from collections.abc import Iterable
from statistics import median, quantiles

import torch
from torch import distributed as dist

Moment = float | torch.cuda.Event


def moment(device: torch.device) -> Moment:
    """Return a moment in what a device does. A GPU's comes when it has done what it was asked for
    before, and nobody waits for it: between two of them there is no time of the host's but what the
    GPU spends waiting for work."""
    if device.type != "cuda":
        return time.perf_counter()
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seconds(first: Moment, last: Moment) -> float:
    """Return the seconds between two moments of a device, once the last has come."""
    if isinstance(first, float) or isinstance(last, float):
        assert isinstance(first, float)
        assert isinstance(last, float)
        return last - first
    last.synchronize()
    milliseconds: float = first.elapsed_time(last)
    return milliseconds / 1000


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
