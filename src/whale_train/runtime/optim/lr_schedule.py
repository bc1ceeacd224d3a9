"""The learning rate of each step: a warm-up, then a constant, a line or half a cosine."""

from math import cos, pi

from whale_train.config import OptimizerOptions


def learning_rate(options: OptimizerOptions, step: int, steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based) of `steps`.

    It grows linearly to `lr` over `warmup_steps`. Then it stays (`constant`), or decays to
    `final_lr_fraction * lr` at the last step: along a line (`linear`), or half a cosine (Loshchilov
    and Hutter, "SGDR", ICLR 2017).
    """
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    if options.schedule == "constant":
        return options.lr
    last = steps - 1 - options.warmup_steps
    progress = min(1.0, (step - options.warmup_steps) / last) if last > 0 else 1.0
    left = 1 - progress if options.schedule == "linear" else (1 + cos(pi * progress)) / 2
    floor = options.final_lr_fraction
    return options.lr * (floor + (1 - floor) * left)
