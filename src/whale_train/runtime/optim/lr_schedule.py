"""The learning rate of each step: a warm-up, then one of six named schedules or a scheduler of
torch."""

from collections.abc import Callable
from math import cos, pi, sqrt

from whale_train.optimizer_options import OfClass, OptimizerOptions
from whale_train.optimizers.schedules import ScheduledRates


def learning_rates(options: OptimizerOptions, steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step (0-based), for a run of `steps` steps.

    A schedule that is named by its class begins after the warm-up, which grows linearly to the
    first of its rates.
    """
    if not isinstance(options.schedule, OfClass):
        return lambda step: learning_rate(options, step, steps)
    rates, warmup = ScheduledRates(options), options.warmup_steps

    def rate(step: int) -> float:
        return rates(step - warmup) if step >= warmup else rates(0) * (step + 1) / warmup

    return rate


def learning_rate(options: OptimizerOptions, step: int, steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based) of `steps`, for a named schedule.

    It grows linearly to `lr` over `warmup_steps`. Then

    * `constant` stays at `lr`;
    * `linear` and `cosine` fall to `final_lr_fraction * lr` at the last step, along a line or half
      a cosine (Loshchilov and Hutter, "SGDR", ICLR 2017);
    * `polynomial` falls to the same rate as the `power` of the steps left (with power 2: You et al.
      2017, arXiv 1708.03888, section 5);
    * `wsd` stays at `lr`, and falls along a line in the last `decay_steps` (Hu et al. 2024,
      "MiniCPM", arXiv 2404.06395);
    * `inverse_sqrt` falls with the root of the steps taken, and without a warm-up begins at `lr`
      (Vaswani et al. 2017, arXiv 1706.03762, section 5.3).
    """
    warmup = options.warmup_steps
    if step < warmup:
        return options.lr * (step + 1) / warmup
    if options.schedule == "constant":
        return options.lr
    if options.schedule == "inverse_sqrt":
        return options.lr * sqrt(max(1, warmup) / (step + 1))
    falls_after = warmup if options.schedule != "wsd" else steps - 1 - options.decay_steps
    last = steps - 1 - falls_after
    progress = min(1.0, max(0, step - falls_after) / last) if last > 0 else 1.0
    remaining = (1 + cos(pi * progress)) / 2 if options.schedule == "cosine" else 1 - progress
    if options.schedule == "polynomial":
        remaining **= options.power
    floor = options.final_lr_fraction
    return options.lr * (floor + (1 - floor) * remaining)
