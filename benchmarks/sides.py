"""Define the sides that benchmarks compare: ours as in a rank of a run, and loops by hand.

The loops by hand are what a careful user of torch or DeepSpeed would write for exactly one model.
They take tensors as batches that are ready, while ours reads the data.
"""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from interleave import Side
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from whale_train.config import Request, read_request
from whale_train.data.evaluation_sets import open_data
from whale_train.launcher.compose.command_line import composed, rewritten
from whale_train.launcher.planning.plan_request import resolve_request
from whale_train.models.class_head import ClassHead
from whale_train.runtime.assembly.build_program import assemble
from whale_train.runtime.base.trace import Trace
from whale_train.runtime.comms.process_groups import make_channels, make_groups
from whale_train.runtime.compile.compiler import Compiler
from whale_train.runtime.engines.rank_context import RankContext
from whale_train.runtime.process import rank_main as worker
from whale_train.runtime.record.metrics import Metrics
from whale_train.runtime.train.batches import RankBatches
from whale_train.runtime.train.loop import Loop
from whale_train.strategies.plan.plan import Plan

CPU = torch.device("cpu")
Batch = dict[str, Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class Ours:
    """A rank of ours whose training loop is run step by step, set up as by
    runtime/process/rank_main.py.

    run_dir: the run directory.
    plan: the plan.
    prepared: the model and the data, as a host prepares them.
    rank: the rank.
    trace: records the instructions of the rank; None records nothing.
    """

    def __init__(
        self,
        run_dir: Path,
        plan: Plan,
        prepared: worker.Prepared,
        rank: int,
        trace: Trace | None = None,
    ) -> None:
        request = prepared.request
        compiler = Compiler() if request.train.compile else None
        groups, channels = make_groups(plan, rank), make_channels(plan, rank, CPU)
        seat = RankContext(rank, CPU, groups, channels, compiler=compiler)
        torch.manual_seed(request.seed + 1_000_003 * (rank + 1))
        program = assemble(request, plan, prepared.module, prepared.graph, seat)
        batches = RankBatches(request, plan, prepared.data, rank, CPU)
        metrics = Metrics(run_dir, CPU) if rank == 0 else None
        # Two loops over one program: without the gradient norm, and with it.
        self._loops = []
        for grad_norm in (False, True):
            train = request.train.model_copy(update={"grad_norm": grad_norm})
            changed = request.model_copy(update={"train": train})
            self._loops.append(Loop(changed, plan, program, batches, metrics, trace))
        self._last = self._loops[0]

    def step(self, number: int, grad_norm: bool) -> None:
        self._last = self._loops[grad_norm]
        self._last.step(number)

    def loss(self) -> float:
        self._last.settle()
        shared_loss = [self._last.final_loss]
        dist.broadcast_object_list(shared_loss)
        assert shared_loss[0] is not None
        return shared_loss[0]


def resolved(overrides: Sequence[str], steps: int) -> tuple[Request, Plan]:
    """Return the request and the plan of the command `whale-train OVERRIDES train.steps=STEPS`."""
    arguments = [*overrides, f"train.steps={steps}"]
    choices = (text.split("=", 1) for text in overrides)
    names = {key: value for key, value in choices if "." not in key}
    request = read_request(composed(rewritten(arguments)), names)
    return request, resolve_request(request).plan


def ours(name: str, request: Request, plan: Plan, folder: Path) -> Side:
    """Return our side, with a run directory in `folder`.

    The model and the data are prepared in this process, so that forked ranks inherit them, as they
    do from a host.
    """
    run_dir = Path(tempfile.mkdtemp(dir=folder))
    return Side(name, partial(Ours, run_dir, plan, worker.prepare(request)), huge_pages=True)


def all_batches(request: Request, plan: Plan, count: int) -> list[list[Batch]]:
    """Return the first `count` batches of every rank, as our side reads them.

    The plan must give each rank its part of a global batch as one micro-batch.
    """
    data = open_data(request.data)
    sources = [RankBatches(request, plan, data, rank, CPU) for rank in range(plan.world_size)]
    rank_batches: list[list[Batch]] = [[] for _ in sources]
    for source, batches in zip(sources, rank_batches, strict=True):
        for step in range(count):
            (batch,) = source.training(step)
            batches.append(batch)
        source.close()
    return rank_batches


def train_by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, grad_norm: bool
) -> Tensor:
    """Run a step as in any tutorial, and return the loss, a scalar tensor.

    grad_norm: whether to compute the gradient norm as well.
    """
    loss: Tensor = model(**batch).loss
    loss.backward()  # type: ignore[no-untyped-call]
    if grad_norm:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        float(nn.utils.get_total_norm(gradients))
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class DataParallel:
    """A side by hand with torch's DistributedDataParallel."""

    def __init__(self, model: nn.Module, make: MakeOptimizer, batches: Sequence[Batch]) -> None:
        self.batches = batches
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = make(model.parameters())
        self.last = torch.zeros(())

    def step(self, number: int, grad_norm: bool) -> None:
        batch = self.batches[number % len(self.batches)]
        self.last = train_by_hand(self.model, self.optimizer, batch, grad_norm)

    def loss(self) -> float:
        return float(self.last)


