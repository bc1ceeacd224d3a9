"""Scheduling of jobs by their sensitivity curves: curves, the policy, baselines, the simulation."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whale_train.errors import ConfigError
from whale_train.launcher.schedule.submissions import read_trace
from whale_train.strategies.cluster_scheduling.baseline_policies import policies
from whale_train.strategies.cluster_scheduling.replan_policy import ReplanOptions, ReplanPolicy
from whale_train.strategies.cluster_scheduling.schedulable_job import (
    Allocation,
    JobState,
    SchedulableJob,
)
from whale_train.strategies.cluster_scheduling.sensitivity_curve import (
    curve_of,
    devices_as_requested,
    least_devices,
)
from whale_train.strategies.cluster_scheduling.simulate_schedule import simulate_schedule

DEVICES = 8


@dataclass(frozen=True)
class Speeds:
    """Samples a second under each plan on 1, 2, ... devices."""

    by_plan: tuple[tuple[str, tuple[float, ...]], ...]

    def __call__(self, devices: int, plan: str) -> float:
        speeds = dict(self.by_plan)[plan]
        return speeds[devices - 1] if 0 < devices <= len(speeds) else 0.0


LINEAR = Speeds((("slow", (1, 2, 3, 4, 5, 6, 7, 8)), ("fast", (0, 4, 0, 8, 0, 9, 0, 10))))
FLAT = Speeds((("slow", (4, 5, 5.5, 5.75, 5.8, 5.8, 5.8, 5.8)), ("fast", (0,) * 8)))


def job(name: str, devices: int, throughput: Speeds = LINEAR, **given: object) -> SchedulableJob:
    plans = ("slow", "fast")
    made = {"arrival_s": 0.0, "steps": 100, "global_batch": 1, "is_guaranteed": True} | given
    return SchedulableJob(name, devices, "slow", plans, throughput=throughput, **made)  # type: ignore[arg-type]


def waiting(one: SchedulableJob) -> JobState:
    return JobState(one, None, one.steps, one.arrival_s)


def running(one: SchedulableJob, devices: int, plan: str, **given: object) -> JobState:
    held = Allocation(devices, plan)
    return JobState(one, held, one.steps, 0.0, started_s=0.0, **given)  # type: ignore[arg-type]


def test_a_curve_is_the_best_plan_and_never_falls() -> None:
    curve = curve_of(LINEAR, ("slow", "fast"), DEVICES)
    assert [x.samples_per_s for x in curve.points] == [0, 1, 4, 4, 8, 8, 9, 9, 10]
    assert [x.plan for x in curve.points][1:3] == ["slow", "fast"]
    assert curve.points[3].allocation == Allocation(2, "fast")  # a third device would be idle
    # From no device the steepest way is two: (4 - 0) / 2 beats (1 - 0) / 1.
    assert (curve.gain(0).devices, curve.gain(0).per_device) == (2, 2.0)
    assert (curve.loss(8, 2).devices, curve.loss(8, 2).per_device) == (2, 0.5)
    assert curve.gain(8).devices == 0


def test_least_resources_are_as_fast_as_the_request() -> None:
    curve = curve_of(LINEAR, ("slow", "fast"), DEVICES)
    assert least_devices(job("a", 4), curve) == 2  # 4 samples/s: "fast" has them on two
    assert least_devices(job("a", 4, is_guaranteed=False), curve) == 0
    assert devices_as_requested(job("a", 9), curve) == 8  # no such plan: the best there is


def test_a_late_guarantee_shrinks_those_that_lose_least() -> None:
    flat, steep = job("flat", 1, FLAT), job("steep", 1)
    late = job("late", 6, arrival_s=10.0)
    states = [running(flat, 4, "slow"), running(steep, 4, "fast"), waiting(late)]
    given = ReplanPolicy(ReplanOptions(0.0))(10.0, states, DEVICES)
    # late is as fast on 4 as its request is on 6 (6 samples/s). flat gives up three first, by which
    # it loses 1.75 of its 4 samples/s; steep then two, as a third alone brings late nothing; and
    # the one that is left over goes back to flat.
    held = {"late": (4, "fast"), "steep": (2, "fast"), "flat": (2, "slow")}
    assert given == {name: Allocation(*x) for name, x in held.items()}
    # Without the late job nobody is asked to shrink for it.
    alone = ReplanPolicy(ReplanOptions(0.0))(10.0, states[:2], DEVICES)
    assert alone["steep"].devices >= 4


def test_a_job_that_was_reconfigured_too_often_is_left_alone() -> None:
    policy = ReplanPolicy(ReplanOptions(reconfiguration_s=10.0))
    few = running(job("a", 1, steps=10**6), 1, "slow", reconfigurations=1)
    assert policy(100.0, [few], DEVICES)["a"] == Allocation(1, "slow")  # 10 s of 100 s are lost
    assert policy(1000.0, [few], DEVICES)["a"] == Allocation(8, "fast")
    # Nor does one grow whose last steps take less time than a reconfiguration.
    ending = running(job("b", 1, steps=5), 1, "slow")
    assert policy(1000.0, [ending], DEVICES)["b"] == Allocation(1, "slow")


def test_a_starved_job_starts_before_others() -> None:
    big = running(job("big", 8), 8, "fast")
    poor = job("poor", 2, FLAT, is_guaranteed=False)
    others = [waiting(job(f"g{i}", 3, arrival_s=4000.0)) for i in range(9)]
    states = [big, waiting(poor), *others]
    early = ReplanPolicy()(4000.0, states, DEVICES)
    assert early["poor"].devices == 2
    assert early["big"].devices == 4  # its request is as fast as 8 samples/s, on four
    # Before it has starved, guaranteed jobs take all that big can spare.
    assert "poor" not in ReplanPolicy()(3000.0, states, DEVICES)


def test_policies_on_one_trace_by_hand() -> None:
    jobs = [job("a", 8, steps=80), job("b", 8, steps=80, arrival_s=1.0)]
    by_name = policies(ReplanOptions(reconfiguration_s=0.0, least_useful_share=0.0))
    ended = {
        name: [x.ended_s for x in simulate_schedule(jobs, policy, DEVICES, 0.0).records]
        for name, policy in by_name.items()
    }
    assert ended["first_come"] == pytest.approx([10.0, 20.0])  # 80 steps at 8 a second, in turn
    assert ended["plans"] == pytest.approx([8.0, 16.0])  # at 10 a second, in turn
    # 10 steps of a on eight devices; then both on four at 8 a second: 70 more of a take 8.75 s.
    assert ended["replan"][0] == pytest.approx(1.0 + 70 / 8)
    assert ended["replan"][1] == pytest.approx(9.75 + (80 - 70) / 10)


@dataclass(frozen=True)
class Amdahl:
    """Speed of a job with a serial part, on at least `least` devices."""

    serial: float
    least: int

    def __call__(self, devices: int, plan: str) -> float:
        if devices < self.least:
            return 0.0
        factor = {"slow": 0.7, "fast": 1.0 if devices % 2 == 0 else 0.0}[plan]
        return factor / (self.serial + (1 - self.serial) / devices)


_JOBS = st.lists(
    st.tuples(
        st.floats(0.0, 0.9),
        st.sampled_from([1, 2, 4]),
        st.integers(1, DEVICES),
        st.floats(0, 500),
        st.integers(1, 400),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(_JOBS, st.sampled_from(["replan", "resources", "plans", "first_come"]))
def test_every_job_ends_and_guarantees_hold(drawn: list[tuple], name: str) -> None:  # type: ignore[type-arg]
    jobs = [
        SchedulableJob(
            f"j{i}", max(n, least), "slow", ("slow", "fast"), at, steps, 1, Amdahl(s, least), sla
        )
        for i, (s, least, n, at, steps, sla) in enumerate(drawn)
    ]
    policy = policies(ReplanOptions(reconfiguration_s=5.0, starvation_s=100.0))[name]
    done = simulate_schedule(jobs, policy, DEVICES, 5.0, round_s=50.0)
    assert len(done.ended) == len(jobs)
    for record in done.records:
        asked = record.job.requested_samples_per_s
        for _, held_then in record.history:
            if held_then is None:
                assert not record.job.is_guaranteed  # which is never stopped to wait
            elif record.job.is_guaranteed:
                assert record.job.throughput(held_then.devices, held_then.plan) >= asked * (
                    1 - 1e-9
                )
        # Counted from its history alone, each job has taken all of its steps.
        spans = zip(record.history, [*record.history[1:], (record.ended_s, None)], strict=True)
        steps = 0.0
        for place, ((at, given_then), (until, _)) in enumerate(spans):
            if given_then is not None and until is not None:
                rate = record.job.throughput(given_then.devices, given_then.plan)
                steps += max(0.0, until - at - 5.0 * (place > 0)) * rate
        assert steps == pytest.approx(record.job.steps, abs=1e-4)
        # The fewest devices as fast as the request, by looking at each number of them.
        curve = curve_of(record.job.throughput, record.job.plans, DEVICES)
        enough = [n for n in range(DEVICES + 1) if curve.rate(n) >= asked * (1 - 1e-9)]
        assert not asked or devices_as_requested(record.job, curve) == enough[0]
    # At no time are more devices given than there are.
    changes = sorted(
        (at, i, 0 if x is None else x.devices)
        for i, record in enumerate(done.records)
        for at, x in (*record.history, (record.ended_s, None))
        if at is not None
    )
    held: dict[int, int] = {}
    times = [at for at, _, _ in changes]
    for place, (at, i, devices) in enumerate(changes):
        held[i] = devices
        if place + 1 == len(times) or times[place + 1] > at:
            assert sum(held.values()) <= DEVICES


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "name;like;arrival_s\nx;a;0\n",
            "has no column name, like, arrival_s in its first line; write name,like,arrival_s "
            "there, and one submission in each further line",
        ),
        (
            "name,like,arrival_s\nx,a,0,7\n",
            "has more values than the 3 columns of the first line; leave the last ones out, or "
            "name their columns",
        ),
        ("name,like,arrival_s\n", "has no submission; write one a line"),
    ],
)
def test_a_trace_of_another_form_is_refused(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_trace(str(tmp_path / "trace.csv"), [], 4)
    (fault,) = caught.value.faults
    assert str(fault).endswith(said)
