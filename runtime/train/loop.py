"""The training loop: steps, their updates, learning rate, evaluation."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from whale_train.config import Request
from whale_train.runtime.engines.base import Engine
from whale_train.runtime.engines.ddp import TorchEngine
from whale_train.runtime.engines.deepspeed import DeepSpeedEngine
from whale_train.runtime.failures.not_finite import first_not_finite
from whale_train.runtime.pipeline.chunk import Batch
from whale_train.runtime.state.saver import Saver
from whale_train.runtime.state.votes import Wish
from whale_train.runtime.train.batches import RankBatches
from whale_train.runtime.train.grad_scaler import START, LossScale
from whale_train.runtime.train.lr_schedule import learning_rate
from whale_train.runtime.train.metrics import Metrics, StepMetrics
from whale_train.runtime.train.step_programs import Program
from whale_train.runtime.train.timeline import Trace, span
from whale_train.strategies.plan.plan import Plan


class Loop:
    """The steps of a run, one after another. A step's line is written while the next is computed,
    its loss travelling meanwhile; `settle` writes the last one."""

    def __init__(
        self,
        request: Request,
        plan: Plan,
        program: Program,
        batches: RankBatches,
        metrics: Metrics | None,
        trace: Trace | None = None,
    ) -> None:
        self.final_loss: float | None = None
        self._trace = program.trace = trace
        self._request, self._plan, self._program = request, plan, program
        self._batches, self._metrics = batches, metrics
        self._pending: tuple[StepMetrics, int] | None = None
        self._sum_over_job = _sum_over_job if plan.rewrite is not None else None
        self.loss_scale: LossScale | None = None
        if plan.precision == "fp16":
            self.loss_scale = LossScale(request.train.loss_scale or START)

    def step(self, number: int) -> float:
        """Step `number`, from 0: its batch, its gradients, its update. The seconds it took."""
        options, program, batches = self._request.train, self._program, self._batches
        started = time.perf_counter()
        lr = learning_rate(self._request.optimizer, number, options.steps)
        for engine in program.engines:
            engine.set_learning_rate(lr)
        with self._span("data"):
            batch = batches.training(number)
        scale = self.loss_scale.value if self.loss_scale is not None else None
        with self._span("forward and backward"):
            loss = program.forward_backward(batch, scale or 1.0)
        with self._span("update"):
            norm = update(
                program.engines,
                options.grad_clip or 0.0,
                options.grad_norm,
                self._sum_over_job,
                scale,
                skips_bad=options.on_nan is not None,
            )
            skipped = self._skipped(number, batch, norm)
            if self.loss_scale is not None:
                assert norm is not None
                self.loss_scale.update(math.isfinite(float(norm)))
        with self._span("metrics"):
            self.settle()
        seconds = time.perf_counter() - started
        evaluation = {}
        if options.evaluate_every and (number + 1) % options.evaluate_every == 0:
            evaluation = evaluate(program, batches)
        step = StepMetrics(number + 1, loss, norm, lr, seconds, evaluation, scale, skipped)
        self._pending = (step, batches.tokens(batch))
        return seconds

    def _skipped(self, number: int, batch: Sequence[Batch], norm: Tensor | None) -> bool:
        """Return whether the step's update was left out, its gradients not being finite. Raises
        FloatingPointError, which says where that began, unless that is to be skipped. A dynamic
        loss scale has an answer of its own to gradients that overflow."""
        on_nan = self._request.train.on_nan
        if on_nan is None or norm is None or self.loss_scale is not None:
            return False
        if math.isfinite(float(norm)):
            return False
        if on_nan == "stop":
            program = self._program
            began = first_not_finite(program.engines, lambda: program.forward_backward(batch))
            raise FloatingPointError(_not_finite(number + 1, "gradient norm", began))
        return True

    def _span(self, name: str) -> AbstractContextManager[None]:
        return span(self._trace, name)

    def settle(self) -> None:
        """Write the line of the step before."""
        if self._pending is not None:
            step, tokens = self._pending
            self._pending = None
            loss = step.loss.item()
            if self._metrics is not None:
                self._metrics.write(step, loss, self._plan.global_batch, tokens)
                self.final_loss = loss
            stops = self._request.train.on_nan == "stop" and self.loss_scale is None
            if stops and not math.isfinite(loss):
                raise FloatingPointError(_not_finite(step.number, "loss", ""))


def _not_finite(step: int, what: str, began: str) -> str:
    """Return what a run that stops there says."""
    said = f"the {what} of step {step} is not finite"
    said += f", which began with {began}" if began else ""
    return f"{said}; use train.on_nan=skip to leave such steps out, or a lower optimizer.lr"


def _sum_over_job(squared: Tensor) -> Tensor:
    dist.all_reduce(squared)
    return squared


def train(
    request: Request,
    plan: Plan,
    program: Program,
    batches: RankBatches,
    metrics: Metrics | None,
    trace: Trace | None = None,
    saver: Saver | None = None,
    resumed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train to the end, from step 0 or from what `state.json` of a checkpoint says; what
    `summary.json` holds but the memory of the ranks."""
    loop = Loop(request, plan, program, batches, metrics, trace)
    first = 0
    if resumed is not None:
        first = resumed["step"]
        batches.go_on(first, resumed["samples"])
        if loop.loss_scale is not None and resumed["loss_scale"] is not None:
            loop.loss_scale = LossScale(**resumed["loss_scale"])
    times = []
    done = first
    started = ended = time.perf_counter()
    while done < request.train.steps:
        times.append(loop.step(done))
        ended = time.perf_counter()
        done += 1
        wanted = saver.wanted(done) if saver is not None else Wish.NOTHING
        if saver is not None and (wanted or done == request.train.steps):
            loop.settle()  # a loss that is no number is not saved
            scale = loop.loss_scale and asdict(loop.loss_scale)
            seen = {"samples": batches.seen(done), "num_samples": batches.num_samples}
            saver.save(done, {**seen, "loss_scale": scale})
        if wanted is Wish.SAVE_AND_STOP:
            break
    loop.settle()
    if saver is not None:
        saver.close()
    # The first step pays for what libraries set up when first used.
    typical = median(times[1:] or times)
    return {
        "final_loss": loop.final_loss,
        "steps": done,
        "stopped_after": None if done == request.train.steps else done,
        "trained_s": ended - started,
        "samples_per_s": plan.global_batch / typical,
        "step_time_s_median": typical,
        "predicted_step_time_s": plan.predicted.step_time_s,
        "predicted_here_s": plan.predicted_here and plan.predicted_here.step_time_s,
    }


