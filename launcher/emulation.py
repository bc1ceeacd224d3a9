"""How slowly a CPU process computes to stand for a device (`launcher.device_speed`)."""

from collections.abc import Sequence

from whale_train.strategies.cluster import Device
from whale_train.strategies.cost import flops_rate

# The part of the machine's processors that ranks may fill, so that none has to wait for one.
_FILLED = 0.9


def paces(devices: Sequence[Device], precision: str, processors: float) -> tuple[float, ...]:
    """For each of the devices, the seconds its process takes for a second on a processor.

    In proportion to the devices' peak FLOP/s. The fastest takes a second, unless the ranks would
    together want more than the `processors` there are (of as many threads as a rank has): then
    all are slowed alike.
    """
    rates = [flops_rate(device, precision) for device in devices]
    relative = [rate / max(rates) for rate in rates]
    crowd = max(1.0, sum(relative) / (_FILLED * processors))
    return tuple(crowd / part for part in relative)
