"""Train: steps, learning rate, evaluation.

A step only enqueues work. Its loss and its gradient norm are copied to the host while the next step
is enqueued, and are read after that: a GPU never waits for the host.
"""

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from whale_train.checkpoints.checkpoint_state import CheckpointState
from whale_train.config import PLATEAU, Request
from whale_train.errors import listed
from whale_train.runtime.base.step_types import Batch, PendingLoss
from whale_train.runtime.base.trace import Trace, span
from whale_train.runtime.graph.expert_loads import PendingLoads
from whale_train.runtime.optim.lr_schedule import learning_rates
from whale_train.runtime.optim.plateau import Plateau
from whale_train.runtime.record.callbacks import Callbacks
from whale_train.runtime.record.metrics import Metrics, StepMetrics
from whale_train.runtime.record.parameter_hash import parameters_sha256
from whale_train.runtime.record.profile import StepProfiler
from whale_train.runtime.record.to_host import ToHost
from whale_train.runtime.state.saver import Saver
from whale_train.runtime.state.votes import CheckpointRequest
from whale_train.runtime.train.batches import RankBatches
from whale_train.runtime.train.best_values import EvaluationWatch
from whale_train.runtime.train.evaluate_sets import evaluate_sets
from whale_train.runtime.train.evaluation_metrics import EvaluationMetrics
from whale_train.runtime.train.grad_scaler import START, LossScale, check_scaled
from whale_train.runtime.train.not_finite import NotFinite, first_not_finite, without_targets
from whale_train.runtime.train.optimizer_step import update
from whale_train.runtime.train.router_biases import RouterBiases
from whale_train.runtime.train.step_programs import Program
from whale_train.strategies.plan.plan import Plan

MOST_SKIPPED = 100  # steps in a row that train.on_nan=skip leaves out before it ends the run


