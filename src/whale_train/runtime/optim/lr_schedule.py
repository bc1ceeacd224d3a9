"""The learning rate of each step: a warm-up, then a constant, a line, a root or half a cosine."""

from math import cos, pi, sqrt

from whale_train.config import OptimizerOptions


def learning_rate(options: OptimizerOptions, step: int, steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based) of `steps`.

    It grows linearly to `lr` over `warmup_steps`. Then

    * `constant` stays there;
    * `linear` and `cosine` fall to `final_lr_fraction * lr` at the last step, along a line or half
      a cosine (Loshchilov and Hutter, "SGDR", ICLR 2017);
    * `wsd` stays, and falls along a line in the last `decay_steps` (Hu et al. 2024, "MiniCPM",
      arXiv 2404.06395);
    * `inverse_sqrt` falls with the root of the steps taken, and with no warm-up begins at `lr`
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
    left = (1 + cos(pi * progress)) / 2 if options.schedule == "cosine" else 1 - progress
    floor = options.final_lr_fraction
    return options.lr * (floor + (1 - floor) * left)
