"""Find how a job's speed depends on its number of devices, each number with the best plan on it.

The curves, their slopes and the minimum resources of a guaranteed job are those of Rubick (arXiv
2408.08586, its resource sensitivity curves).
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf

from whale_train.strategies.cluster_scheduling.schedulable_job import (
    Allocation,
    SchedulableJob,
    Throughput,
)

_EQUAL = 1e-9  # relative: rates that differ by less are the same


@dataclass(frozen=True)
class CurvePoint:
    """The best use of a number of devices.

    devices: number of devices in use, which may be fewer than there are: more would not be faster.
    plan: name of the plan on them; '' where no plan fits.
    samples_per_s: speed.
    """

    devices: int
    plan: str
    samples_per_s: float

    @property
    def allocation(self) -> Allocation:
        """Return the point as what a job is given."""
        return Allocation(self.devices, self.plan)


@dataclass(frozen=True)
class Slope:
    """A change of resources and the change of speed that it brings.

    devices: number of devices gained or lost.
    per_device: samples a second gained or lost for each of them.
    """

    devices: int
    per_device: float


NO_GAIN = Slope(0, 0.0)
NO_LOSS_POSSIBLE = Slope(0, inf)


@dataclass(frozen=True)
class SensitivityCurve:
    """A job's best speed by the largest number of devices that it may use.

    points: the best use of at most n devices, for n from 0 to the cluster's number. Speeds never
        fall along the curve.
    """

    points: tuple[CurvePoint, ...]

    def rate(self, devices: int) -> float:
        """Return samples a second on at most `devices` devices."""
        return self.points[min(devices, len(self.points) - 1)].samples_per_s

    def gain(self, devices: int) -> Slope:
        """Return the steepest way up from `devices` devices.

        The way may skip numbers of devices that bring nothing: a job whose plans need four devices
        gains nothing from one. Returns `NO_GAIN` at the curve's highest speed.
        """
        return self._gains[devices]

    def loss(self, devices: int, minimum: int) -> Slope:
        """Return the gentlest way down from `devices` devices to no fewer than `minimum`, or
        `NO_LOSS_POSSIBLE` where there is none."""
        best = NO_LOSS_POSSIBLE
        for fewer in range(devices - 1, minimum - 1, -1):
            if self.points[fewer].devices < fewer:  # its devices beyond those are of no use
                continue
            slope = (self.rate(devices) - self.rate(fewer)) / (devices - fewer)
            if slope < best.per_device:
                best = Slope(devices - fewer, slope)
        return best

    @cached_property
    def rates(self) -> tuple[float, ...]:
        """Return samples a second on at most 0, 1, 2, ... devices."""
        return tuple(point.samples_per_s for point in self.points)

    @cached_property
    def _gains(self) -> tuple[Slope, ...]:
        return tuple(map(self._steepest_from, range(len(self.points))))

    def _steepest_from(self, devices: int) -> Slope:
        best, here = NO_GAIN, self.rate(devices)
        for point in self.points[devices + 1 :]:
            more = point.devices - devices
            if more > 0 and point.samples_per_s > here * (1 + _EQUAL):
                slope = (point.samples_per_s - here) / more
                if slope > best.per_device * (1 + _EQUAL):
                    best = Slope(more, slope)
        return best


@lru_cache(maxsize=4096)
def curve_of(throughput: Throughput, plans: tuple[str, ...], most: int) -> SensitivityCurve:
    """Return the sensitivity curve of a job with this speed and these plans, up to `most`
    devices."""
    points = [CurvePoint(0, "", 0.0)]
    for devices in range(1, most + 1):
        speed, plan = max(
            ((throughput(devices, plan), plan) for plan in plans), key=lambda pair: pair[0]
        )
        is_better = speed > points[-1].samples_per_s * (1 + _EQUAL)
        points.append(CurvePoint(devices, plan, speed) if is_better else points[-1])
    return SensitivityCurve(tuple(points))


def least_devices(job: SchedulableJob, curve: SensitivityCurve) -> int:
    """Return the minimum resources of a job: 0 if it is best-effort, else the fewest devices on
    which it is as fast as on the resources and plan that were requested.

    A guaranteed job whose request has no plan, or is for more devices than the curve has, needs
    what gives the best speed on as many as were requested and exist.
    """
    if not job.is_guaranteed:
        return 0
    return devices_as_requested(job, curve)


def devices_as_requested(job: SchedulableJob, curve: SensitivityCurve) -> int:
    """Return the fewest devices on which a job is as fast as on the resources and plan that were
    requested, or first runs at all where that request has no plan."""
    wanted = job.requested_samples_per_s
    if wanted <= 0.0 or wanted > curve.points[-1].samples_per_s * (1 + _EQUAL):
        at_most = curve.points[min(job.devices, len(curve.points) - 1)]
        return at_most.devices or curve.gain(0).devices
    place = bisect_left(curve.rates, wanted * (1 - _EQUAL))  # rates never fall along the curve
    return curve.points[place].devices
