"""Define the side by hand of benchmarks/context.py: torch's own ring attention, on a Llama.

torch's public `context_parallel` has no CPU kernel (findings/torch_context_parallel_has_no_cpu.sh).
So this side calls what is below it: the ring with load balance of
torch.distributed.tensor.experimental, with the CPU kernel for attention to a block. The rest is as
in its tutorial: inputs, labels and position ids in zigzag order, and DistributedDataParallel.
"""

from collections.abc import Sequence
from typing import Any

import torch
from sides import Batch, MakeOptimizer
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface, LlamaForCausalLM

aten = torch.ops.aten


class _Ring(torch.autograd.Function):
    """torch's ring of the world with the CPU kernel, causal, in zigzag order."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, sums, *_ = ring._templated_ring_attention(
            dist.group.WORLD,
            2,
            aten._scaled_dot_product_flash_attention_for_cpu,
            query,
            key,
            value,
            is_causal=True,
        )
        ctx.save_for_backward(query, key, value, out, sums)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, out, sums = ctx.saved_tensors
        return ring._templated_ring_attention_backward(
            dist.group.WORLD, 2, _block_gradients, grads[0], "grad_out", query, key, value, out,
            sums, is_causal=True,
        )[:3]  # fmt: skip


def _block_gradients(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool,
    grad_out: Tensor,
) -> Any:  # fmt: skip
    """Call the CPU kernel's backward with the argument names of torch's ring."""
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal
    )


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Attend as a model of transformers asks for it, in the ring."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    result: Tensor = _Ring.apply(query, key, value)  # type: ignore[no-untyped-call]
    return result.transpose(1, 2).contiguous(), None


class TorchRing:
    """A side with torch's ring attention; every rank gets the whole global batch."""

    def __init__(
        self, model: LlamaForCausalLM, make: MakeOptimizer, batches: Sequence[Batch]
    ) -> None:
        AttentionInterface.register("torch_ring", _attention)
        model.set_attn_implementation("torch_ring")
        self.copies = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = make(model.parameters())
        rank, size = dist.get_rank(), dist.get_world_size()
        self.batches = []
        for batch in batches:
            tokens, labels = (
                batch["input_ids"],
                functional.pad(batch["labels"][:, 1:], (0, 1), value=-100),
            )
            chunks = torch.arange(tokens.shape[1]).chunk(2 * size)
            own = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
            count = int((labels != -100).sum())
            self.batches.append((tokens[:, own], labels[:, own], own[None], count))
        self.last = torch.zeros(())

    def step(self, number: int, grad_norm: bool) -> None:
        tokens, labels, positions, count = self.batches[number % len(self.batches)]
        logits = self.copies(input_ids=tokens, position_ids=positions).logits
        total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (total / count * dist.get_world_size()).backward()  # copies are averaged
        if grad_norm:
            gradients = [p.grad for p in self.copies.parameters() if p.grad is not None]
            float(nn.utils.get_total_norm(gradients))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.last = total.detach() / count

    def loss(self) -> float:
        last = self.last.clone()
        dist.all_reduce(last)
        return float(last)
