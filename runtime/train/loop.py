"""The training loop: batches, steps, learning rate, evaluation, metrics."""

import json
import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any

import torch
from torch import Tensor
from torch import distributed as dist

from whale_train.config import Request
from whale_train.data.dataset import Dataset
from whale_train.data.order import evaluation_batches, step_indices
from whale_train.runtime.train.evaluation import HeldBack
from whale_train.runtime.train.grad_scaler import START, LossScale
from whale_train.runtime.train.lr_schedule import learning_rate
from whale_train.runtime.train.optimizer_step import update
from whale_train.runtime.train.step_programs import PendingLoss, Program
from whale_train.runtime.train.timeline import Trace, span
from whale_train.strategies.plan.plan import Plan


@dataclass(frozen=True)
class _Step:
    """What is known of a step when it ends, its loss perhaps still on its way."""

    number: int
    loss: PendingLoss
    grad_norm: Tensor | None
    lr: float
    seconds: float
    evaluation: dict[str, float]
    loss_scale: float | None = None


@dataclass(frozen=True)
class _HeldBack:
    """Held-back samples whose batches are read each time they are iterated over."""

    samples: int
    read: Callable[[], Iterator[tuple[float, list[dict[str, Tensor]]]]]

    def __iter__(self) -> Iterator[tuple[float, list[dict[str, Tensor]]]]:
        return self.read()


class Batches:
    """This rank's micro-batches of every global batch, read when asked for."""

    def __init__(
        self, request: Request, plan: Plan, dataset: Dataset, rank: int, device: torch.device
    ) -> None:
        self._request, self._plan, self._dataset = request, plan, dataset
        self._device = device
        self._mine = [slice(*interval) for interval in plan.ranks[rank].samples]
        self._names = {field.name for field in dataset.fields}

    def training(self, step: int) -> list[dict[str, Tensor]]:
        seed, shuffle = self._request.seed, self._request.data.shuffle
        total, batch = self._dataset.num_samples, self._plan.global_batch
        indices = step_indices(total, batch, step, seed, shuffle)
        return [self._tensors(self._dataset.samples(indices[mine])) for mine in self._mine]

    def evaluation(self) -> HeldBack:
        """The first held-back samples, as many as were asked for and exist."""
        wanted = min(self._request.train.evaluation_samples, self._dataset.num_evaluation_samples)
        return _HeldBack(wanted, partial(self._evaluated, wanted))

    def _evaluated(self, samples: int) -> Iterator[tuple[float, list[dict[str, Tensor]]]]:
        for weight, indices in evaluation_batches(samples, self._plan.global_batch):
            parts = (self._dataset.evaluation_samples(indices[mine]) for mine in self._mine)
            yield weight, [self._tensors(part) for part in parts]

    def tokens(self, batches: Sequence[dict[str, Tensor]]) -> int:
        """Tokens of a global batch, known from this rank's part of it; its samples where a
        sample is no sequence of token numbers."""
        ids = batches[0].get("input_ids") if batches else None
        per_sample = ids[0].numel() if ids is not None and len(ids) else 1
        return self._plan.global_batch * per_sample

    def _tensors(self, arrays: dict[str, Any]) -> dict[str, Tensor]:
        return {
            name: torch.from_numpy(array).to(self._device, non_blocking=True)
            for name, array in arrays.items()
            if name in self._names
        }


class Metrics:
    """`metrics.jsonl`, and TensorBoard beside it: written by rank 0, a line a step."""

    def __init__(self, run_dir: Path, tensorboard: bool, device: torch.device) -> None:
        self._file: IO[str] = (run_dir / "metrics.jsonl").open("a", buffering=1)
        self._device = device
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, step: _Step, samples: int, tokens: int) -> float:
        """Write a step's line, waiting for its loss, which is returned."""
        loss = step.loss.item()
        norm = None if step.grad_norm is None else float(step.grad_norm)
        line: dict[str, Any] = {
            "step": step.number,
            "loss": loss,
            "grad_norm": norm,
            "lr": step.lr,
            **({} if step.loss_scale is None else {"loss_scale": step.loss_scale}),
            "samples": samples,
            "tokens": tokens,
            "step_time_s": step.seconds,
            "samples_per_s": samples / step.seconds,
            "peak_memory_bytes": peak_memory_bytes(self._device),
            **step.evaluation,
        }
        # JSON has no NaN: a loss that is no number is null.
        finite = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()
        }
        self._file.write(json.dumps(finite) + "\n")
        if self._board is not None:
            for name in ("loss", "grad_norm", "lr", "samples_per_s", *step.evaluation):
                if line[name] is not None:
                    self._board.add_scalar(f"train/{name}", line[name], step.number)
        return loss

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


