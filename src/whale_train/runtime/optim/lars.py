"""LARS for parameters of which a rank may hold a shard; trust ratios are those of whole parameters.

You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (arXiv 1708.03888),
Algorithm 1, with an eps in the divisor:

    ratio = trust_coefficient |x| / (|g| + weight_decay |x| + eps)
    v <- momentum v + lr ratio (g + weight_decay x)
    x <- x - v

The learning rate is within the momentum, as in the paper: a change of the rate does not rescale
what earlier steps left in v. A ratio is 1 where either norm is 0, and for the parameters of a group
without `trust_ratio`. The norms are those of fp32 weights and of gradients without a loss scale,
whatever the precision of forwards: engines update fp32 weights by fp32 gradients (Jia et al. 2018,
arXiv 1807.11205, section 3.1, on the ratios of fp16 weights and gradients).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whale_train.runtime.optim.shard_norms import Shards, in_batches, norms


class Lars(Optimizer):
    """LARS with the interface of torch's optimizers.

    `parameters` may be groups, as in torch's optimizers; a group may have a `trust_ratio` of False.
    The other arguments are those of the formula. `shards` are the sharded parameters (None: all are
    whole). As in torch's fused optimizers, `found_inf` may be set to a scalar on the device: where
    it is 1, a step changes nothing.
    """

    _step_supports_amp_scaling = True  # torch's mark of optimizers that read `found_inf`
    found_inf: Tensor | None = None

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        shards: Shards | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "trust_ratio": True,
        }
        super().__init__(parameters, defaults)
        self._shards = shards

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        One all-reduce serves all sharded parameters together.
        """
        held = {
            p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        }
        if self.found_inf is not None:
            for gradient in held.values():  # otherwise 0 times infinity would be NaN
                gradient.nan_to_num_(0.0, 0.0, 0.0)
        of_shards = self._norms_of_shards(held)
        for group in self.param_groups:
            own = [p for p in group["params"] if p in held]
            for batch in in_batches(p for p in own if p not in of_shards):
                gradients = [held[p] for p in batch]
                both = torch.stack([norms(batch), norms(gradients)])
                self._update(batch, gradients, both, group)
            for batch in in_batches(p for p in own if p in of_shards):
                both = torch.stack([of_shards[p] for p in batch], 1)
                self._update(batch, [held[p] for p in batch], both, group)

    def _norms_of_shards(self, held: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Return the norms [2] of each whole sharded parameter and of its whole gradient."""
        if self._shards is None or not self._shards.parameters:
            return {}
        both = self._shards.norms(held)
        return dict(zip(self._shards.parameters, both.unbind(1), strict=True))

    def _update(
        self,
        parameters: list[nn.Parameter],
        gradients: list[Tensor],
        both: Tensor,
        group: dict[str, Any],
    ) -> None:
        """Update the momentum and then `parameters` of `group`.

        both: the norms of the parameters and of `gradients` [2, parameters].
        """
        momentum, decay = group["momentum"], group["weight_decay"]
        rates = group["lr"] * _ratios(both, group)
        remaining: Tensor | float = momentum
        taken = torch.ones((), device=rates.device)
        if self.found_inf is not None:
            taken = 1 - self.found_inf.to(rates.device)
            rates, remaining = rates * taken, 1 - (1 - momentum) * taken
        weights = list[Tensor](parameters)
        moves = list(torch._foreach_mul(gradients, list(rates.unbind())))
        if decay:
            torch._foreach_add_(moves, torch._foreach_mul(weights, list((rates * decay).unbind())))
        if momentum:
            velocities = []
            for parameter in parameters:
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                velocities.append(state["momentum_buffer"])
            torch._foreach_mul_(velocities, remaining)
            torch._foreach_add_(velocities, moves)
            moves = velocities
        if self.found_inf is not None and momentum:
            moves = list(torch._foreach_mul(velocities, taken))
        torch._foreach_add_(weights, moves, alpha=-1)


def _ratios(both: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the trust ratios [parameters] of parameters of `group`, from the norms of the
    parameters and of their gradients [2, parameters]."""
    of_weights, of_gradients = both
    ones = torch.ones_like(of_weights)
    if not group["trust_ratio"]:
        return ones
    divisors = of_gradients + group["weight_decay"] * of_weights + group["eps"]
    known = (of_weights > 0) & (of_gradients > 0)
    return torch.where(known, group["trust_coefficient"] * of_weights / divisors, ones)
