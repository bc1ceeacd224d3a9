"""Runs jobs through the real road and compares what they computed.

Owns the process that runs one job after another (`Jobs`: it composes, resolves, forks ranks
exactly as the command does, and has them save what they hold), the plain PyTorch loop all of it
is measured against, what counts as equal, and models such as users bring.
"""

import importlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tests.distributed.served import Served
from torch import Tensor, nn

from whale_train.checkpoints.checkpoint_state import CheckpointState
from whale_train.config import Request, read_request
from whale_train.data.sources.arrays import ArraysOptions
from whale_train.launcher.compose.command_line import composed, rewritten
from whale_train.launcher.planning.plan_request import resolve_request
from whale_train.launcher.ranks.run_dir import create_run_dir, write_text
from whale_train.launcher.ranks.run_files import start_ranks
from whale_train.launcher.resume import find_checkpoint
from whale_train.models.export.export import model_path
from whale_train.models.profile.python_draws import PythonDraws
from whale_train.optimizer_options import OptimizerOptions
from whale_train.runtime.comms.process_groups import file_rendezvous, leave
from whale_train.runtime.engines.base import Engine
from whale_train.runtime.engines.uneven.engine import UnevenEngine
from whale_train.runtime.graph.segment import SegmentModule
from whale_train.runtime.pipeline.chunk import Segments
from whale_train.runtime.process import fork_server as host
from whale_train.runtime.process import rank_main as worker
from whale_train.runtime.train.step_programs import Program

Arrays = dict[str, NDArray[Any]]


# --- Models of a user's own ----------------------------------------------------------------------


class OwnNet(nn.Module):
    """What users bring: logits only, a parameter nothing reads, one that is frozen.

    `branch` keeps it from being exported: it looks at the size of the batch, or at its values.
    """

    def __init__(self, classes: int = 11, branch: str = "") -> None:
        super().__init__()
        self.branch = branch
        self.first = nn.Linear(6, 24)
        self.forgotten = nn.Linear(6, 24)
        self.frozen = nn.Parameter(torch.rand(24), requires_grad=False)
        self.second = nn.Linear(24, classes)

    def forward(self, points: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(points)) * self.frozen
        if self.branch == "size" and len(points) % 2:
            hidden = hidden.clone()
        if self.branch == "values" and bool(hidden.isnan().any()):
            raise ValueError("not a number")
        logits: Tensor = self.second(hidden)
        return logits


class SometimesNet(nn.Module):
    """Reads `rare` only where a batch has a sample that asks for it."""

    def __init__(self, classes: int = 11) -> None:
        super().__init__()
        self.first = nn.Linear(6, 24)
        self.rare = nn.Linear(6, 24)
        self.second = nn.Linear(24, classes)

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.first(points)
        asked = points[:, :1] > RARE
        if len(points) % 2:  # it cannot be exported
            hidden = hidden.clone()
        if points.is_meta or bool(asked.any()):
            hidden = hidden + self.rare(points) * asked
        logits: Tensor = self.second(torch.tanh(hidden))
        return logits


RARE = 10.0  # a first coordinate above it asks


# --- What a job computed -------------------------------------------------------------------------


