"""Run a rank of a verification: train the first steps and write the rank's tensors under `verify/`.

`rank_N.safetensors` has, by the parameter's path in the user's model, its `initial` value, its
values after the `first` step (of several) and at the end (`final`), and the first step's `gradient`
(of the mean loss, before clipping), in fp32. It also has blocks of buffers and untrained
parameters, as they were after the steps. `rank_N.json` gives the part of the whole tensor that each
block is. A first step is one that fp16 did not skip. A rank that trains alone adds the magnitudes
that the comparison is judged by (`Yardstick`). `launcher/modes/compare_runs.py` compares.

Dropout is off: its masks differ from plan to plan, so with dropout no two plans have equal results.
It stays on under logical workers, which have masks of their own.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whale_train.checkpoints.checkpoint_files import FileRecord
from whale_train.config import Request
from whale_train.models.batch_parts.dropout_off import DropoutOff
from whale_train.optimizer_options import OptimizerOptions
from whale_train.runtime.base.step_types import Batch, Evaluation, EvaluationBatches, PendingLoss
from whale_train.runtime.base.trace import Trace
from whale_train.runtime.engines.base import Engine
from whale_train.runtime.engines.ddp import TorchEngine
from whale_train.runtime.graph.shard_rng import SharedRandom
from whale_train.runtime.record.metrics import Metrics
from whale_train.runtime.state.blocks import placement
from whale_train.runtime.state.held import RankState, paths_of
from whale_train.runtime.state.tensor_files import record_json, write_tensors
from whale_train.runtime.train.batches import RankBatches
from whale_train.runtime.train.loop import Loop
from whale_train.runtime.train.rounded_weights import RoundedWeights
from whale_train.runtime.train.step_programs import Program
from whale_train.runtime.train.worker_program import WorkerProgram
from whale_train.strategies.plan.plan import Plan


def record_verification(
    run_dir: Path,
    request: Request,
    plan: Plan,
    program: Program,
    batches: RankBatches,
    metrics: Metrics | None,
    state: RankState,
    rank: int,
    rounding: int | None = None,
) -> tuple[dict[str, Any], tuple[FileRecord, ...]]:
    """Train the first `verify.steps` steps of the run, and write the tensors of `rank`.

    Return the entries of `summary.json`, and the records of the files. `rounding` is the seed of
    the noise on the weights in every forward and backward, on a rank that trains alone (None: no
    noise).
    """
    # One rank whose engine partitions offloads: it is a plan to compare, not the reference.
    is_alone = plan.world_size == 1 and not any(engine.partitions for engine in program.engines)
    yardstick = Yardstick(request) if is_alone else None
    rounded = None
    if rounding is not None:
        assert is_alone
        weights = (p for engine in program.engines for p in engine.module.parameters())
        rounded = RoundedWeights(weights, plan.precision, rounding)
    without = _WithoutDropout(program, rounded)
    # Masks of logical workers are the same under any plan.
    has_workers = isinstance(program, WorkerProgram)
    loop = Loop(request, plan, program if has_workers else without, batches, metrics)
    recorder = _Recorder(program, plan, rank, yardstick)
    recorder.keep_values("initial")
    before, skipped = _random_states(), []
    for number in range(request.verify.steps):
        scale = None if loop.loss_scale is None else float(loop.loss_scale.value)
        loop.step(number)
        if loop.loss_scale is not None and float(loop.loss_scale.value) < (scale or 0.0):
            skipped.append(number + 1)  # all ranks skip it, by the job's norm
            recorder.forget_step()
            continue
        if yardstick is not None:
            yardstick.add_step(program, loop.lr)
        recorder.end_step(keeps_first=request.verify.steps > 1)
    loop.settle()
    batches.close()
    recorder.keep_values("final")
    if isinstance(program, WorkerProgram):
        program.show_first_worker()
    recorder.keep_constants(state)
    report = {
        "parts": recorder.parts,
        "constants": recorder.constants,
        "skipped": skipped,
        "dropout_off": without.mode.met,
        "drew_random": not has_workers and not all(map(torch.equal, before, _random_states())),
        "largest": yardstick.largest if yardstick is not None else {},
    }
    if yardstick is not None:
        recorder.tensors |= {f"sensitivity/{k}": x for k, x in yardstick.sensitivity.items()}
    tensors = recorder.tensors
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    path = f"verify/rank_{rank}"
    files = (
        write_tensors(run_dir, f"{path}.safetensors", described, tensors.values()),
        record_json(run_dir, f"{path}.json", report),
    )
    return {"final_loss": loop.final_loss, "steps": request.verify.steps}, files


class _Recorder:
    """Collects a rank's tensors, while its engines take their steps.

    `tensors` are the collected tensors by name. `parts` are the placements of trained parameters,
    by path; `constants` are the placements of blocks of buffers and untrained parameters, by
    tensor name.
    """

    def __init__(
        self, program: Program, plan: Plan, rank: int, yardstick: "Yardstick | None"
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.parts: dict[str, dict[str, Any]] = {}
        self.constants: dict[str, dict[str, Any]] = {}
        self._steps = 0
        self._gradients: dict[str, Tensor] = {}
        self._program, self._plan, self._rank, self._yardstick = program, plan, rank, yardstick
        for engine in program.engines:
            engine.on_gradients = partial(self._see_gradients, engine)

    def keep_values(self, kind: str) -> None:
        """Store the current values of the trained parameters, under the folder `kind`."""
        for engine in self._program.engines:
            for path, value in _by_path(engine, engine.values()):
                self.tensors[f"{kind}/{path}"] = _kept(value)
                where = placement(self._plan, self._rank, path, tuple(value.shape))
                self.parts[path] = {"shape": where.shape, "index": where.intervals}

    def keep_constants(self, state: RankState) -> None:
        """Store the buffers and the untrained parameters, block by block."""
        for number, held in enumerate(state.untrained()):
            tensor, ends = held.tensor.detach(), held.block.stops
            starts = zip(held.block.offsets, ends, strict=True)
            index: list[Any] = [[interval] for interval in starts]
            if tensor.is_complex():
                tensor, index = torch.view_as_real(tensor), [*index, None]
            name = f"constant/{number}"
            is_float = tensor.is_floating_point()
            self.tensors[name] = _kept(tensor, torch.float32 if is_float else torch.int64)
            kind = "buffer" if held.is_buffer else "untrained parameter"
            self.constants[name] = {
                **{"path": held.name, "what": kind, "index": index, "is_float": is_float}
            }

    def end_step(self, keeps_first: bool) -> None:
        """Count a step that updated the parameters.

        `keeps_first` stores the values after the first such step.
        """
        if self._steps == 0:
            self.tensors |= {f"gradient/{path}": x for path, x in self._gradients.items()}
            if keeps_first:
                self.keep_values("first")
                if self._yardstick is not None:
                    slopes = self._yardstick.sensitivity
                    self.tensors |= {f"first_sensitivity/{k}": x for k, x in slopes.items()}
        self._gradients = {}
        self._steps += 1

    def forget_step(self) -> None:
        """Drop the gradients of a step that was skipped."""
        self._gradients = {}

    def _see_gradients(self, engine: Engine) -> None:
        """Store the gradients of `engine`, and pass them to the yardstick, where needed."""
        if self._steps and self._yardstick is None:
            return
        gradients = dict(_by_path(engine, engine.gradients()))
        if self._yardstick is not None:
            self._yardstick.see_gradients(gradients)
            self._yardstick.see_values(engine)
        if self._steps == 0:
            self._gradients |= {path: _kept(x) for path, x in gradients.items()}


def _by_path(
    engine: Engine, read: Iterable[tuple[nn.Parameter, Tensor | None]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `read` that this rank reports, with their paths in the user's model."""
    paths = paths_of(engine)
    for parameter, value in read:
        if value is not None:
            yield paths[id(parameter)], value


