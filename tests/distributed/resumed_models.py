"""A model that is trained, changed and gone on with, and checkpoints that no run has written."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whale_train.checkpoints.checkpoint_files import MANIFEST, Manifest, folder_of
from whale_train.checkpoints.safetensors_files import Block
from whale_train.config import Request, read_request
from whale_train.launcher.compose.command_line import composed, rewritten
from whale_train.launcher.going_on import GoingOn
from whale_train.launcher.planning.plan_request import Resolved, resolve_request
from whale_train.launcher.resume import find_checkpoint, go_on, phase_of, refuse_unlike
from whale_train.models.export.export import model_on_meta
from whale_train.models.loss_module import LossModule
from whale_train.models.weights.kept_tensors import kept_tensors, saved_names
from whale_train.runtime.state.held import LocalBlock
from whale_train.runtime.state.parts import write_blocks
from whale_train.runtime.state.tensor_files import record_json, record_text

STEP = 4


class Net(nn.Module):
    """Two layers, of which the first may be `frozen`, in a `middle` of some more; `counts` gives it
    a buffer of that dtype, `tied` the second layer the middle's weight."""

    def __init__(
        self,
        frozen: bool = False,
        middle: int = 0,
        counts: str | None = None,
        tied: bool = False,
        width: int = 6,
        head: str = "b",
    ) -> None:
        super().__init__()
        self.a = nn.Linear(4, width)
        self.middle = nn.Sequential(*(nn.Linear(width, width) for _ in range(middle)))
        self.head = head
        setattr(self, head, nn.Linear(width, 3))
        self.a.requires_grad_(not frozen)
        if tied:
            self.middle[1].weight = self.middle[0].weight
        if counts is not None:
            self.register_buffer("counts", torch.ones(3, dtype=getattr(torch, counts)))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = getattr(self, self.head)(self.middle(torch.tanh(self.a(x))))
        return logits


@dataclass(frozen=True)
class Side:
    """A request, and what was resolved of it."""

    request: Request
    resolved: Resolved


def side_of(*overrides: str) -> Side:
    """Resolve a request of `Net`, as a run does that saves."""
    wanted = (
        *("model._target_=tests.distributed.resumed_models.Net", "model.loss=cross_entropy"),
        *("data=arrays", "hardware=cpu", "hardware.devices=2", "strategy=dp", "train.steps=8"),
        *("train.global_batch=8", "checkpoint.every=4"),
    )
    request = read_request(composed(rewritten([*wanted, *overrides])), {})
    return Side(request, resolve_request(request))


def write_checkpoint(
    run_dir: Path,
    side: Side,
    state: Mapping[str, Any] | None = None,
    counts: Mapping[str, float] | None = None,
) -> Path:
    """Write a checkpoint as two ranks of `side` do after STEP steps; `state` is added to what its
    `state.json` says, and `counts` are the numbers of updates of parameters that had others."""
    path = folder_of(run_dir, STEP)
    files = []
    for rank in range(2):
        files += write_blocks(path, _halves(_blocks(side, counts or {}), rank), rank)
    data = side.resolved.data
    said: dict[str, Any] = {"step": STEP, "samples": 8 * STEP, "loss_scale": None}
    said |= {"num_samples": side.resolved.num_samples, "data": data and data.to_plain()}
    files.append(record_json(path, "state.json", said | dict(state or {})))
    files.append(record_text(path, "plan.json", side.resolved.plan.to_json()))
    files.append(record_text(path, "request.json", side.request.to_json()))
    (path / MANIFEST).write_text(Manifest(STEP, 0.1, tuple(files)).to_json())
    return path


def _blocks(side: Side, counts: Mapping[str, float]) -> list[LocalBlock]:
    """Return all of the tensors of a side, each as one block."""
    options = side.request.model
    module = LossModule(model_on_meta(options), options)
    names = saved_names(module, options)
    tensors: list[tuple[Any, str, Tensor]] = [
        ("model", name, torch.zeros(x.shape, dtype=x.dtype))
        for name, x in kept_tensors(module).items()
        if name in names
    ]
    trained = {name for graph in side.resolved.plan.task_graphs for name in graph.trained}
    for name, x in kept_tensors(module).items():
        if name in trained:
            for slot in ("exp_avg", "exp_avg_sq"):
                tensors.append(("optimizer", f"state.{name}.{slot}", torch.zeros(x.shape)))
            tensors.append(
                ("optimizer", f"state.{name}.step", torch.tensor(counts.get(name, float(STEP))))
            )
    return [
        LocalBlock(folder, name, Block((0,) * x.dim(), tuple(x.shape)), x, True)
        for folder, name, x in tensors
    ]


def _halves(blocks: Sequence[LocalBlock], rank: int) -> list[LocalBlock]:
    """Return the half of every tensor that a rank of two saves; of a scalar, all is rank 0's."""
    found = []
    for whole in blocks:
        if not whole.block.shape:
            found += [whole] if rank == 0 else []
            continue
        middle = (whole.block.shape[0] + 1) // 2
        start, stop = (0, middle) if rank == 0 else (middle, whole.block.shape[0])
        part = whole.tensor[start:stop]
        if part.numel():
            offsets = (start, *whole.block.offsets[1:])
            block = Block(offsets, tuple(part.shape))
            found.append(LocalBlock(whole.folder, whole.name, block, part, True))
    return found


def gone_on(path: Path, side: Side) -> GoingOn:
    """Return how a side goes on from a checkpoint, by all that a run asks of it before it starts.
    Raises RequestError where it does not."""
    train = side.request.train.model_copy(update={"resume": str(path)})
    request = side.request.model_copy(update={"train": train})
    found = find_checkpoint(str(path), path.parent)
    assert found is not None
    refuse_unlike(found, phase_of(request, found))
    resolved = side.resolved
    return go_on(found, request, resolved.plan, resolved.num_samples, resolved.data)


def listing(path: Path) -> list[str]:
    """Return the files that a manifest has."""
    return [file["path"] for file in json.loads((path / MANIFEST).read_text())["files"]]
