"""One optimizer step of all of a rank's engines, with the norm of all gradients of the job."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from whale_train.runtime.engines.base import Engine
from whale_train.runtime.engines.ddp import TorchEngine
from whale_train.runtime.engines.deepspeed import DeepSpeedEngine


def update(
    engines: Sequence[Engine],
    clip: float,
    measure: bool,
    sum_over_job: Callable[[Tensor], Tensor] | None,
    loss_scale: float | None = None,
) -> Tensor | None:
    """One optimizer step of all of a rank's engines; the global L2 norm of the gradients before
    clipping (None unless `measure` or `clip` or a loss scale asks for it).

    With a `loss_scale`, by which the gradients were multiplied, a step whose gradients are not
    finite is skipped; the norm is the same number on every rank, so they all do. Norms are
    without it.

    `sum_over_job` adds a scalar over all ranks whose engines hold different parameters; None where
    every rank's engines hold, among their copies, all there are.
    """

    def counts(engine: Engine) -> bool:
        return sum_over_job is None or engine.counts_norm

    plain = [engine for engine in engines if isinstance(engine, TorchEngine)]
    partitioned = [engine for engine in engines if isinstance(engine, DeepSpeedEngine)]
    assert len(plain) + len(partitioned) == len(engines)
    assert len(partitioned) <= 1, "each DeepSpeed step wants the whole norm before the next"
    for engine in engines:
        engine.loss_scale = loss_scale or 1.0
    if not (measure or clip or loss_scale):
        for engine in partitioned:
            engine.step(None)
        for plain_engine in plain:
            plain_engine.step(None, 0.0)
        return None
    counted = [engine.squared_norm() for engine in plain if counts(engine)]
    squared = torch.stack(counted).sum() if counted else None
    total: list[Tensor] = []

    def global_squared(own: Tensor | None, is_counted: bool) -> Tensor:
        parts = [x for x in (squared, own if is_counted else None) if x is not None]
        anything = own if own is not None else squared
        mine = torch.stack(parts).sum() if parts else torch.zeros_like(_given(anything, engines))
        total.append(mine if sum_over_job is None else sum_over_job(mine))
        return total[0]

    for engine in partitioned:
        engine.step(lambda own, e=engine: global_squared(own, counts(e)))  # type: ignore[misc]
    if not partitioned:
        global_squared(None, False)
    norm = total[0].sqrt() / (loss_scale or 1.0)
    skips = loss_scale is not None and not bool(norm.isfinite())
    for plain_engine in plain:
        plain_engine.step(norm, clip, skips)
    return norm


def _given(value: Tensor | None, engines: Iterable[Engine]) -> Tensor:
    if value is not None:
        return value
    device = next((p.device for e in engines for p in e.module.parameters()), torch.device("cpu"))
    return torch.zeros((), device=device)
