"""The time below which no strategy can be: all work, on all devices as fast as each ever is."""

from collections.abc import Mapping

from whale_train.strategies.estimate.block_costs import BlockCosts
from whale_train.strategies.hardware.cluster import Cluster, Device
from whale_train.strategies.plan.training import Training


def floor_s(costs: BlockCosts, cluster: Cluster, training: Training) -> float:
    """Return the seconds in which the devices of `cluster` compute a step's samples together, each
    as fast as it is with a whole batch, if nothing waits, is sent or updated."""
    batch, devices = training.global_batch, _kinds(cluster)
    rate = 0.0
    for device, count in devices.values():
        one, two = (costs.whole(device, samples).total for samples in (batch, 2 * batch))
        each = (two - one) / batch
        rate += count / each if each > 0 else float("inf")
    shared = min(1.0, cluster.processors / len(cluster.devices))
    return batch / (rate * shared)


def _kinds(cluster: Cluster) -> Mapping[int, tuple[Device, int]]:
    """Return every device that differs, and how many are equal to it."""
    found: dict[int, tuple[Device, int]] = {}
    for device in cluster.devices:
        _, count = found.get(id(device), (device, 0))
        found[id(device)] = device, count + 1
    return found