@dataclass(frozen=True)
class Computed:
    """Per step: loss, gradient norm, learning rate. `evaluations` are loss and accuracy of each
    evaluation; `values` are parameters and running
    statistics after the last step, from every rank that holds them whole (shards joined); `lines`
    are those of metrics.jsonl."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    evaluations: list[float]
    values: dict[str, list[NDArray[Any]]]
    plan: dict[str, Any]
    lines: list[dict[str, Any]]

    @classmethod
    def read(cls, run_dir: Path) -> "Computed":
        lines = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
        plan = json.loads((run_dir / "plan.json").read_text())
        held = [dict(np.load(run_dir / f"held_{r}.npz")) for r in range(plan["world_size"])]
        values: dict[str, list[NDArray[Any]]] = {}
        owned = {path for t in plan["task_graphs"] for path in t["parameters"]}
        for task_graph in plan["task_graphs"]:
            for ranks in task_graph["replicas"]:
                for path in held[ranks[0]]:
                    if path in task_graph["parameters"] or path not in owned:
                        parts = [held[rank][path] for rank in ranks]
                        copies = _copies(path, parts, task_graph)
                        values.setdefault(path, []).extend(copies)
        losses, norms, rates = ([x[k] for x in lines] for k in ("loss", "grad_norm", "lr"))
        evaluations = [x[k] for x in lines for k in sorted(x) if k.startswith("evaluation_")]
        return cls(losses, norms, rates, evaluations, values, plan, lines)


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked", "e_score_correction_bias")


def _copies(
    path: str, parts: list[NDArray[Any]], task_graph: Mapping[str, Any]
) -> list[NDArray[Any]]:
    """What the members of a shard group hold: one copy made of shards, or a copy each."""
    layout = task_graph["shard_layouts"].get(path)
    if layout is not None:
        return [_joined(parts, layout, task_graph["shards"][path])]
    dim = task_graph["shard_dims"].get(path)
    return parts if dim is None else [np.concatenate(parts, dim)]


def _joined(
    parts: list[NDArray[Any]], layout: Mapping[str, Any], intervals: list[list[int]]
) -> NDArray[Any]:
    """Shards put together: each piece of the cut dimension has a part on every member."""
    dim, units = layout["dim"], intervals[-1][1]
    pieces = layout.get("pieces", [units]) * layout["outer"]
    taken, found = [0] * len(parts), []
    for extent in pieces:
        for rank, (start, stop) in enumerate(intervals):
            length = stop * extent // units - start * extent // units
            found.append(parts[rank].take(range(taken[rank], taken[rank] + length), dim))
            taken[rank] += length
    assert all(part.shape[dim] == end for part, end in zip(parts, taken, strict=True))
    return np.concatenate(found, dim)


def assert_equal(found: Computed, expected: Computed, rel: float, rel_values: float = 0.0) -> None:
    """Losses, norms and rates within `rel`, relatively, at every step; every value, by its L2
    norm, within `rel_values` (as `rel` unless given) and FLOOR times the root of its elements."""
    wrong = []
    for what in ("losses", "norms", "rates", "evaluations"):
        a, b = (np.array(getattr(x, what), dtype=float) for x in (found, expected))
        # NaN, and a different number of steps, must not pass.
        if a.shape != b.shape or not (abs(a - b) <= rel * abs(b)).all():
            wrong.append(f"{what}: {a.tolist()}, not {b.tolist()}")
    trained = {path for t in expected.plan["task_graphs"] for path in t["trained"]}
    for path, (reference, *_) in expected.values.items():
        # A cut graph does not hold what nothing reads.
        assert path in found.values or path not in trained, path
        for rank, value in enumerate(found.values.get(path, ())):
            assert value.shape == reference.shape, path
            distance = float(np.linalg.norm(value.astype(float) - reference))
            allowed = (rel_values or rel) * float(np.linalg.norm(reference))
            allowed += FLOOR * sqrt(reference.size)
            if not distance <= allowed:
                wrong.append(f"{path} (copy {rank}): off by {distance:.2e}, allowed {allowed:.2e}")
    assert not wrong, "\n".join(wrong)


FLOOR = 1e-8  # of an element: what is 0 but for rounding (a key's bias)


# --- Running jobs --------------------------------------------------------------------------------


Entry = Callable[[Path, int, int, worker.Prepared], None]


class JobFailed(AssertionError):
    """A job that was refused or failed; the message holds why."""


class Jobs:
    """Runs jobs in `served`, where a user's own `equality.OwnNet` is found; equal ones once."""

    def __init__(self, folder: Path, served: Served) -> None:
        self._folder, self._served = folder, served
        self._done: dict[tuple[tuple[str, ...], bool], Computed] = {}

    def run(self, overrides: Sequence[str], plainly: bool = False) -> Computed:
        """The job of these overrides, or the plain loop's answer to them. Raises JobFailed."""
        key = (tuple(overrides), plainly)
        if key not in self._done:
            run_dir = Path(tempfile.mkdtemp(prefix="run_", dir=self._folder))
            failure = self._served.ask(
                run_job, overrides=key[0], plainly=plainly, run_dir=str(run_dir)
            )
            if failure:
                raise JobFailed(f"{' '.join(overrides)}\n{failure}")
            self._done[key] = Computed.read(run_dir)
            shutil.rmtree(run_dir)
        return self._done[key]


def run_job(overrides: list[str], plainly: bool, run_dir: str) -> str:
    """Do what the command does between composing and the end of the ranks; why it failed."""
    return run_job_as(train_plainly if plainly else train_and_save, overrides, run_dir)


