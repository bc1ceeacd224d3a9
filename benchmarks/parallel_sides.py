"""Define the sides by hand for benchmarks/parallel.py: a Llama parallelised with torch alone.

Each side is what a careful user would write for this one model: on one process, split by DTensor's
`parallelize_module`, or cut into stages for `torch.distributed.pipelining`. All sides take tensors
as batches that are ready, and every rank gets the whole global batch.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from sides import Batch, MakeOptimizer, train_by_hand
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from transformers import LlamaForCausalLM

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class OneProcess:
    """A side with the whole model on rank 0, with `threads` threads. Other ranks do nothing."""

    def __init__(
        self, model: nn.Module, make: MakeOptimizer, batches: Sequence[Batch], threads: int
    ) -> None:
        self.model = model if dist.get_rank() == 0 else None
        self.batches = batches
        self.last = torch.zeros(())
        if self.model is not None:
            torch.set_num_threads(threads)
            self.optimizer = make(model.parameters())

    def step(self, number: int, grad_norm: bool) -> None:
        if self.model is None:
            return
        batch = self.batches[number % len(self.batches)]
        self.last = train_by_hand(self.model, self.optimizer, batch, grad_norm)

    def loss(self) -> float:
        last = self.last.clone()
        dist.broadcast(last, 0)
        return float(last)


class DTensorSplit:
    """A side with DTensor's tensor parallelism, as in torch's tutorial for Llama.

    The query, key, value, gate and up projections are split by columns, the output and down
    projections by rows, and the embedding by rows of the table. With `sharded_loss`, logits stay
    sharded by class, and `loss_parallel` computes the loss. Without it, logits are gathered, as in
    the tutorial's first version.
    https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        make: MakeOptimizer,
        batches: Sequence[Batch],
        sharded_loss: bool,
    ) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if sharded_loss:
            head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        else:
            head = ColwiseParallel(output_layouts=Replicate())
        plan: dict[str, Any] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": head,
        }
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            plan[f"model.layers.*.{name}"] = ColwiseParallel()
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.*.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.*.{name}"] = RowwiseParallel()
        parallelize_module(model, mesh, plan)
        self.model, self.batches = model, batches
        sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
        unsharded = [p for p in model.parameters() if not isinstance(p, DTensor)]
        # A fused optimizer does not accept DTensors and other tensors in one group.
        self.optimizer = make([{"params": sharded}, {"params": unsharded}])
        self.loss_context = loss_parallel if sharded_loss else nullcontext
        self.last = torch.zeros(())

    def step(self, number: int, grad_norm: bool) -> None:
        batch = self.batches[number % len(self.batches)]
        with self.loss_context():
            loss: Tensor = self.model(**batch).loss
            loss.backward()  # type: ignore[no-untyped-call]
        if grad_norm:
            self._norm()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.last = _local(loss.detach())

    def _norm(self) -> float:
        """Return the norm of all gradients, with one all-reduce over the sharded ones. The
        gradients of norm weights are whole on every rank."""
        sharded: list[Tensor] = []
        unsharded: list[Tensor] = []
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                kind = sharded if isinstance(parameter.grad, DTensor) else unsharded
                kind.append(_local(parameter.grad))
        square = nn.utils.get_total_norm(sharded) ** 2
        dist.all_reduce(square)
        return float((square + nn.utils.get_total_norm(unsharded) ** 2).sqrt())

    def loss(self) -> float:
        return float(self.last)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Pipelined:
    """A side with `torch.distributed.pipelining`, on a model that is cut by hand.

    Rank s runs the layers from `cuts[s]` to before `cuts[s + 1]`. The first rank has the embedding,
    and the last rank the final norm, the head and the loss.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        make: MakeOptimizer,
        batches: Sequence[Batch],
        cuts: Sequence[int],
        schedule: str,
        micro_batches: int,
    ) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.batches, self.is_first, self.is_last = batches, rank == 0, rank == ranks - 1
        module = LlamaStage(model, cuts[rank], cuts[rank + 1], self.is_first, self.is_last)
        stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
        self.schedule = SCHEDULES[schedule](stage, micro_batches, loss_fn=next_token_loss)
        self.parameters = list(module.parameters())
        self.optimizer = make(self.parameters)
        self.last = torch.zeros(())

    def step(self, number: int, grad_norm: bool) -> None:
        batch = self.batches[number % len(self.batches)]
        losses: list[Tensor] = []
        inputs = (batch["input_ids"],) if self.is_first else ()
        if self.is_last:
            self.schedule.step(*inputs, target=batch["labels"], losses=losses)
        else:
            self.schedule.step(*inputs)
        if grad_norm:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            square = nn.utils.get_total_norm(gradients) ** 2
            dist.all_reduce(square)
            float(square.sqrt())
        self.optimizer.step()
        self.optimizer.zero_grad()
        if losses:
            self.last = torch.stack(losses).mean().detach()

    def loss(self) -> float:
        last = self.last.clone()
        dist.broadcast(last, dist.get_world_size() - 1)
        return float(last)


class LlamaStage(nn.Module):
    """The layers `start` to before `stop` of a Llama, as one stage of a pipeline."""

    def __init__(
        self, model: LlamaForCausalLM, start: int, stop: int, is_first: bool, is_last: bool
    ) -> None:
        super().__init__()
        self.embedding = model.model.embed_tokens if is_first else None
        self.layers = model.model.layers[start:stop]
        self.rotary = model.model.rotary_emb
        self.norm = model.model.norm if is_last else None
        self.head = model.lm_head if is_last else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states [samples, sequence, width], or on the last stage logits [samples,
        sequence, vocabulary].

        hidden: tokens [samples, sequence] on the first stage, hidden states on any other.
        """
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        rotary = self.rotary(hidden, position_ids=positions)
        for layer in self.layers:
            # Without a mask, attention is causal, as in the whole model.
            hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.norm(hidden))
        return hidden


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of LlamaForCausalLM, a scalar.

    logits: [samples, sequence, vocabulary].
    labels: int64 [samples, sequence].
    """
    following = functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return functional.cross_entropy(logits.float().flatten(0, 1), following.flatten())
