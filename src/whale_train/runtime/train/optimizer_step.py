"""Take one optimizer step of all of a rank's engines, with one global norm.

Nothing is read on the host: the optimizers' kernels skip a step on the device.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from whale_train.runtime.engines.base import Engine, PartitionedEngine, WholeEngine


def update(
    engines: Sequence[Engine],
    clip: float,
    measure: bool,
    sum_over_job: Callable[[Tensor], Tensor] | None,
    loss_scale: Tensor | None = None,
    skips_bad: bool = False,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    poison: Tensor | None = None,
) -> Tensor | None:
    """Take one optimizer step of all of a rank's engines, on `device`.

    Return the global L2 norm of the gradients before clipping and without the loss scale, or None
    unless `measure`, `clip` or a loss scale requires it. With `loss_scale`, by which the gradients
    were multiplied, or with `skips_bad`, a step whose gradients are not finite is skipped; the norm
    is the same number on every rank, so all ranks skip it.

    `poison` is a scalar, the same on every rank: 0, or NaN to skip the step whatever its gradients
    are. `sum_over_job` adds a scalar over all ranks whose engines hold different parameters. It is
    None where every rank's engines hold, among their copies, all parameters.
    """

    def counts(engine: Engine) -> bool:
        return sum_over_job is None or engine.counts_norm

    plain = [cast(WholeEngine, engine) for engine in engines if not engine.partitions]
    partitioned = [cast(PartitionedEngine, engine) for engine in engines if engine.partitions]
    skips = loss_scale is not None or skips_bad
    for engine in engines:
        engine.loss_scale = loss_scale
    if not (measure or clip or loss_scale is not None):
        for engine in partitioned:
            engine.step(None)
        for plain_engine in plain:
            plain_engine.step(None, 0.0)
        return None
    counted = [engine.squared_norm() for engine in plain if counts(engine)]
    total: list[Tensor] = []

    def steps(waiting: Sequence[PartitionedEngine], squared: list[Tensor]) -> Tensor:
        """Return the global squared norm, after the steps of the engines `waiting`.

        `squared` are the squared norms known so far. An engine computes its own norm inside its
        step, and needs the global norm there, so the other engines step inside that step.
        """
        if not waiting:
            squared_norm = torch.stack(squared).sum() if squared else torch.zeros((), device=device)
            total_squared = squared_norm if sum_over_job is None else sum_over_job(squared_norm)
            total.append(
                total_squared if poison is None else total_squared + poison.to(total_squared.device)
            )
            return total[0]
        engine, *others = waiting

        def with_own(own: Tensor) -> Tensor:
            return steps(others, [*squared, own] if counts(engine) else squared)

        engine.step(with_own, skips)
        return total[0]

    norm = steps(partitioned, counted).sqrt()
    if loss_scale is not None:
        norm = norm / loss_scale
    found_inf = (~norm.isfinite()).float() if skips else None
    for plain_engine in plain:
        plain_engine.step(norm, clip, found_inf)
    return norm
