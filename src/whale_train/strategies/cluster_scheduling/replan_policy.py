"""Share devices among jobs by their sensitivity curves: the policy of Rubick (arXiv 2408.08586).

Every guaranteed job gets its minimum resources first. The rest goes, one step at a time, to the job
with the steepest curve, and is taken from jobs whose speed falls least by it.
"""

from dataclasses import dataclass, field
from math import inf

from whale_train.strategies.cluster_scheduling.schedulable_job import (
    Allocation,
    JobState,
    SchedulableJob,
)
from whale_train.strategies.cluster_scheduling.sensitivity_curve import (
    SensitivityCurve,
    curve_of,
    devices_as_requested,
    least_devices,
)

_WORTH = 1.01  # a device changes hands for at least this ratio of gain to loss


@dataclass(frozen=True)
class ReplanOptions:
    """Options of the policy.

    reconfiguration_s: seconds that a job loses when it is stopped and goes on under another plan.
    least_useful_share: a job is left as it is where the time lost by reconfigurations leaves less
        than this share of its time since it started (Rubick's threshold is 0.97). The guarantee of
        another job overrides this, down to the job's minimum resources: those of a guaranteed job,
        and then also of a best-effort one, are the ones as fast as what was requested.
    starvation_s: a job that has waited longer comes before all that have not, and no other waiting
        job starts before it.
    replans: whether jobs may run under another plan than the requested one.
    """

    reconfiguration_s: float = 78.0
    least_useful_share: float = 0.97
    starvation_s: float = 3600.0
    replans: bool = True


@dataclass(frozen=True)
class ReplanPolicy:
    """The policy, as a `Policy`. Policies with equal options decide alike."""

    options: ReplanOptions = ReplanOptions()

    def __call__(self, now_s: float, states: list[JobState], devices: int) -> dict[str, Allocation]:
        """Return the allocation of every job that is to run, by its name."""
        return _Round(self.options, now_s, devices, states).decide()


@dataclass
class _Entry:
    """A job within one round of the policy.

    state, curve: the job, and its curve over the whole cluster.
    minimum: the fewest devices that it may be shrunk to.
    unit: the speed that its slopes are relative to, so that jobs compare: the requested one.
    held: number of devices in the round's result so far.
    is_free: whether the job may be reconfigured by choice.
    """

    state: JobState
    curve: SensitivityCurve
    minimum: int
    unit: float
    held: int
    is_free: bool

    @property
    def job(self) -> SchedulableJob:
        return self.state.job

    @property
    def is_waiting(self) -> bool:
        return self.state.allocation is None

    def gain(self) -> float:
        """Return the relative gain of speed by each further device."""
        return self.curve.gain(self.held).per_device / self.unit

    def loss(self) -> float:
        """Return the relative loss of speed by each device taken away; infinite where none can
        be."""
        return self.curve.loss(self.held, self.minimum).per_device / self.unit