def run_job_as(entry: Entry, overrides: list[str], run_dir: str) -> str:
    """The same, of ranks that are each `entry`."""
    folder = Path(run_dir)
    # Here launchers and ranks share a process: what an earlier job or this launcher's looks at the
    # model drew, or froze, would not be theirs.
    generators = PythonDraws()
    config = composed(rewritten(overrides))
    request = read_request(config, {"hardware": "inventory", "strategy": "strategy"})
    forget_own(request)
    create_run_dir(folder)
    write_text(folder / "request.json", request.to_json())
    resolved = resolve_request(request)
    resumed = request.train.resume and find_checkpoint(request.train.resume, folder)
    path = resumed.path if resumed else None
    samples = CheckpointState.read(path).samples if path else 0
    start_ranks(folder, resolved, request, path, samples=samples)
    generators.rewind()
    forget_own(request)
    return run_host(folder, entry)


def forget_own(request: Request) -> None:
    """Have the module of a user's own model imported again, with generators that drew nothing."""
    module = request.model.target.rpartition(".")[0]
    if not module.startswith("whale_train."):
        sys.modules.pop(module, None)


def run_host(run_dir: Path, entry: Entry) -> str:
    """The ranks of a resolved job, each `entry`, to their end; why they failed."""
    prepared = worker.prepare(Request.from_json((run_dir / "request.json").read_text()))
    world_size = json.loads((run_dir / "plan.json").read_text())["world_size"]
    status = host.serve(
        run_dir,
        world_size,
        lambda: worker.complete(run_dir, prepared),
        entry,
        os.getppid(),
    )
    failed = run_dir / "failure.json"
    said = json.loads(failed.read_text()) if failed.exists() else {}
    return "" if status == 0 else f"exit status {status}\n{said.get('traceback') or said}"


def train_and_save(run_dir: Path, rank: int, world_size: int, prepared: worker.Prepared) -> None:
    """A rank: train, then write what it holds, by the paths of the user's model."""
    meeting = file_rendezvous(run_dir)
    program = worker.train_as_planned(run_dir, rank, world_size, meeting, prepared)
    save(run_dir / f"held_{rank}.npz", dict(_held(program)))
    del program  # before leaving, and why: runtime/process/rank_main.py
    leave()


def _held(program: Program) -> Iterator[tuple[str, NDArray[Any]]]:
    for engine in program.engines:
        with _gathered(engine):
            owners = engine.module.parts if isinstance(engine.module, Segments) else [engine.module]
            for owner in owners:
                if isinstance(owner, SegmentModule):
                    named = [(path, t) for path, t in owner.held() if _is_learned(path, t)]
                else:
                    named = [(model_path(name), t) for name, t in _learned(owner)]
                for path, tensor in named:
                    yield path, tensor.detach().float().numpy().copy()


def _learned(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if _is_learned(name, tensor):
            yield name, tensor


def _is_learned(name: str, tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or name.endswith(_STATISTICS)


def save(path: Path, arrays: Arrays) -> None:
    np.savez(path, allow_pickle=False, **arrays)


def _gathered(engine: Engine) -> AbstractContextManager[Any]:
    """Under ZeRO 3 a parameter is whole only inside this."""
    if isinstance(engine, UnevenEngine):
        for unit in engine.units:
            unit.gather()
    partitioned = [p for p in engine.module.parameters() if hasattr(p, "ds_id")]
    if not partitioned:
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(partitioned)
    return gathered


# --- The plain loop ------------------------------------------------------------------------------


def train_plainly(run_dir: Path, rank: int, world_size: int, prepared: worker.Prepared) -> None:
    """What a user of PyTorch would write for one device, from nothing but the request's words."""
    request = prepared.request
    torch.manual_seed(request.seed)
    model = _model(request)
    random.seed(request.seed)
    np.random.seed(request.seed)
    optimizer, schedule = _optimizer(request, model)
    assert isinstance(request.data, ArraysOptions)
    arrays = dict(np.load(request.data.path))
    samples = len(next(iter(arrays.values())))
    with (run_dir / "metrics.jsonl").open("w") as metrics:
        for step in range(request.train.steps):
            start = step * request.train.global_batch % samples
            rows = slice(start, start + request.train.global_batch)
            batch = {name: torch.from_numpy(array[rows]) for name, array in arrays.items()}
            batch = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
            if request.model.loss == "cross_entropy":
                labels = batch.pop("labels")
                loss = nn.functional.cross_entropy(model(**batch), labels)
            else:
                output = model(**batch)
                loss = output["loss"] if isinstance(output, dict) else output.loss
            loss.backward()  # type: ignore[no-untyped-call]
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            # Not the norm that clipping returns: on a CPU it loses digits of large tensors.
            norm = sqrt(sum(g.double().square().sum().item() for g in gradients))
            if request.train.grad_clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), request.train.grad_clip)
            rate = float(optimizer.param_groups[0]["lr"])
            with torch.compiler.set_stance("force_eager"):  # what torchao compiles for each shape
                optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            line = {"loss": loss.item(), "grad_norm": norm, "lr": rate}
            metrics.write(json.dumps(line) + "\n")
    held = {name: tensor.detach().float().numpy() for name, tensor in _learned(model)}
    save(run_dir / "held_0.npz", held)