class Loop:
    """The steps of a run, one after another.

    A step's line is written while the next step is computed; `settle` writes the last line.
    """

    def __init__(
        self,
        request: Request,
        plan: Plan,
        program: Program,
        batches: RankBatches,
        metrics: Metrics | None,
        trace: Trace | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        self._callbacks = callbacks
        self._evaluation_metrics: EvaluationMetrics | None = None
        if request.metrics and metrics is not None:  # on rank 0, which alone imports their package
            self._evaluation_metrics = EvaluationMetrics(request.metrics)
        self.final_loss: float | None = None
        self.lr = 0.0  # the learning rate of the step that was enqueued last
        self.skipped = self._skipped_in_a_row = 0  # settled steps without an update
        self.watch = EvaluationWatch(request, {})
        self.is_best = False  # whether the evaluation after the last step was the best so far
        self._trace = program.trace = trace
        self._request, self._plan, self._program = request, plan, program
        self._batches, self._metrics = batches, metrics
        self._rates = learning_rates(request.optimizer, request.train.steps)
        self._pending: _Pending | None = None
        self.loss_scale: LossScale | None = None
        wants = request.is_pseudo and request.train.delink_at == PLATEAU
        self.plateau = Plateau() if wants else None
        rate = request.train.router_bias_rate
        self._biases: RouterBiases | None = None
        if rate is not None:
            self._biases = RouterBiases(plan.router_biases, program.engines, rate)
        if plan.precision == "fp16":
            start = request.train.loss_scale or START
            fixed = request.train.loss_scale_fixed
            self.loss_scale = LossScale(start, device=batches.device, fixed=fixed)
        self.data_waits_s: list[float] = []  # of every step

    def step(self, number: int) -> float:
        """Take step `number`, counted from 0, and return the seconds that it took.

        A step consists of its batch, its gradients and its update, and of an evaluation where one
        is due. The seconds do not include the evaluation.
        """
        options, program, batches = self._request.train, self._program, self._batches
        started = time.perf_counter()
        lr = self.lr = self._rate(number)
        for engine in program.engines:
            engine.set_learning_rate(lr)
        asked = time.perf_counter()
        with self._span("data"):
            batch = batches.training(number)
        data_wait_s = time.perf_counter() - asked
        self.data_waits_s.append(data_wait_s)
        outcome = train_step(
            self._request, self._plan, program, batch, self.loss_scale, batches.device
        )
        loads = program.loads.of_all_ranks() if program.loads is not None else None
        if loads is not None and self._biases is not None:
            self._biases.move(loads)
        with self._span("metrics"):
            self.settle()
        seconds = time.perf_counter() - started
        evaluation = {}
        self.is_best = False
        if options.evaluate_every and (number + 1) % options.evaluate_every == 0:
            keeps_answers = bool(self._request.metrics)
            sets = evaluate_sets(program, batches, self._evaluation_metrics, keeps_answers)
            evaluation = {f"{name}_{x}": value for name in sets for x, value in sets[name].items()}
            if self.watch:
                self.is_best = self.watch.add(number + 1, of_rank_0(evaluation))
        digest = None
        if options.parameters_sha256 and self._metrics is not None:
            digest = parameters_sha256(program.engines)
        coming = ToHost(outcome.loss, (outcome.grad_norm, outcome.loss_scale), batches.device)
        self._pending = _Pending(
            *(number + 1, lr, seconds, evaluation, batch, coming, loads, data_wait_s, digest)
        )
        return seconds

    def _rate(self, number: int) -> float:
        """Return the learning rate of step `number`, counted from 0.

        Skipped steps do not advance the schedule. If the previous step may still be skipped, and
        the rate depends on that, its result is waited for.
        """
        rate = self._rates
        may_skip = self.loss_scale is not None or self._request.train.on_nan == "skip"
        taken = number - self.skipped
        if may_skip and self._pending is not None and rate(taken) != rate(taken - 1):
            self.settle()
        return rate(number - self.skipped)

    def _span(self, name: str) -> AbstractContextManager[None]:
        return span(self._trace, name)

    def settle(self) -> None:
        """Read the results of the previous step, and write its line.

        Raises NotFinite where its loss or gradient norm is not finite and is not to be skipped, or
        where too many steps in a row were skipped.
        """
        if self._pending is None:
            return
        step, self._pending = self._pending, None
        loss, (norm, scale) = step.coming.read()
        is_bad = norm is not None and not math.isfinite(norm)
        on_nan = self._request.train.on_nan
        if is_bad and scale is not None:
            assert norm is not None
            check_scaled(norm, scale, step.number)
        elif on_nan == "stop" and scale is None and (is_bad or not math.isfinite(loss)):
            self._refuse_no_targets(step)
        if is_bad and scale is None and on_nan == "stop":
            program = self._program
            began = first_not_finite(program.engines, lambda: program.forward_backward(step.batch))
            raise NotFinite(_not_finite(step.number, "gradient norm", began), step.number)
        skipped = is_bad and (scale is not None or on_nan == "skip")
        self.skipped += skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._metrics is not None:
            line = StepMetrics(
                *(step.number, loss, norm, step.lr, step.seconds, step.evaluation, scale),
                skipped=skipped,
                experts=step.loads.read() if step.loads is not None else (),
                data_wait_s=step.data_wait_s,
                parameters_sha256=step.parameters_sha256,
            )
            samples = self._plan.global_batch
            record = self._metrics.write(line, samples, self._batches.tokens(step.batch))
            if self._callbacks is not None:
                self._callbacks.step(step.number, record, step.evaluation)
            self.final_loss = loss
            if self.plateau is not None and math.isfinite(loss):
                self.plateau.add(loss)
        if on_nan == "stop" and scale is None and not math.isfinite(loss):
            raise NotFinite(_not_finite(step.number, "loss", ""), step.number)
        if scale is not None and self._skipped_in_a_row == MOST_SKIPPED:
            text = f"{MOST_SKIPPED} steps in a row were left out, the last of them step "
            text += f"{step.number}, as their gradients overflowed fp16; use a lower "
            text += "train.loss_scale"
            raise NotFinite(text, step.number)
        if on_nan == "skip" and scale is None and self._skipped_in_a_row == MOST_SKIPPED:
            text = f"{MOST_SKIPPED} steps in a row were left out, the last of them step "
            text += f"{step.number}, as their loss or gradient norm was not finite; "
            text += "use train.on_nan=stop to see where that begins, or a lower optimizer.lr"
            raise NotFinite(text, step.number)

    def _refuse_no_targets(self, step: "_Pending") -> None:
        """Raise NotFinite where the step's loss is a mean over no targets. A collective."""
        labels = without_targets(step.batch)
        if labels:
            samples = listed(map(str, self._batches.sample_numbers(step.number - 1)))
            text = f"step {step.number} has no target: all its {labels}, so that its loss is a "
            text += f"mean over nothing (samples {samples}); leave samples without targets out of "
            text += "the data, use a larger train.global_batch or data.shuffle=true so that others "
            text += "are beside them, or train.on_nan=skip to leave such steps out"
            raise NotFinite(text, step.number)


@dataclass(frozen=True)
class _Pending:
    """A step that was enqueued, and whose results are on their way to the host.

    number: the step, counted from 1.
    lr: its learning rate.
    seconds: the time it took on the host.
    evaluation: the results of the evaluation after it, by name.
    batch: this rank's micro-batches.
    coming: its loss, gradient norm and loss scale, on their way to the host.
    loads: the loads of its experts, or None in a model without experts.
    data_wait_s: seconds of it in which this rank waited for its samples.
    parameters_sha256: the SHA-256 of the parameters after it, or None.
    """

    number: int
    lr: float
    seconds: float
    evaluation: dict[str, float]
    batch: Sequence[Batch]
    coming: ToHost
    loads: PendingLoads | None
    data_wait_s: float
    parameters_sha256: str | None


@dataclass(frozen=True)
class Outcome:
    """The results of a step, on the device.

    loss: the loss of the global batch.
    grad_norm: the global gradient norm, or None where it is not measured.
    loss_scale: the scale of the loss in fp16, or None.
    """

    loss: PendingLoss
    grad_norm: Tensor | None
    loss_scale: Tensor | None


def train_step(
    request: Request,
    plan: Plan,
    program: Program,
    batch: Sequence[Batch],
    loss_scale: LossScale | None,
    device: torch.device,
) -> Outcome:
    """Enqueue the gradients of a batch and the update of all parameters on `device`.

    No value is read on the host.
    """
    options = request.train
    scale = None if loss_scale is None else loss_scale.value
    with span(program.trace, "forward and backward"):
        loss = program.forward_backward(batch, scale)
    skips_bad = options.on_nan is not None
    poison = None
    if options.on_nan == "skip" and scale is None:
        poison = loss.on_device() * 0.0
    with span(program.trace, "update"):
        norm = update(
            program.engines,
            options.grad_clip or 0.0,
            options.grad_norm,
            _sum_over_job if plan.rewrite is not None else None,
            scale,
            skips_bad=skips_bad,
            device=device,
            poison=poison,
        )
        if loss_scale is not None:
            assert norm is not None
            loss_scale.update(norm.isfinite())
    return Outcome(loss, norm, scale)


def _not_finite(step: int, quantity: str, began: str) -> str:
    """Return the message of a run that stops because `quantity` of step `step` is not finite."""
    text = f"the {quantity} of step {step} is not finite"
    text += f", which began with {began}" if began else ""
    return f"{text}; use train.on_nan=skip to leave such steps out, or a lower optimizer.lr"


def _sum_over_job(squared: Tensor) -> Tensor:
    dist.all_reduce(squared)
    return squared


def train_steps(
    request: Request,
    plan: Plan,
    program: Program,
    batches: RankBatches,
    metrics: Metrics | None,
    trace: Trace | None = None,
    saver: Saver | None = None,
    resumed: CheckpointState | None = None,
    profiler: StepProfiler | None = None,
    callbacks: Callbacks | None = None,
) -> dict[str, Any]:
    """Train to the end, from step 0 or from the step of `resumed`.

    Rank 0 may have `callbacks`; all ranks must then have a `saver`. Return the content of
    `summary.json`, without the ranks' memory.
    """
    loop = Loop(request, plan, program, batches, metrics, trace, callbacks)
    first = 0
    if resumed is not None:
        first = resumed.step
        batches.go_on(first, resumed.samples, resumed.stream)
        scales = loop.loss_scale is not None and not request.train.loss_scale_fixed
        if scales and resumed.loss_scale is not None:
            saved_scale = resumed.loss_scale
            loop.loss_scale = LossScale(saved_scale.value, saved_scale.good_steps, batches.device)
        loop.skipped = resumed.skipped
        loop.watch = EvaluationWatch(request, resumed.watched)
    times = []
    done = first
    delink_at = request.train.delink_at if request.is_pseudo else None
    delinks = False
    saves_last = request.checkpoint.saves or request.is_pseudo
    started = ended = time.perf_counter()
    while done < request.train.steps:
        if profiler is not None:
            profiler.before(done + 1)
        times.append(loop.step(done))
        ended = time.perf_counter()
        done += 1
        if profiler is not None:
            profiler.after(done)
        if saver is not None and loop.plateau is not None:
            saver.wants_to_delink = loop.plateau.reached
        if saver is not None and callbacks is not None:
            saver.asked = callbacks.wish()
        wanted = saver.wanted(done) if saver is not None else CheckpointRequest.NOTHING
        if done == delink_at:
            wanted = max(wanted, CheckpointRequest.SAVE_AND_DELINK)
        if loop.is_best:
            wanted = max(wanted, CheckpointRequest.SAVE)
        if wanted is CheckpointRequest.END:
            loop.watch.end = loop.watch.end or "a callback asked for the end"
        is_last = done == request.train.steps or bool(loop.watch.end)
        is_wanted = wanted not in (CheckpointRequest.NOTHING, CheckpointRequest.END)
        if saver is not None and (is_wanted or (is_last and saves_last)):
            loop.settle()  # raises where the loss is not finite, before it is saved
            scale = loop.loss_scale and loop.loss_scale.state()
            seen = {"samples": batches.seen(done), "num_samples": batches.num_samples}
            delinks = wanted is CheckpointRequest.SAVE_AND_DELINK
            scalars = {**seen, "loss_scale": scale, "delinks": delinks, "skipped": loop.skipped}
            scalars["watched"] = loop.watch.state()
            scalars["stream"] = batches.stream_state(done)
            trackers = metrics.tracker_states() if metrics is not None else None
            saver.save(done, scalars, trackers, loop.watch.best if loop.is_best else None)
        if is_last or wanted >= CheckpointRequest.SAVE_AND_DELINK:
            break
    loop.settle()
    batches.close()
    if saver is not None:
        saver.close()
    # The first step includes the set-up of libraries at their first use.
    typical = median(times[1:] or times)
    return {
        "final_loss": loop.final_loss,
        "steps": done,
        "skipped_steps": loop.skipped,
        "stopped_after": None if done == request.train.steps or loop.watch.end else done,
        **({"ended_early": loop.watch.end} if loop.watch.end else {}),
        **({} if loop.watch.best is None else {"best": loop.watch.best}),
        **({"delinks": True} if done < request.train.steps and delinks else {}),
        "trained_s": ended - started,
        "samples_per_s": plan.global_batch / typical,
        "step_time_s_median": typical,
        "data_wait_s_median": median(loop.data_waits_s[1:] or loop.data_waits_s),
        "predicted_step_time_s": plan.predicted.step_time_s,
        "predicted_here_s": plan.predicted_here and plan.predicted_here.step_time_s,
    }


def of_rank_0(values: dict[str, float]) -> dict[str, float]:
    """Return the values of rank 0, so that all ranks decide by the same digits. A collective."""
    shared = [values]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]
