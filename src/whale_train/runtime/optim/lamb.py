"""LAMB for parameters of which a rank may hold a shard; trust ratios are those of whole parameters.

You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (ICLR 2020,
arXiv 1904.00962), Algorithm 2, with the identity as its phi and Adam's bias correction:

    r = m' / (sqrt(v') + eps) + weight_decay x
    x <- x - lr |x| / |r| r

and a trust ratio |x| / |r| of 1 where either norm is 0, as in the authors' own code.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whale_train.runtime.optim.shard_norms import Shards, in_batches, norms


class Lamb(Optimizer):
    """LAMB with the interface of torch's optimizers.

    `parameters` may be groups, as in torch's optimizers. Learning rate, betas, eps and weight decay
    are those of the formula. `shards` are the sharded parameters (None: all are whole). As in
    torch's fused optimizers, `found_inf` may be set to a scalar on the device: where it is 1, a
    step changes nothing.
    """

    _step_supports_amp_scaling = True  # torch's mark of optimizers that read `found_inf`
    found_inf: Tensor | None = None

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
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
        """Update every parameter that has a gradient.

        One all-reduce serves all sharded parameters together.
        """
        sharded = set(self._shards.parameters) if self._shards else set()
        waiting: dict[nn.Parameter, tuple[Tensor, float]] = {}
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            for batch in in_batches(p for p in held if p not in sharded):
                directions = self._directions(batch, group)
                ratios = _trust(norms(batch), norms(directions))
                self._update(batch, directions, group["lr"] * ratios)
            cut = [p for p in held if p in sharded]
            if cut:
                cut_directions = self._directions(cut, group)
                waiting |= {p: (x, group["lr"]) for p, x in zip(cut, cut_directions, strict=True)}
        if self._shards is not None and self._shards.parameters:
            self._update_sharded(self._shards, waiting)

    def _update_sharded(
        self, shards: Shards, waiting: dict[nn.Parameter, tuple[Tensor, float]]
    ) -> None:
        """Update the sharded parameters, with the norms of whole parameters and whole directions.

        `waiting` maps parameters to their direction and learning rate.
        """
        of_weights, of_directions = shards.norms({p: x for p, (x, _) in waiting.items()})
        ratios = _trust(of_weights, of_directions)
        places = [i for i, p in enumerate(shards.parameters) if p in waiting]
        if places:
            parameters = [shards.parameters[place] for place in places]
            steps = [waiting[p][1] * ratios[i] for p, i in zip(parameters, places, strict=True)]
            self._update(parameters, [waiting[p][0] for p in parameters], torch.stack(steps))

    def _update(
        self, parameters: list[nn.Parameter], directions: list[Tensor], steps: Tensor
    ) -> None:
        """Add `directions` times -`steps` [parameters] to `parameters`; `directions` are
        overwritten."""
        if self.found_inf is not None:
            steps = steps * (1 - self.found_inf)
        torch._foreach_mul_(directions, list(steps.unbind()))
        torch._foreach_add_(list[Tensor](parameters), directions, alpha=-1)

    def _directions(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> list[Tensor]:
        """Update the moments, and return the directions of an update, r in the paper's formula."""
        (first, second), eps, decay = group["betas"], group["eps"], group["weight_decay"]
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        moments, squares, counts = (
            [self.state[p][name] for p in parameters] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        gradients = [p.grad for p in parameters if p.grad is not None]
        counted: Tensor | float = 1.0
        new_first, new_second = 1 - first, 1 - second
        if self.found_inf is not None:
            for gradient in gradients:  # otherwise 0 times infinity would be NaN
                gradient.nan_to_num_(0.0, 0.0, 0.0)
            counted = 1 - self.found_inf
            new_first, new_second = new_first * counted, new_second * counted
        torch._foreach_add_(counts, counted)
        torch._foreach_mul_(moments, 1 - new_first)
        torch._foreach_add_(moments, torch._foreach_mul(gradients, new_first))
        torch._foreach_mul_(squares, 1 - new_second)
        added = torch._foreach_mul(gradients, gradients)
        torch._foreach_mul_(added, new_second)
        torch._foreach_add_(squares, added)
        del added
        # Counts are at least 1; otherwise a first step that is skipped would divide by 0.
        counts = list(torch._foreach_clamp_min(counts, 1.0))
        bias, square_bias = (
            torch._foreach_add(torch._foreach_neg(torch._foreach_pow(beta, counts)), 1.0)
            for beta in (first, second)
        )
        denominators = torch._foreach_div(squares, square_bias)
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, eps)
        directions = list(torch._foreach_div(moments, bias))
        torch._foreach_div_(directions, denominators)
        if decay:
            torch._foreach_add_(directions, list[Tensor](parameters), alpha=decay)
        return directions


def _trust(of_weight: Tensor, of_direction: Tensor) -> Tensor:
    """Return the trust ratios |x| / |r|, or 1 where either norm is 0; all are [parameters]."""
    both = (of_weight > 0) & (of_direction > 0)
    return torch.where(both, of_weight / of_direction, torch.ones_like(of_direction))
