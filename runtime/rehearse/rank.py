"""One rank's step, rehearsed: its program as the runtime puts it together, on tensors without
storage, in a world whose other ranks do not exist."""

import copy
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from whale_train.config import Request
from whale_train.models.loss_module import LossModule
from whale_train.runtime.assembly.build_program import assemble
from whale_train.runtime.comms.process_groups import make_channels, make_groups
from whale_train.runtime.engines.ddp import TorchEngine
from whale_train.runtime.engines.rank_context import Seat, StandIns
from whale_train.runtime.pipeline.executor import PipelineModel
from whale_train.runtime.rehearse.attention import as_on_a_gpu
from whale_train.runtime.rehearse.meta_tensors import MetaTensors
from whale_train.runtime.rehearse.recorded_group import Record, alone
from whale_train.runtime.rehearse.routing import evenly
from whale_train.runtime.rehearse.stand_ins import Buckets, HostEngine, ZeroEngine
from whale_train.runtime.train.grad_scaler import LossScale
from whale_train.runtime.train.loop import train_step
from whale_train.runtime.train.step_programs import Program
from whale_train.strategies.graph.operation_graph import InputField
from whale_train.strategies.plan.plan import Plan

DEVICE = torch.device("meta")


@dataclass(frozen=True)
class Rehearsed:
    """What came of a rank's step. `error` is what it raised, and `place` where ('' and '' if
    nothing). `peak_bytes` are those of the worst moment, by what holds them; `kernels` how often
    each kind of attention kernel ran; `reads` how often the model's own code read a value on the
    host, by where."""

    rank: int
    error: str
    place: str
    peak_bytes: Mapping[str, int]
    record: Record
    kernels: Mapping[str, int]
    reads: Mapping[str, int]
    num_operations: int
    seconds: float


@dataclass(frozen=True)
class Model:
    """What every rank is rehearsed with: the model without weights, its exported graph, and the
    fields of its batches."""

    module: LossModule
    graph: fx.GraphModule | None
    fields: tuple[InputField, ...]


def rehearse_rank(request: Request, plan: Plan, model: Model, rank: int) -> Rehearsed:
    """Return what comes of one training step of `rank`."""
    started = time.perf_counter()
    error = place = ""
    peak: dict[str, int] = {}
    with alone(rank, plan.world_size) as record, as_on_a_gpu() as kernels, evenly():
        step = _Step(request, plan, model, rank)
        try:
            step.run()
            peak = step.peak_bytes
        except Exception as raised:
            first = next(iter(str(raised).strip().splitlines()), "")
            error, place = f"{type(raised).__name__}: {first}", place_of(raised)
        operations, reads = step.tensors.num_operations, dict(step.tensors.reads)
        del step
    seconds = time.perf_counter() - started
    return Rehearsed(rank, error, place, peak, record, dict(kernels), reads, operations, seconds)


class _Step:
    """The step of one rank, and what it holds at its worst moment."""

    def __init__(self, request: Request, plan: Plan, model: Model, rank: int) -> None:
        self._request, self._plan, self._model, self._rank = request, plan, model, rank
        self._program: Program | None = None
        self.peak_bytes: dict[str, int] = {}
        self.tensors = MetaTensors(self._look)

    def run(self) -> None:
        plan, rank = self._plan, self._rank
        groups, channels = make_groups(plan, rank), make_channels(plan, rank, DEVICE)
        forget = self.tensors.forget
        stand_ins = StandIns(Buckets, partial(ZeroEngine, forget=forget), HostEngine, forget)
        seat = Seat(rank, DEVICE, groups, channels, stand_ins)
        module = copy.deepcopy(self._model.module)
        with self.tensors:
            program = assemble(self._request, plan, module, self._model.graph, seat)
            del module
            for engine in program.engines:
                list(engine.states())  # the optimizer's state, as from the second step on
            batch = [
                {
                    field.name: torch.empty(
                        (stop - start, *field.shape),
                        dtype=getattr(torch, field.dtype),
                        device=DEVICE,
                    )
                    for field in self._model.fields
                }
                for start, stop in plan.ranks[rank].samples
            ]
            scale = LossScale(device=DEVICE) if plan.precision == "fp16" else None
            self.tensors.restart()
            self._program = program
            self._look()
            train_step(self._request, plan, program, batch, scale, DEVICE)
        self._program = None

    def _look(self) -> None:
        """Note what holds the memory now."""
        if self._program is None:
            return
        seen: set[int] = set()
        size = partial(_new_bytes, seen, self.tensors)
        found = {"parameters": 0, "gradients": 0, "optimizer": 0, "communication": 0}
        for engine in self._program.engines:
            module, whole = engine.module, list(engine.module.parameters())
            found["parameters"] += size((*whole, *module.buffers()))
            found["gradients"] += size(p.grad for p in whole)
            if isinstance(engine, ZeroEngine):
                found["parameters"] += size(engine.partition_tensors)
                found["optimizer"] += size(engine.optimizer_tensors)
                found["gradients"] += size(engine.gradient_tensors)
                found["communication"] += size(engine.gathered_tensors)
            elif isinstance(engine, TorchEngine):
                if engine.optimizer is not None:
                    kept = engine.optimizer.state.values()
                    found["optimizer"] += size(x for state in kept for x in state.values())
                found["gradients"] += size(engine.buckets)
        if isinstance(self._program, PipelineModel):
            found["communication"] += size(self._program.passing)
        found["activations"] = self.tensors.live - sum(found.values())
        self.peak_bytes = found


def _new_bytes(seen: set[int], tensors: MetaTensors, listed: Iterable[Any]) -> int:
    """Return the bytes of those of `listed` that are tensors, counted, and not `seen` yet."""
    total = 0
    for tensor in listed:
        if isinstance(tensor, Tensor) and tensors.counts(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
    return total


def place_of(error: BaseException) -> str:
    """Return the deepest line that is not torch's, in which `error` was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    apart = ("/torch/", "rehearse/meta_tensors", "rehearse/attention")
    found = [x for x in frames if not any(part in x.filename for part in apart)]
    found = [x for x in found if x.name != "__torch_function__"]
    if not found:
        return ""
    last = found[-1]
    return f"{last.filename}:{last.lineno} in {last.name}: {(last.line or '').strip()}"