@dataclass
class _Round:
    """One decision: entries whose `held` is changed until nothing better is found."""

    options: ReplanOptions
    now_s: float
    devices: int
    states: list[JobState]
    entries: list[_Entry] = field(default_factory=list)

    def decide(self) -> dict[str, Allocation]:
        self.entries = [self._entry(state) for state in self.states]
        self._guarantee()
        self._grow()
        return {x.job.name: y for x in self.entries if (y := self._allocation(x)) is not None}

    def _entry(self, state: JobState) -> _Entry:
        job = state.job
        plans = job.plans if self.options.replans else (job.plan,)
        curve = curve_of(job.throughput, plans, self.devices)
        unit = job.requested_samples_per_s or curve.points[-1].samples_per_s or inf
        held = 0 if state.allocation is None else state.allocation.devices
        is_free = state.started_s is None or self._may_change(state)
        minimum = least_devices(job, curve)
        if not job.is_guaranteed and not is_free:  # has been stopped as often as may be
            minimum = min(held, devices_as_requested(job, curve))
        return _Entry(state, curve, minimum, unit, held, is_free)

    def _may_change(self, state: JobState) -> bool:
        """Return whether the reconfigurations of a job that has run have cost little enough."""
        assert state.started_s is not None
        lost = state.reconfigurations * self.options.reconfiguration_s
        spent = self.now_s - state.started_s
        return spent - lost >= self.options.least_useful_share * spent

    def _is_starved(self, entry: _Entry) -> bool:
        waited = self.now_s - entry.state.waiting_since_s
        return entry.is_waiting and waited > self.options.starvation_s

    @property
    def _free(self) -> int:
        return self.devices - sum(entry.held for entry in self.entries)

    def _guarantee(self) -> None:
        """Give guaranteed jobs that have less, and starved ones, their minimum resources, taken
        from jobs that have more than theirs where none are free.

        Starved jobs come first, the longest waiting first, then others by their slope.
        """
        starved = sorted(
            (x for x in self.entries if self._is_starved(x)), key=lambda x: x.state.waiting_since_s
        )
        others = [x for x in self.entries if x.held < x.minimum and not self._is_starved(x)]
        others.sort(key=lambda x: -x.curve.rate(x.minimum) / x.unit / max(1, x.minimum))
        free = self._free
        spare = free + sum(x.held - x.minimum for x in self.entries if x.held > x.minimum)
        for entry in [*starved, *others]:
            minimum = entry.minimum or devices_as_requested(entry.job, entry.curve)
            need = minimum - entry.held
            if not 0 < need <= self.devices:
                continue
            if spare < need:
                if self._is_starved(entry):
                    self._hold_back()
                    return
                continue
            while free < need and (shrunk := self._least_loss(entry)) is not None:
                slope = shrunk.curve.loss(shrunk.held, shrunk.minimum)
                shrunk.held -= slope.devices
                free += slope.devices
            if free < need:
                continue
            entry.held = entry.minimum = (
                minimum  # what has waited so long is not taken from at once
            )
            free, spare = free - need, spare - need

    def _hold_back(self) -> None:
        """Have no further waiting job start in this round: a starved job needs the room."""
        for entry in self.entries:
            if entry.is_waiting and not entry.held:
                entry.is_free = False

    def _least_loss(self, apart_from: _Entry) -> _Entry | None:
        """Return the job that loses the least speed by giving up devices; None where none can.

        Jobs that are reconfigured too often already come last, and before them guaranteed ones.
        """
        able = [x for x in self.entries if x is not apart_from and x.held > x.minimum]
        return min(able, key=lambda x: (not x.is_free, x.job.is_guaranteed, x.loss()), default=None)

    def _grow(self) -> None:
        """Give devices to the job that gains most by each, until no job gains more than those that
        would give devices up lose."""
        growing = [x for x in self.entries if x.is_free and self._may_grow(x)]
        free = self._free
        while growing:
            entry = max(growing, key=_Entry.gain)
            step = entry.curve.gain(entry.held)
            if step.devices <= free:
                taken: dict[int, tuple[_Entry, int]] | None = {}
            else:
                taken = self._taken_from(entry, step.devices - free, entry.gain() * step.devices)
            if not step.devices or taken is None or not self._pays(entry, step.devices):
                growing.remove(entry)
                continue
            for giver, held in taken.values():
                free += giver.held - held
                giver.held = held
            entry.held += step.devices
            free -= step.devices

    def _may_grow(self, entry: _Entry) -> bool:
        """Return whether a job may start or grow in this part of the round: a guaranteed job that
        waits starts with its minimum resources or not at all."""
        return bool(entry.held) or not entry.job.is_guaranteed

    def _pays(self, entry: _Entry, more: int) -> bool:
        """Return whether a running job ends earlier with `more` devices, the reconfiguration
        included."""
        if entry.is_waiting:
            return True
        assert entry.state.allocation is not None
        allocation = entry.state.allocation
        if entry.held < allocation.devices:  # is reconfigured anyway
            return True
        return self._saves(entry, entry.curve.rate(entry.held + more))

    def _saves(self, entry: _Entry, rate: float) -> bool:
        """Return whether the rest of a running job at another speed takes less time than as it
        is, by more than a reconfiguration."""
        assert entry.state.allocation is not None
        allocation, job = entry.state.allocation, entry.job
        samples = entry.state.remaining_steps * job.global_batch
        before = job.throughput(allocation.devices, allocation.plan)
        if before <= 0.0:
            return True
        return samples / before - samples / rate > self.options.reconfiguration_s

    def _taken_from(
        self, entry: _Entry, missing: int, gain: float
    ) -> dict[int, tuple[_Entry, int]] | None:
        """Return the jobs that give up `missing` devices for less than `gain` and what they keep,
        or None where there are none.

        gain: relative speed that the devices are worth to `entry`.
        """
        taken: dict[int, tuple[_Entry, int]] = {}
        lost = 0.0
        givers = [x for x in self.entries if x is not entry and x.is_free and x.held > x.minimum]
        while missing > 0:
            best: tuple[float, int, _Entry] | None = None
            for giver in givers:
                held = taken.get(id(giver), (giver, giver.held))[1]
                slope = giver.curve.loss(held, giver.minimum)
                if slope.devices and (best is None or slope.per_device / giver.unit < best[0]):
                    best = slope.per_device / giver.unit, slope.devices, giver
            if best is None:
                return None
            per_device, devices, giver = best
            held = taken.get(id(giver), (giver, giver.held))[1]
            taken[id(giver)] = giver, held - devices
            lost, missing = lost + per_device * devices, missing - devices
            if lost * _WORTH >= gain:
                return None
        return taken

    def _allocation(self, entry: _Entry) -> Allocation | None:
        """Return the allocation of a job at the end of the round; None lets it wait."""
        if not entry.held:
            return None
        before, point = entry.state.allocation, entry.curve.points[entry.held]
        if before is None or entry.held != before.devices:
            return point.allocation
        is_faster = point.allocation != before and entry.is_free
        if is_faster and self._saves(entry, point.samples_per_s):
            return point.allocation
        return before