def evaluate(program: Program, batches: RankBatches) -> dict[str, float]:
    """Mean loss over the held-back samples, and the share of right answers where there are
    targets."""
    seen = program.evaluate(batches.evaluation())
    found = {"evaluation_loss": seen.loss}
    targets = round(seen.targets)  # weighted sums of whole numbers
    if targets:
        found["evaluation_accuracy"] = round(seen.correct) / targets
    return found


def update(
    engines: Sequence[Engine],
    clip: float,
    measure: bool,
    sum_over_job: Callable[[Tensor], Tensor] | None,
    loss_scale: float | None = None,
    skips_bad: bool = False,
) -> Tensor | None:
    """Take one optimizer step of all of a rank's engines; the global L2 norm of the gradients
    before clipping (None unless `measure` or `clip` or a loss scale asks for it).

    With a `loss_scale`, by which the gradients were multiplied, or where the update `skips_bad`, a
    step whose gradients are not finite is skipped; the norm is the same number on every rank, so
    they all do. Norms are without the scale.

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
    skips = (loss_scale is not None or skips_bad) and not bool(norm.isfinite())
    for plain_engine in plain:
        plain_engine.step(norm, clip, skips)
    return norm


def _given(value: Tensor | None, engines: Iterable[Engine]) -> Tensor:
    if value is not None:
        return value
    device = next((p.device for e in engines for p in e.module.parameters()), torch.device("cpu"))
    return torch.zeros((), device=device)