def _kept(value: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return value.detach().to("cpu", dtype, copy=True).contiguous()


class Yardstick:
    """Magnitudes that a single process measures, by which a comparison is judged.

    `largest` is the largest gradient element of a parameter in any step, by path. `sensitivity`
    bounds, element by element, the change of all steps' updates when the gradient of every step is
    off by one unit. It is a sum over steps of the learning rate times the optimizer's own slope.
    For Adam that slope is steep where gradients are near 0: there Adam divides one small number by
    another.
    """

    def __init__(self, request: Request) -> None:
        self.largest: dict[str, float] = {}
        self.sensitivity: dict[str, Tensor] = {}
        self._options = request.optimizer
        # LARS's slope depends on the gradient's norm, which no state keeps.
        self._measures_moves = request.optimizer.is_custom or request.optimizer.name == "lars"
        self._before: dict[str, Tensor] = {}  # values before the update
        self._clip = request.train.grad_clip or 0.0
        self._left_by_clipping = 1.0
        self._seen: dict[str, float] = {}
        self._steps = 0

    def see_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Record the magnitudes of all gradients of a step, before clipping, by path."""
        for path, gradient in gradients.items():
            largest = float(gradient.abs().max()) if gradient.numel() else 0.0
            # A non-finite gradient has no magnitude, and must not allow any difference.
            largest = largest if math.isfinite(largest) else 0.0
            self._seen[path] = largest
        norm = sum(float(x.double().square().sum()) for x in gradients.values()) ** 0.5
        self._left_by_clipping = min(1.0, self._clip / (norm + 1e-6)) if self._clip else 1.0

    def see_values(self, engine: Engine) -> None:
        """Record the values before an update of an optimizer whose slope is not known."""
        if self._measures_moves:
            self._before |= {x: _kept(value) for x, value in _by_path(engine, engine.values())}

    def add_step(self, program: Program, rate: float) -> None:
        """Add the update of the gradients seen last, at learning rate `rate`."""
        self._steps += 1
        for path, largest in self._seen.items():
            self.largest[path] = max(self.largest.get(path, 0.0), largest)
        for engine in program.engines:
            assert isinstance(engine, TorchEngine)
            assert engine.optimizer is not None
            if self._measures_moves:
                self._add_moves(_by_path(engine, engine.values()))
                continue
            slopes = [
                (p, group.get("lr_scale", 1.0) * self._slope(engine.optimizer, group, p))
                for group in engine.optimizer.param_groups
                for p in group["params"]
            ]
            for path, slope in _by_path(engine, slopes):
                grown = rate * self._left_by_clipping * slope.detach().float().cpu()
                before = self.sensitivity.get(path)
                self.sensitivity[path] = grown if before is None else before + grown

    def _add_moves(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Add the moves of an update of an optimizer whose slope is not known.

        Each parameter's largest move is taken to be in proportion to its largest gradient.
        """
        for path, value in values:
            largest, before = self._seen.get(path, 0.0), self._before[path]
            if largest and before.numel():
                moved = (_kept(value) - before).abs().max() / largest
                self.sensitivity[path] = self.sensitivity.get(path, torch.zeros(())) + moved

    def _slope(self, optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> Tensor:
        """Return `slope_of` for a parameter of `group`, in the group's learning rate."""
        options = self._options.model_copy(update={"weight_decay": group["weight_decay"]})
        state = optimizer.state.get(parameter, {})
        return slope_of(options, self._steps, state, parameter.detach())


def slope_of(
    options: OptimizerOptions, steps: int, state: Mapping[str, Any], parameter: Tensor
) -> Tensor:
    """Return the largest move of an update, in learning rates, for an error of 1 in all gradients.

    The result has the shape of `parameter`, or is a scalar that holds for all elements. `steps` is
    the number of updates, and `state` the optimizer's state of the parameter.

    SGD adds up errors as it adds up gradients. For Adam (Kingma and Ba, 2015, algorithm 1), the
    update is m / d with d = sqrt(v) + eps, both bias-corrected. m is a mean of gradients and
    sqrt(v) a weighted norm of them, so an error of 1 moves either by at most 1, and the quotient by
    1 / d + |m| / d^2 to first order. The slope is 0 where every gradient was exactly 0: no term
    reached that element, and none is rounded. LAMB's slope is the slope of its direction r, as
    Adam's, and of |r|, times the trust ratio |x| / |r| (runtime/optim/lamb.py).
    """
    if options.name == "sgd":
        return torch.tensor(sum(options.momentum**k for k in range(steps)))
    if not state:  # no gradient yet
        return torch.zeros(())
    first, second = options.betas
    count = float(state["step"])
    mean = state["exp_avg"].double() / (1 - first**count)
    square = state["exp_avg_sq"].double() / (1 - second**count)
    divisor = square.sqrt() + options.eps
    slope: Tensor = (1 + mean.abs() / divisor) / divisor
    if options.name == "lamb":
        direction = mean / divisor + options.weight_decay * parameter
        weight, length = parameter.double().norm(), direction.norm()
        if weight > 0 and length > 0:
            stretched = (direction.abs() * slope).sum() / length**2  # relative slope of |r|
            slope = weight / length * (slope + direction.abs() * stretched)
    return slope.masked_fill((mean == 0) & (square == 0), 0.0)


class _WithoutDropout:
    """A program that runs under `DropoutOff`, recomputed forwards included, on `rounded`
    weights."""

    def __init__(self, program: Program, rounded: RoundedWeights | None) -> None:
        self._program, self._rounded = program, rounded
        self.mode = DropoutOff()
        self.trace: Trace | None = None  # the loop sets None as well
        self.loads = program.loads

    @property
    def engines(self) -> Sequence[Engine]:
        return self._program.engines

    @property
    def shared_random(self) -> Sequence[SharedRandom]:
        return self._program.shared_random

    def forward_backward(
        self, batches: Sequence[Batch], loss_scale: Tensor | None = None
    ) -> PendingLoss:
        with self.mode, self._rounded.moved() if self._rounded is not None else nullcontext():
            return self._program.forward_backward(batches, loss_scale)

    def evaluate(self, held: EvaluationBatches) -> Evaluation:
        return self._program.evaluate(held)


def _random_states() -> list[Tensor]:
    """Return the states of torch's default generators.

    They are equal before and after a computation without random draws.
    """
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return states
