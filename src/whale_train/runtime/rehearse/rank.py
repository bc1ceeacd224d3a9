"""Rehearse one rank's step.

The rank's program is assembled as in training, on tensors without storage, in a world whose other
ranks do not exist.
"""

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
from whale_train.runtime.engines.rank_context import RankContext, StandIns
from whale_train.runtime.engines.uneven.engine import UnevenEngine
from whale_train.runtime.pipeline.executor import PipelineModel
from whale_train.runtime.rehearse.attention import as_on_devices
from whale_train.runtime.rehearse.meta_tensors import MetaTensors
from whale_train.runtime.rehearse.recorded_group import Record, alone
from whale_train.runtime.rehearse.routing import evenly
from whale_train.runtime.rehearse.stand_ins import Buckets, GatheredUnits, HostEngine, ZeroEngine
from whale_train.runtime.train.grad_scaler import LossScale
from whale_train.runtime.train.loop import train_step
from whale_train.runtime.train.step_programs import Program
from whale_train.strategies.graph.operation_graph import InputField
from whale_train.strategies.hardware.cluster import CPU_PROCESS
from whale_train.strategies.plan.plan import Plan

DEVICE = torch.device("meta")


@dataclass(frozen=True)
class Rehearsed:
    """The outcome of the rehearsal of a rank's step.

    rank: the rank.
    error: the error that the step raised, or ''.
    place: the line that raised it, or ''.
    peak_bytes: the bytes at the peak of memory, by the kind of tensors that hold them.
    record: the collectives and messages of the rank.
    kernels: the number of runs of each attention kernel.
    reads: the number of values that the model's own code read on the host, by place.
    num_operations: the number of operations that ran.
    seconds: the duration of the rehearsal.
    """

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
    """The model with which every rank is rehearsed.

    module: the model without weights.
    graph: its exported graph, or None where no rank runs one.
    fields: the fields of its batches.
    """

    module: LossModule
    graph: fx.GraphModule | None
    fields: tuple[InputField, ...]


def rehearse_rank(request: Request, plan: Plan, model: Model, rank: int) -> Rehearsed:
    """Rehearse one training step of `rank`, and return its outcome."""
    started = time.perf_counter()
    error = place = ""
    peak: dict[str, int] = {}
    with (
        alone(rank, plan.world_size) as record,
        as_on_devices(_is_on_cpu(plan)) as kernels,
        evenly(),
    ):
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


def _is_on_cpu(plan: Plan) -> bool:
    """Return True if the devices of a plan are CPU processes."""
    return plan.inventory is not None and CPU_PROCESS in plan.inventory.devices


class _Step:
    """The step of one rank, with the bytes that it holds at its peak."""

    def __init__(self, request: Request, plan: Plan, model: Model, rank: int) -> None:
        self._request, self._plan, self._model, self._rank = request, plan, model, rank
        self._program: Program | None = None
        self.peak_bytes: dict[str, int] = {}
        self.tensors = MetaTensors(self._look)
        self._gathered = GatheredUnits(self.tensors.forget)

    def run(self) -> None:
        """Run the training step."""
        plan, rank = self._plan, self._rank
        groups, channels = make_groups(plan, rank), make_channels(plan, rank, DEVICE)
        forget = self.tensors.forget
        zero = partial(ZeroEngine, forget=forget)
        stand_ins = StandIns(Buckets, zero, self._gathered, HostEngine, forget)
        seat = RankContext(rank, DEVICE, groups, channels, stand_ins)
        module = copy.deepcopy(self._model.module)
        with self.tensors:
            program = assemble(self._request, plan, module, self._model.graph, seat)
            del module
            for engine in program.engines:
                # The optimizer's state exists from the second step on.
                engine.make_states(list(engine.module.parameters()))
                list(engine.states())
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
        """Record which objects hold the memory at a new peak."""
        if self._program is None:
            return
        seen: set[int] = set()
        size = partial(_new_bytes, seen, self.tensors)
        peak_bytes = {"parameters": 0, "gradients": 0, "optimizer": 0, "communication": 0}
        for engine in self._program.engines:
            module, parameters = engine.module, list(engine.module.parameters())
            peak_bytes["parameters"] += size((*parameters, *module.buffers()))
            peak_bytes["gradients"] += size(p.grad for p in parameters)
            if isinstance(engine, ZeroEngine):
                peak_bytes["parameters"] += size(engine.partition_tensors)
                peak_bytes["optimizer"] += size(engine.optimizer_tensors)
                peak_bytes["gradients"] += size(engine.gradient_tensors)
                peak_bytes["communication"] += size(engine.gathered_tensors)
            elif isinstance(engine, UnevenEngine):
                peak_bytes["parameters"] += size(unit.shard for unit in engine.units)
                masters = (unit.master for unit in engine.units)
                peak_bytes["optimizer"] += size((*masters, *engine.optimizer_tensors))
                peak_bytes["gradients"] += size(unit.gradient for unit in engine.units)
                peak_bytes["communication"] += size(self._gathered.tensors.values())
            elif isinstance(engine, TorchEngine):
                if engine.optimizer is not None:
                    states = engine.optimizer.state.values()
                    tensors = (x for state in states for x in state.values())
                    peak_bytes["optimizer"] += size(x for x in tensors if isinstance(x, Tensor))
                peak_bytes["gradients"] += size(engine.buckets)
        if isinstance(self._program, PipelineModel):
            peak_bytes["communication"] += size(self._program.passing)
        peak_bytes["activations"] = self.tensors.live - sum(peak_bytes.values())
        self.peak_bytes = peak_bytes


def _new_bytes(seen: set[int], tensors: MetaTensors, candidates: Iterable[Any]) -> int:
    """Return the bytes of the tensors among `candidates` that are counted and not in `seen`.

    Their storages are added to `seen`.
    """
    total = 0
    for tensor in candidates:
        if isinstance(tensor, Tensor) and tensors.counts(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
    return total


def place_of(error: BaseException) -> str:
    """Return the deepest line in the traceback of `error` outside torch and the rehearsal."""
    frames = traceback.extract_tb(error.__traceback__)
    apart = ("/torch/", "rehearse/meta_tensors", "rehearse/attention")
    own_frames = [x for x in frames if not any(part in x.filename for part in apart)]
    own_frames = [x for x in own_frames if x.name != "__torch_function__"]
    if not own_frames:
        return ""
    last = own_frames[-1]
    return f"{last.filename}:{last.lineno} in {last.name}: {(last.line or '').strip()}"
