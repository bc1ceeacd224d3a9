"""LAMB, whose trust ratio is of whole parameters, for parameters of which a rank has a shard.

You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (ICLR 2020,
arXiv 1904.00962), Algorithm 2, with the identity as its phi and Adam's bias correction:

    r = m' / (sqrt(v') + eps) + weight_decay x
    x <- x - lr |x| / |r| r

and a trust ratio |x| / |r| of 1 where either norm is 0, as in the authors' own code.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whale_train.runtime.engines.cpu_norms import norm


@dataclass(frozen=True)
class Shards:
    """Which parameters this rank has only a shard of, and what adds a vector up over the ranks
    that have the others. They all have these parameters in this order."""

    parameters: Sequence[nn.Parameter]
    add_up: Callable[[Tensor], Tensor]


class Lamb(Optimizer):
    """torch's interface; learning rate, betas, eps and weight decay are those of the formula."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        shards: Shards | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, defaults)
        self._shards = shards

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. One all-reduce for all that are sharded."""
        sharded = set(self._shards.parameters) if self._shards else set()
        waiting: dict[nn.Parameter, tuple[Tensor, float]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                direction = self._direction(parameter, group)
                if parameter in sharded:
                    waiting[parameter] = (direction, group["lr"])
                else:
                    ratio = _trust(norm(parameter), norm(direction))
                    parameter.sub_(direction * (group["lr"] * ratio))
        if self._shards is not None and self._shards.parameters:
            self._update_sharded(self._shards, waiting)

    def _update_sharded(
        self, shards: Shards, waiting: dict[nn.Parameter, tuple[Tensor, float]]
    ) -> None:
        """Update parameters with the norms of all their shards; one without a gradient here sends
        zeros, as the sum is the same vector for all."""
        squares = []
        for parameter in shards.parameters:
            held = (parameter, waiting[parameter][0]) if parameter in waiting else ()
            found = [norm(x).double() ** 2 for x in held]
            zero = torch.zeros((), dtype=torch.float64, device=parameter.device)
            squares.append(torch.stack(found or [zero, zero]))
        norms = shards.add_up(torch.stack(squares)).sqrt()
        for parameter, (of_weight, of_direction) in zip(shards.parameters, norms, strict=True):
            if parameter in waiting:
                direction, lr = waiting[parameter]
                parameter.sub_(direction * (lr * _trust(of_weight, of_direction)))

    def _direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Return the direction of an update, r in the paper's formula, with the moments updated."""
        (first, second), eps, decay = group["betas"], group["eps"], group["weight_decay"]
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        gradient = parameter.grad
        assert gradient is not None
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        correction, square = 1 - first ** state["step"], 1 - second ** state["step"]
        denominator = (state["exp_avg_sq"] / square).sqrt_().add_(eps)
        direction: Tensor = (state["exp_avg"] / correction).div_(denominator)
        return direction.add_(parameter, alpha=decay)


def _trust(of_weight: Tensor, of_direction: Tensor) -> Tensor:
    both = (of_weight > 0) & (of_direction > 0)
    return torch.where(both, of_weight / of_direction, torch.ones_like(of_direction))
