"""Rubick's performance model of a job (arXiv 2408.08586): seven numbers fitted to measured steps.

It knows of a model only its sizes, and of a plan only its degrees. The planner knows the operations
and simulates the step; this model stands beside it for comparison, and for clusters that have no
planner.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
from scipy.optimize import least_squares


@dataclass(frozen=True)
class ModelFigures:
    """The sizes of a model.

    forward_s: seconds of the forward pass of one sample on one device.
    parameter_bytes: bytes of the parameters, which are those of the gradients.
    boundary_bytes: bytes of one sample's activation between two layers.
    layers: number of layers.
    """

    forward_s: float
    parameter_bytes: float
    boundary_bytes: float
    layers: int


@dataclass(frozen=True)
class PlanShape:
    """A plan as the model sees it.

    data, tensor, pipeline: degrees of data, tensor and pipeline parallelism.
    micro_batches: number of parts of a replica's batch.
    zero: whether replicas share the optimizer's state; offload: whether the host has it.
    recompute: whether the backward pass repeats the forward pass.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    micro_batches: int = 1
    zero: bool = False
    offload: bool = False
    recompute: bool = False

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return self.data * self.tensor * self.pipeline


@dataclass(frozen=True)
class Bandwidths:
    """Bytes a second between replicas, tensor-parallel ranks, stages, and to the host."""

    data: float
    tensor: float
    pipeline: float
    host: float


@dataclass(frozen=True)
class SevenParameters:
    """The fitted numbers.

    backward: time of the backward pass relative to the forward pass.
    sync: how the backward pass and the synchronisation of gradients overlap: 1 adds their times,
        infinity takes the longer one.
    optimizer: seconds of the update for each byte of parameters.
    host_optimizer: likewise where the host updates.
    host_transfer: time of transfers to and from the host, relative to that of the bytes.
    swap: how the host's update and these transfers overlap.
    constant_s: seconds of every step.
    """

    backward: float = 2.0
    sync: float = 2.0
    optimizer: float = 1e-12
    host_optimizer: float = 1e-11
    host_transfer: float = 1.0
    swap: float = 2.0
    constant_s: float = 0.0

    def seconds(
        self, figures: ModelFigures, plan: PlanShape, batch: float, links: Bandwidths
    ) -> float:
        """Return the time of a step of `batch` samples, in seconds."""
        micro_batch = batch / plan.data / plan.micro_batches
        slots = plan.micro_batches + plan.pipeline - 1
        forward = figures.forward_s * micro_batch / plan.tensor / plan.pipeline
        backward = (self.backward + plan.recompute) * forward
        boundary = figures.boundary_bytes * micro_batch
        ring = 2 * (plan.tensor - 1) / plan.tensor
        all_reduces = (6 if plan.recompute else 4) * figures.layers / plan.pipeline
        tensor = all_reduces * ring * boundary / links.tensor
        stage = 2 * boundary / links.pipeline if plan.pipeline > 1 else 0.0
        held = figures.parameter_bytes / plan.tensor / plan.pipeline
        sync = 2 * (plan.data - 1) / plan.data * held / links.data
        updated = held / plan.data if plan.zero or plan.offload else held
        if plan.offload:
            moved = self.host_transfer * 2 * updated / links.host
            update = overlapped(self.host_optimizer * updated, moved, self.swap)
        else:
            update = self.optimizer * updated
        last = overlapped(backward, sync, self.sync)
        passes = slots * (forward + tensor + stage) + (slots - 1) * backward + last
        return passes + update + self.constant_s


def overlapped(first: float, second: float, exponent: float) -> float:
    """Return the time of two activities that overlap: their sum for the exponent 1, the longer one
    for an infinite one."""
    longer = max(first, second)
    if longer <= 0.0:
        return 0.0
    total: float = (first / longer) ** exponent + (second / longer) ** exponent
    joined: float = total ** (1 / exponent)
    return longer * joined


_LOWEST = (0.5, 1.0, 1e-16, 1e-16, 1e-3, 1.0, 1e-9)
_HIGHEST = (6.0, 20.0, 1e-6, 1e-6, 1e3, 20.0, 1e3)
_HELD = 0.01  # weight of the distance to the first guess, in relative error for a factor e


def fit_seven_parameters(
    figures: ModelFigures,
    measured: Sequence[tuple[PlanShape, float, float]],
    links: Bandwidths,
    first: SevenParameters = SevenParameters(),
) -> SevenParameters:
    """Return the numbers that fit measured steps, by least squares of relative errors.

    measured: each plan, the batch and the seconds of its step.
    first: the first guess, near which numbers stay that the measured plans say nothing of.
    """
    shortest = min(seconds for _, _, seconds in measured)
    low, high = np.log(np.array(_LOWEST)), np.log(np.array(_HIGHEST))
    guess = np.clip(np.log(np.maximum(np.array(astuple(first)), 1e-30)), low, high)
    guess[-1] = np.log(0.05 * shortest)

    def residuals(logs: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float]:
        fitted = SevenParameters(*map(float, np.exp(logs)))
        errors = [
            fitted.seconds(figures, plan, batch, links) / seconds - 1.0
            for plan, batch, seconds in measured
        ]
        return [*errors, *(_HELD * (logs - guess))]

    solved = least_squares(residuals, guess, bounds=(low - 1e-6, high + 1e-6))
    return SevenParameters(*map(float, np.exp(solved.x)))
