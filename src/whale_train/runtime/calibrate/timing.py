"""Take times on a device after it has finished all its work, and agree on figures between ranks."""

import time
from collections.abc import Iterable
from statistics import median, quantiles

import torch
from torch import distributed as dist

Moment = float | torch.cuda.Event


def moment(device: torch.device) -> Moment:
    """Return the time at which `device` finishes all work enqueued so far.

    On a GPU it is an event, which the host does not wait for: the time between two events includes
    host time only where the GPU waits for work.
    """
    if device.type != "cuda":
        return time.perf_counter()
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seconds(first: Moment, last: Moment) -> float:
    """Return the seconds between two moments of a device. The host waits for `last`."""
    if isinstance(first, float) or isinstance(last, float):
        assert isinstance(first, float)
        assert isinstance(last, float)
        return last - first
    last.synchronize()
    milliseconds: float = first.elapsed_time(last)
    return milliseconds / 1000


def now(device: torch.device) -> float:
    """Return the seconds on this rank's own clock, after `device` has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def undisturbed(seconds: Iterable[float]) -> float:
    """Return the lower quartile of two or more times.

    Disturbances by others on the machine do not affect it while they last for at most three
    quarters of the time.
    """
    return quantiles(seconds, n=4, method="inclusive")[0]


def agreed(figure: float, group: dist.ProcessGroup | None = None) -> float:
    """Return the median of `figure` over the members of a group (None: all ranks), the same on all
    members.

    A collective of the group.
    """
    figures: list[float] = [0.0] * dist.get_world_size(group)
    dist.all_gather_object(figures, figure, group)
    return median(figures)