class DeepSpeedZero:
    """A side by hand with DeepSpeed ZeRO and an optimizer of torch.

    Clipping is turned off, since DeepSpeed clips to 1.0 by default. DeepSpeed computes the gradient
    norm in any case.

    options: DeepSpeed's options of `zero_optimization`.
    """

    def __init__(
        self,
        model: nn.Module,
        make: MakeOptimizer,
        batches: Sequence[Batch],
        options: dict[str, Any],
    ) -> None:
        import deepspeed

        self.batches = batches
        config = {
            "train_micro_batch_size_per_gpu": len(next(iter(batches[0].values()))),
            "gradient_clipping": 0.0,
            "zero_optimization": options,
        }
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=make(model.parameters()), config=config
        )
        self.last = torch.zeros(())

    def step(self, number: int, grad_norm: bool) -> None:
        loss: Tensor = self.engine(**self.batches[number % len(self.batches)]).loss
        self.engine.backward(loss)
        self.engine.step()
        if grad_norm:
            float(self.engine.get_global_grad_norm())
        self.last = loss.detach()

    def loss(self) -> float:
        return float(self.last)


class SplitHead:
    """A side by hand for a `ClassHead`, with the classes split and the backbone on every rank.

    The classes are split into equal parts. Features are all-gathered, each rank computes the logits
    of its classes for the whole batch, and the softmax needs two small all-reduces. The backbone's
    gradients are all-reduced in one buffer while the head is updated.
    """

    def __init__(self, model: ClassHead, make: MakeOptimizer, batches: Sequence[Batch]) -> None:
        self.batches = batches
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.backbone = model.backbone
        classes = len(model.head.weight) // ranks
        self.first = rank * classes
        rows = slice(self.first, self.first + classes)
        self.weight = nn.Parameter(model.head.weight.detach()[rows].clone())
        self.bias = nn.Parameter(model.head.bias.detach()[rows].clone())
        parameters = list(self.backbone.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        # Every gradient of the backbone is a view of one buffer, so that one all-reduce is enough.
        self.gradients = torch.zeros(sum(sizes))
        for parameter, part in zip(parameters, torch.split(self.gradients, sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        self.backbone_optimizer = make(parameters)
        self.head_optimizer = make([self.weight, self.bias])
        self.last = torch.zeros(())

    def step(self, number: int, grad_norm: bool) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        batch = self.batches[number % len(self.batches)]
        features = self.backbone(batch["features"])
        gathered = features.new_empty(ranks * len(features), features.shape[1])
        dist.all_gather_into_tensor(gathered, features.detach())
        labels = batch["labels"].new_empty(len(gathered))
        dist.all_gather_into_tensor(labels, batch["labels"])
        logits = functional.linear(gathered.requires_grad_(), self.weight, self.bias)
        loss: Tensor = SplitSoftmax.apply(logits, labels, self.first)  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]
        assert gathered.grad is not None
        assert self.weight.grad is not None
        assert self.bias.grad is not None
        dist.all_reduce(gathered.grad)
        features.backward(gathered.grad.chunk(ranks)[rank])
        work = dist.all_reduce(self.gradients, async_op=True)
        if grad_norm:
            square = nn.utils.get_total_norm([self.weight.grad, self.bias.grad]) ** 2
            dist.all_reduce(square)
            work.wait()
            float((square + self.gradients.square().sum()).sqrt())
        self.head_optimizer.step()
        self.head_optimizer.zero_grad()
        work.wait()
        self.backbone_optimizer.step()
        self.gradients.zero_()
        self.last = loss.detach()

    def loss(self) -> float:
        return float(self.last)


class SplitSoftmax(torch.autograd.Function):
    """Mean softmax cross-entropy of logits that are split by class over all ranks.

    logits: the logits of this rank's classes, [batch, classes of a rank].
    labels: the labels, int64 [batch].
    first: number of this rank's first class.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int) -> Tensor:
        column = labels - first
        is_own = (column >= 0) & (column < logits.shape[1])
        column = column.clamp(0, logits.shape[1] - 1)
        highest = logits.amax(1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        logits = logits - highest.unsqueeze(1)
        label = logits.gather(1, column.unsqueeze(1)).squeeze(1) * is_own
        exponentials = logits.exp_()
        sums = torch.stack([exponentials.sum(1), label])
        dist.all_reduce(sums)
        ctx.save_for_backward(exponentials, sums[0], column, is_own)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        exponentials, total, column, is_own = ctx.saved_tensors
        rows = len(total)
        exponentials.mul_((grad / (total * rows)).unsqueeze(1))
        exponentials[torch.arange(rows), column] -= is_own * (grad / rows)
        return exponentials, None, None
