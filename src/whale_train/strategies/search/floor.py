"""Bound the step time of every strategy from below: all work, on all devices at full speed."""

from collections.abc import Mapping

from whale_train.strategies.estimate.block_costs import BlockCosts
from whale_train.strategies.hardware.cluster import Cluster, Device
from whale_train.strategies.plan.training import Training


def floor_s(costs: BlockCosts, cluster: Cluster, training: Training) -> float:
    """Return a lower bound, in seconds, on the step time of every strategy on `cluster`.

    The devices compute the samples of a step together, each at the speed that it reaches with a
    whole batch. Waiting, transfers and updates take no time. Devices that share fewer processors
    are slower in proportion.
    """
    batch, devices = training.global_batch, _kinds(cluster)
    rate = 0.0
    for device, count in devices.values():
        one, two = (costs.whole(device, samples).total for samples in (batch, 2 * batch))
        sample_s = (two - one) / batch
        rate += count / sample_s if sample_s > 0 else float("inf")
    shared = min(1.0, cluster.processors / len(cluster.devices))
    return batch / (rate * shared)


def _kinds(cluster: Cluster) -> Mapping[int, tuple[Device, int]]:
    """Return every distinct device of `cluster` with its number of ranks, by the device's `id`."""
    kinds: dict[int, tuple[Device, int]] = {}
    for device in cluster.devices:
        _, count = kinds.get(id(device), (device, 0))
        kinds[id(device)] = device, count + 1
    return kinds
