"""Draw submissions of jobs from a seed, with the shape of a public trace.

The shape is that of the Philly trace (Jeon et al., "Analysis of Large-Scale Multi-Tenant GPU
Clusters for DNN Training Workloads", USENIX ATC 2019): most jobs ask for one device, few for
sixteen and more, and durations spread over several orders of magnitude.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from whale_train.strategies.cluster_scheduling.schedulable_job import SchedulableJob


@dataclass(frozen=True)
class TraceShape:
    """The distribution of submissions.

    devices: numbers of devices that are asked for, with their weights.
    median_s, sigma: the log-normal distribution of durations on what was asked for, in seconds.
    longest_s: the longest duration, in seconds.
    load: device time asked for, relative to that of the cluster while jobs are submitted.
    guaranteed: the share of jobs that are guaranteed.
    """

    devices: tuple[tuple[int, float], ...] = (
        (1, 0.55), (2, 0.12), (4, 0.15), (8, 0.13), (16, 0.04), (32, 0.01),
    )  # fmt: skip
    median_s: float = 1500.0
    sigma: float = 1.4
    longest_s: float = 6 * 3600.0
    load: float = 1.0
    guaranteed: float = 1.0


def draw_trace(
    kinds: Sequence[SchedulableJob],
    count: int,
    devices: int,
    seed: int,
    shape: TraceShape = TraceShape(),
) -> list[SchedulableJob]:
    """Return `count` submissions, each like one of `kinds`, in the order of their arrival.

    kinds: jobs whose speed and plans the submissions have. Each submission is like one that has a
        plan on the devices asked for, and asks for one of these plans, drawn alike.
    devices: number of devices of the cluster.
    seed: the seed of all draws.

    A submission asks for more devices than it drew where no kind has a plan on so few.
    """
    random = Random(seed)
    drawn = []
    for number in range(count):
        asked, kind, plan = _request(kinds, devices, random, shape)
        seconds = min(shape.longest_s, random.lognormvariate(0.0, shape.sigma) * shape.median_s)
        steps = max(1, round(seconds * kind.throughput(asked, plan) / kind.global_batch))
        is_guaranteed = random.random() < shape.guaranteed
        job = replace(
            kind,
            name=f"{kind.name}-{number}",
            devices=asked,
            plan=plan,
            steps=steps,
            is_guaranteed=is_guaranteed,
        )
        drawn.append((seconds, job))
    span_s = sum(s * job.devices for s, job in drawn) / devices / shape.load
    arrivals = sorted(random.uniform(0.0, span_s) for _ in drawn)
    return [replace(job, arrival_s=at) for at, (_, job) in zip(arrivals, drawn, strict=True)]


def _request(
    kinds: Sequence[SchedulableJob], devices: int, random: Random, shape: TraceShape
) -> tuple[int, SchedulableJob, str]:
    """Return a number of devices, a kind of job that has plans on that many, and one of them."""
    numbers = [number for number, _ in shape.devices if number <= devices]
    weights = [weight for number, weight in shape.devices if number <= devices]
    asked = random.choices(numbers, weights)[0]
    while True:
        able = [
            (kind, plans)
            for kind in kinds
            if (plans := [x for x in kind.plans if kind.throughput(asked, x) > 0.0])
        ]
        if able:
            kind, plans = random.choice(able)
            return asked, kind, random.choice(plans)
        larger = [number for number in numbers if number > asked]
        assert larger, "no kind has a plan on any number of devices"
        asked = larger[0]
