"""Simulates Rubick's policy and three baselines on a trace drawn from a seed, beside its Table 4.

    python benchmarks/cluster_trace.py [--jobs 406] [--seeds 3] [--load 1.2] [--best-plans]

The cluster is the paper's: 8 nodes of 8 A800 (80 GB), NVLink at 400 GB/s inside and 100 GB/s
between nodes. The models are its seven, with their sizes; what their steps take is Rubick's
seven-parameter model with figures of the catalogue in place of its measurements. Its trace is a
busy half-day of the Philly trace, which is not shipped here: arrivals, durations and devices are
drawn with that trace's shape, the plan of each job among those that fit its devices. Devices are
counted, not placed. The paper compares with other schedulers than the baselines here.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from whale_train.strategies.cluster_scheduling.baseline_policies import policies
from whale_train.strategies.cluster_scheduling.job_trace import TraceShape, draw_trace
from whale_train.strategies.cluster_scheduling.replan_policy import ReplanOptions
from whale_train.strategies.cluster_scheduling.schedulable_job import SchedulableJob
from whale_train.strategies.cluster_scheduling.seven_parameters import (
    Bandwidths,
    ModelFigures,
    PlanShape,
    SevenParameters,
)
from whale_train.strategies.cluster_scheduling.simulate_schedule import (
    SimulatedSchedule,
    simulate_schedule,
)

DEVICES, NODE = 64, 8
FLOPS = 312e12 * 0.45  # bf16 of an A800, at the utilisation that dense products reach
MEMORY = 80e9 * 0.92
HOST = 1600e9 / NODE  # bytes of a node's memory for each of its devices
LINKS = Bandwidths(data=200e9, tensor=200e9, pipeline=25e9, host=20e9)
BETWEEN = 100e9 / NODE  # bytes a second of each device, where all of a node use its network
FITTED = SevenParameters(2.0, 2.5, 2.5e-12, 6e-11, 1.0, 2.0, 0.02)
RECONFIGURATION_S = 78.0  # the paper's average
# Table 4 of arXiv 2408.08586: hours of average completion and makespan.
PAPER = {"Rubick": (0.96, 15.3), "the second": (2.5, 18.8), "the third": (3.1, 21.5)}


@dataclass(frozen=True)
class Model:
    """A model of the paper's trace.

    parameters: number of parameters; width, layers, tokens: of its blocks and of a sample.
    batch: samples of a step.
    """

    name: str
    parameters: float
    width: int
    layers: int
    tokens: int
    batch: int
    is_large: bool = False

    @property
    def figures(self) -> ModelFigures:
        """Return the sizes that the seven-parameter model takes."""
        forward_s = 2 * self.parameters * self.tokens / FLOPS
        boundary = 2.0 * self.tokens * self.width
        return ModelFigures(forward_s, 2.0 * self.parameters, boundary, self.layers)


MODELS = (
    Model("vit", 86e6, 768, 12, 197, 256),
    Model("roberta", 355e6, 1024, 24, 512, 64),
    Model("bert", 336e6, 1024, 24, 512, 64),
    Model("t5", 1.2e9, 1024, 48, 512, 64),
    Model("gpt2", 1.5e9, 1600, 48, 1024, 64),
    Model("llama-7b", 7e9, 4096, 32, 2048, 64, True),
    Model("llama-30b", 30e9, 6656, 60, 2048, 64, True),
)


@dataclass(frozen=True)
class Speed:
    """A model's speed: a plan is fixed but for its data-parallel degree."""

    model: Model

    @cached_property
    def shapes(self) -> dict[str, PlanShape]:
        """Return the plans of one replica, by name."""
        return dict(_shapes(self.model))

    def __hash__(self) -> int:
        return hash(self.model.name)

    @cached_property
    def _rates(self) -> dict[tuple[int, str], float]:
        return {}

    def __call__(self, devices: int, plan: str) -> float:
        """Return samples a second, or 0.0 where the plan does not divide or fit the devices."""
        rate = self._rates.get((devices, plan))
        if rate is None:
            rate = self._rates[devices, plan] = self._rate(devices, plan)
        return rate

    def _rate(self, devices: int, plan: str) -> float:
        shape, batch = self.shapes[plan], self.model.batch
        if devices % shape.devices:
            return 0.0
        shape = replace(shape, data=devices // shape.devices)
        per_replica = batch / shape.data
        if per_replica < 1 or per_replica % shape.micro_batches:
            return 0.0
        if not _fits(self.model, shape):
            return 0.0
        is_one_node = devices <= NODE
        links = LINKS if is_one_node else replace(LINKS, data=BETWEEN, pipeline=BETWEEN)
        return batch / FITTED.seconds(self.model.figures, shape, batch, links)


def _shapes(model: Model) -> Iterator[tuple[str, PlanShape]]:
    for micro in (1, 2, 4, 8, 16):
        for recompute in (False, True):
            said = f"a{micro}{'c' if recompute else ''}"
            common = {"micro_batches": micro, "recompute": recompute}
            yield f"dp {said}", PlanShape(**common)
            yield f"zero {said}", PlanShape(**common, zero=True)
            yield f"offload {said}", PlanShape(**common, zero=True, offload=True)
            for tensor in (1, 2, 4, 8):
                for pipeline in (1, 2, 4, 8):
                    is_3d = tensor * pipeline > 1 and micro >= pipeline
                    if is_3d and model.is_large and not model.layers % pipeline:
                        shape = PlanShape(1, tensor, pipeline, **common)
                        yield f"t{tensor} p{pipeline} {said}", shape


def _fits(model: Model, plan: PlanShape) -> bool:
    """Return whether a device has memory for the plan, and a node's host for what it offloads."""
    held = model.parameters / plan.tensor / plan.pipeline
    shared = plan.data if plan.zero else 1
    states = 12 * held / shared  # fp32 weights and two moments
    weights = 4 * held if not plan.offload else 4 * held / 2
    samples = model.batch / plan.data / plan.micro_batches
    alive = min(plan.micro_batches, plan.pipeline)
    layer = samples * model.tokens * model.width / plan.tensor
    per_layer = 2 * layer if plan.recompute else 34 * layer
    activations = per_layer * model.layers / plan.pipeline * alive + 34 * layer
    on_device = weights + activations + (0 if plan.offload else states)
    on_host = 16 * held / shared if plan.offload else 0.0
    return on_device <= MEMORY and on_host <= HOST


def kinds() -> list[SchedulableJob]:
    """Return one job of each model."""
    jobs = []
    for model in MODELS:
        speed = Speed(model)
        plans = tuple(speed.shapes)
        jobs.append(SchedulableJob(model.name, 1, plans[0], plans, 0.0, 1, model.batch, speed))
    return jobs


def with_best_plans(jobs: list[SchedulableJob]) -> list[SchedulableJob]:
    """Return the jobs with the fastest plan on the requested devices in place of a drawn one."""
    best = []
    for job in jobs:
        plan = max(job.plans, key=lambda plan: job.throughput(job.devices, plan))
        ratio = job.throughput(job.devices, plan) / job.requested_samples_per_s
        best.append(replace(job, plan=plan, steps=max(1, round(job.steps * ratio))))
    return best


def _last_arrival_s(schedule: SimulatedSchedule) -> float:
    return max(record.job.arrival_s for record in schedule.records)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=406)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--load", type=float, default=1.2)
    parser.add_argument("--median-s", type=float, default=800.0, help="of durations as requested")
    parser.add_argument("--best-plans", action="store_true", help="jobs ask for their best plan")
    options = parser.parse_args()
    names = {"replan": "Rubick's policy", "resources": "resources only", "plans": "plans only"}
    names["first_come"] = "first come first served"
    runs: dict[str, list[SimulatedSchedule]] = {name: [] for name in names}
    began = time.monotonic()
    for seed in range(options.seeds):
        shape = TraceShape(load=options.load, median_s=options.median_s)
        jobs = draw_trace(kinds(), options.jobs, DEVICES, seed, shape)
        jobs = with_best_plans(jobs) if options.best_plans else jobs
        for name, policy in policies(ReplanOptions(RECONFIGURATION_S)).items():
            runs[name].append(simulate_schedule(jobs, policy, DEVICES, RECONFIGURATION_S))
    said = f"{options.jobs} jobs on {DEVICES} devices, load {options.load:g}, {options.seeds} seeds"
    span = fmean(_last_arrival_s(x) for x in runs["replan"]) / 3600
    print(f"{said}, submitted within {span:.1f} h; simulated in {time.monotonic() - began:.1f} s\n")
    print(f"{'':26}{'completion':>12}{'x':>7}{'makespan':>11}{'x':>7}{'99th':>9}{'re-planned':>12}")
    base: tuple[float, float] | None = None
    for name, title in names.items():
        mean = fmean(x.average_completion_s for x in runs[name]) / 3600
        span = fmean(x.makespan_s for x in runs[name]) / 3600
        base = base or (mean, span)
        last = fmean(x.completion_percentile_s(0.99) for x in runs[name]) / 3600
        again = fmean(x.reconfigurations for x in runs[name]) / options.jobs
        row = f"{title:26}{mean:10.2f} h{mean / base[0]:7.2f}{span:9.1f} h{span / base[1]:7.2f}"
        print(f"{row}{last:7.1f} h{again:12.2f}")
    print("\nTable 4 of the paper")
    for title, (mean, span) in PAPER.items():
        print(f"{title:26}{mean:10.2f} h{mean / 0.96:7.2f}{span:9.1f} h{span / 15.3:7.2f}")


if __name__ == "__main__":
    main()
