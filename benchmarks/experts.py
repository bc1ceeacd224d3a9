"""Compare experts on four hosts: rows are sent to them, or all tokens are gathered by hand.

sudo python benchmarks/experts.py

The hosts are network namespaces of this machine (hosts.py).
"""

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import sides
import torch
from between_hosts import Bench, options_of
from interleave import Side
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from whale_train.models.grouped_product import grouped_mm
from whale_train.models.moe_gpt import Experts, MoEGPT
from whale_train.runtime.comms.layout_collectives import apply_linear_map

LEARNING_RATE = 0.01


def main() -> None:
    parser = options_of(__doc__, hosts=4, gbit=10.0)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=64, help="hidden units of an expert")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="sequences a host")
    options = parser.parse_args()
    bench = Bench(options)
    for top_k in options.top_k:
        with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
            compare(top_k, bench, options, Path(folder))


def compare(top_k: int, bench: Bench, options: argparse.Namespace, folder: Path) -> None:
    """Measure ours and the experts written by hand for one `top_k`, and print the timings."""
    shape = {
        **{"vocab_size": 257, "sequence_length": options.sequence, "width": options.width},
        **{"depth": options.depth, "ffn": options.ffn, "experts": options.experts},
        **{"heads": options.width // 64, "top_k": top_k},
    }
    request, plan = sides.resolved(
        [
            *("model=moe_gpt", *(f"model.{key}={value}" for key, value in shape.items())),
            *("data=text", f"data.sequence_length={options.sequence}", "strategy=experts_dp"),
            "optimizer=sgd",
            *(f"optimizer.lr={LEARNING_RATE}", "optimizer.schedule=constant"),
            *("hardware=cpu", f"hardware.devices={options.hosts}"),
            f"train.global_batch={options.batch * options.hosts}",
        ],
        bench.turns.total_steps,
    )
    batches = sides.all_batches(request, plan, bench.turns.total_steps)
    by_rows = sides.ours("ours, rows sent", request, plan, folder)
    gathered = Side("tokens gathered by hand", partial(by_hand, shape, batches), True)
    words = f"{options.experts} experts of {options.width} x {options.ffn}, top {top_k}, "
    words += f"{options.depth} layers, {options.batch * options.sequence} tokens a host"
    bench.compare(words, [by_rows, gathered], gathered.name)


def by_hand(shape: dict[str, int], batches: Sequence[Sequence[sides.Batch]], rank: int) -> object:
    """Return the side that gathers tokens, on rank `rank`.

    shape: arguments of the model.
    batches: the batches of each rank.
    """
    torch.manual_seed(0)
    model = MoEGPT(**shape)
    for block in model.blocks:
        block.experts = GatheredExperts(block.experts)
    own = {p for m in model.modules() if isinstance(m, GatheredExperts) for p in m.parameters()}
    ignored = [name for name, parameter in model.named_parameters() if parameter in own]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    make = partial(torch.optim.SGD, lr=LEARNING_RATE)
    return sides.DataParallel(model, make, batches[rank])


class GatheredExperts(nn.Module):
    """This rank's part of `experts`, applied to the tokens of all ranks.

    The tokens of all ranks are gathered, together with their experts. The results are summed over
    the ranks, and each rank receives the sums for its own tokens.
    """

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.world, rank = dist.get_world_size(), dist.get_rank()
        self.held = experts.expand.shape[0] // self.world
        self.first = rank * self.held
        own_experts = slice(self.first, self.first + self.held)
        self.expand = nn.Parameter(experts.expand[own_experts].detach().clone())
        self.contract = nn.Parameter(experts.contract[own_experts].detach().clone())
        for parameter in self.parameters():  # each rank's loss is a mean over its own samples
            parameter.register_hook(lambda gradient: gradient / self.world)

    def forward(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the weighted sums of the experts' outputs for this rank's tokens, [tokens, width].

        tokens: hidden states of this rank's tokens, [tokens, width].
        weights: routing weights, [tokens, slots].
        chosen: numbers of the experts, int64 [tokens, slots].
        """
        tokens, weights = (apply_linear_map(x, _gathered, _scattered) for x in (tokens, weights))
        expert = _gathered(chosen).flatten() - self.first
        own_slots = ((expert >= 0) & (expert < self.held)).nonzero().squeeze(1)
        own_slots = own_slots[torch.argsort(expert[own_slots], stable=True)]
        ends = torch.bincount(expert[own_slots], minlength=self.held).cumsum(0).int()
        token = own_slots // chosen.shape[1]
        rows = functional.gelu(grouped_mm(tokens[token], self.expand, ends))
        rows = grouped_mm(rows, self.contract, ends) * weights.flatten()[own_slots].unsqueeze(-1)
        summed = torch.zeros_like(tokens).index_add(0, token, rows)
        return apply_linear_map(summed, _scattered, _gathered)


def _gathered(x: Tensor) -> Tensor:
    """All-gather `x` along dimension 0."""
    gathered = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous())
    return gathered


def _scattered(x: Tensor) -> Tensor:
    """Reduce-scatter `x` along dimension 0: return this rank's part of the sum over the ranks."""
    own = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_tensor(own, x.contiguous())
    return own


if __name__ == "__main__":
    main()
