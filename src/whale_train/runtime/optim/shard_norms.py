"""The norms that trust ratios are made of, of whole parameters of which a rank may hold a shard."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from whale_train.runtime.optim.cpu_norms import norm
from whale_train.strategies.memory.engine_memory import REDUCE_BUCKET_ELEMENTS


@dataclass(frozen=True)
class Shards:
    """The sharded parameters of an optimizer, and the sum over the ranks that hold their other
    shards.

    parameters: parameters of which this rank has one shard; the same, in the same order, on all
        these ranks.
    add_up: sums a vector over these ranks.
    """

    parameters: Sequence[nn.Parameter]
    add_up: Callable[[Tensor], Tensor]

    def norms(self, beside: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """Return the norms of whole parameters and of whole tensors beside them, fp32 [2,
        parameters].

        beside: for some of the sharded parameters, this rank's shard of a tensor of their shape.
            The others are zeros there, whose two norms are 0, because all ranks must sum one
            vector.

        One all-reduce serves all sharded parameters together.
        """
        squares = torch.zeros(
            (2, len(self.parameters)), dtype=torch.float64, device=self.parameters[0].device
        )
        places = [i for i, p in enumerate(self.parameters) if p in beside]
        if places:
            held = [self.parameters[place] for place in places]
            both = torch.stack([norms(held), norms([beside[p] for p in held])]).double()
            for place, of_both in zip(places, both.unbind(1), strict=True):
                squares[:, place] = of_both**2
        return self.add_up(squares).sqrt().float()


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norms of tensors, fp32 [tensors]."""
    if tensors[0].device.type == "cpu":
        return torch.stack([norm(x).float() for x in tensors])
    return torch.stack(torch._foreach_norm(list(tensors)))


def in_batches(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield `parameters` in lists of at most as many elements as a gradient bucket.

    This keeps the temporaries of an update small. A larger parameter is alone in its list.
    """
    batch: list[nn.Parameter] = []
    filled = 0
    for parameter in parameters:
        if batch and filled + parameter.numel() > REDUCE_BUCKET_ELEMENTS:
            yield batch
            batch, filled = [], 0
        batch.append(parameter)
        filled += parameter.numel()
    if batch:
        yield batch