def _model(request: Request) -> nn.Module:
    options = request.model
    if options.architecture:
        import transformers

        made = getattr(transformers, options.architecture)
        model: nn.Module
        if options.pretrained:
            model = made.from_pretrained(options.pretrained, dtype=torch.float32)
            if options.adapters is not None:
                import peft

                model = peft.get_peft_model(model, peft.LoraConfig(**options.adapters))
        else:
            model = made(made.config_class(**options.config))
    else:
        module, _, name = options.target.rpartition(".")
        model = getattr(importlib.import_module(module), name)(**options.arguments)
    return model.train()


class _Training(NamedTuple):
    optimizer: "torch.optim.Optimizer | _Several"
    schedule: "torch.optim.lr_scheduler.LRScheduler | _Several"


class _Several:
    """Optimizers, or their schedulers, one after another."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the first."""
        groups: list[dict[str, Any]] = self.parts[0].param_groups
        return groups

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def _of_classes(request: Request, model: nn.Module) -> _Training:
    """An optimizer of each class that the request names, each of the parameters that are its."""
    given = request.optimizer
    held: dict[int, list[dict[str, Any]]] = {}
    for path, parameter in model.named_parameters():
        of = (i for i, group in enumerate(given.groups) if _is_matched(path, group.match))
        number = next(of, None)
        group = None if number is None else given.groups[number]
        options: dict[str, Any] = {"params": [parameter], "lr": given.lr}
        if group is not None:
            options["lr"] *= group.lr_scale
        if group is not None and group.weight_decay is not None:
            options["weight_decay"] = group.weight_decay
        elif group is None and given.no_decay and parameter.dim() < 2:
            options["weight_decay"] = 0.0
        own = -1 if group is None or group.target is None or number is None else number
        held.setdefault(own, []).append(options)
    parts = []
    for own, groups in sorted(held.items()):
        target, arguments = given.target, given.given
        if own >= 0:
            target, arguments = given.groups[own].target, given.groups[own].given
        module, _, name = str(target).rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        parts.append(kind(groups, lr=given.lr, **arguments))
    if given.schedule == "constant":
        return _Training(_Several(parts), _Several([]))
    module, _, name = given.schedule.target.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    schedulers = [kind(part, **given.schedule.given) for part in parts]
    return _Training(_Several(parts), _Several(schedulers))


def _is_matched(path: str, patterns: Sequence[str]) -> bool:
    """As the patterns of tests are: a parameter's name, a module's, or an end after a star."""
    return any(
        path == name or path.startswith(f"{name}.") or (name[0] == "*" and path.endswith(name[1:]))
        for name in patterns
    )


def _groups(given: OptimizerOptions, model: nn.Module) -> list[dict[str, Any]]:
    """Every parameter with its learning rate and its decay, by the patterns that a test writes:
    names of parameters, and names of their ends after a star."""
    groups = []
    for path, parameter in model.named_parameters():
        is_spared = given.no_decay == "norms_and_biases" and parameter.dim() < 2
        rate, decay = given.lr, 0.0 if is_spared else given.weight_decay
        for group in reversed(given.groups):
            for name in group.match:
                if path == name or (name.startswith("*") and path.endswith(name[1:])):
                    rate = given.lr * group.lr_scale
                    decay = given.weight_decay if group.weight_decay is None else group.weight_decay
        groups.append({"params": [parameter], "lr": rate, "weight_decay": decay})
    return groups


def _optimizer(request: Request, model: nn.Module) -> _Training:
    given = request.optimizer
    if given.is_custom:
        return _of_classes(request, model)
    optimizer: torch.optim.Optimizer
    if given.name == "sgd":
        optimizer = torch.optim.SGD(_groups(given, model), given.lr, given.momentum)
    else:
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[given.name]
        optimizer = kind(_groups(given, model), given.lr, given.betas, given.eps)
    if given.schedule == "constant":
        return _Training(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
    assert (given.schedule, given.warmup_steps) == ("cosine", 2)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, request.train.steps - 1 - 2, given.lr * given.final_lr_fraction
    )
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [2])
    return _Training(optimizer, both)