class Loop:
    """The steps of a run, one after another. A step's line is written while the next is computed,
    its loss travelling meanwhile; `settle` writes the last one."""

    def __init__(
        self,
        request: Request,
        plan: Plan,
        program: Program,
        batches: Batches,
        metrics: Metrics | None,
        trace: Trace | None = None,
    ) -> None:
        self.final_loss: float | None = None
        self._trace = program.trace = trace
        self._request, self._plan, self._program = request, plan, program
        self._batches, self._metrics = batches, metrics
        self._pending: tuple[_Step, int] | None = None
        self._sum_over_job = _sum_over_job if plan.rewrite is not None else None
        self._loss_scale: LossScale | None = None
        if plan.precision == "fp16":
            self._loss_scale = LossScale(request.train.loss_scale or START)

    def step(self, number: int) -> float:
        """Step `number`, from 0: its batch, its gradients, its update. The seconds it took."""
        options, program, batches = self._request.train, self._program, self._batches
        started = time.perf_counter()
        lr = learning_rate(self._request.optimizer, number, options.steps)
        for engine in program.engines:
            engine.set_learning_rate(lr)
        with self._span("data"):
            batch = batches.training(number)
        scale = self._loss_scale.value if self._loss_scale is not None else None
        with self._span("forward and backward"):
            loss = program.forward_backward(batch, scale or 1.0)
        with self._span("update"):
            norm = update(
                program.engines,
                options.grad_clip or 0.0,
                options.grad_norm,
                self._sum_over_job,
                scale,
            )
            if self._loss_scale is not None:
                assert norm is not None
                self._loss_scale.update(math.isfinite(float(norm)))
        with self._span("metrics"):
            self.settle()
        seconds = time.perf_counter() - started
        evaluation = {}
        if options.evaluate_every and (number + 1) % options.evaluate_every == 0:
            evaluation = evaluate(program, batches)
        step = _Step(number + 1, loss, norm, lr, seconds, evaluation, scale)
        self._pending = (step, batches.tokens(batch))
        return seconds

    def _span(self, name: str) -> AbstractContextManager[None]:
        return span(self._trace, name)

    def settle(self) -> None:
        """Write the line of the step before."""
        if self._pending is not None:
            step, tokens = self._pending
            if self._metrics is not None:
                self.final_loss = self._metrics.write(step, self._plan.global_batch, tokens)
            else:
                step.loss.item()
        self._pending = None


def _sum_over_job(squared: Tensor) -> Tensor:
    dist.all_reduce(squared)
    return squared


def train(
    request: Request,
    plan: Plan,
    program: Program,
    batches: Batches,
    metrics: Metrics | None,
    trace: Trace | None = None,
) -> dict[str, Any]:
    """Train to the end; what `summary.json` holds but the memory of the ranks."""
    loop = Loop(request, plan, program, batches, metrics, trace)
    times = [loop.step(number) for number in range(request.train.steps)]
    loop.settle()
    # The first step pays for what libraries set up when first used.
    typical = median(times[1:] or times)
    return {
        "final_loss": loop.final_loss,
        "steps": len(times),
        "samples_per_s": plan.global_batch / typical,
        "step_time_s_median": typical,
        "predicted_step_time_s": plan.predicted.step_time_s,
        "predicted_here_s": plan.predicted_here and plan.predicted_here.step_time_s,
    }


def evaluate(program: Program, batches: Batches) -> dict[str, float]:
    """Mean loss over the held-back samples, and the share of right answers where there are
    targets."""
    seen = program.evaluate(batches.evaluation())
    found = {"evaluation_loss": seen.loss}
    targets = round(seen.targets)  # weighted sums of whole numbers
    if targets:
        found["evaluation_accuracy"] = round(seen.correct) / targets
    return found


def peak_memory_bytes(device: torch.device) -> int:
    """Of this rank so far: allocated on its GPU, or resident in its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
