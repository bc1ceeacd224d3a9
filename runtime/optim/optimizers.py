"""The optimizer an engine updates whole parameters with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

from whale_train.runtime.base.copies import Copies
from whale_train.runtime.optim.lamb import Lamb, Shards


class MakeOptimizer(Protocol):
    def __call__(self, parameters: list[nn.Parameter], copies: Copies | None = None) -> Optimizer:
        """Return the optimizer of `parameters`, of which this rank has what `copies` says."""


def make_optimizer(name: str, options: dict[str, Any]) -> MakeOptimizer:
    """torch's optimizer of that name, or LAMB, as the plan's config would have it."""
    kinds: dict[str, Callable[..., Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }

    def make(parameters: list[nn.Parameter], copies: Copies | None = None) -> Optimizer:
        if name == "lamb":
            return Lamb(parameters, **options, shards=_shards(parameters, copies))
        return kinds[name](parameters, **options)

    return make


def _shards(parameters: list[nn.Parameter], copies: Copies | None) -> Shards | None:
    """Return the shards of `parameters` that this rank has (None: all are whole)."""
    if copies is None or copies.shard_group is None:
        return None
    group = copies.shard_group

    def add_up(vector: Tensor) -> Tensor:
        dist.all_reduce(vector, group=group)
        return vector

    return Shards([p for p in parameters if p in copies.sharded], add_up)


def state_of(optimizer: Optimizer, parameter: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the moments that `optimizer` keeps of `parameter`, by name, and the dictionary that
    has them, in which "step" counts updates where the optimizer counts any. What the first update
    would make is made."""
    kept = optimizer.state[parameter]
    for name in _moments(optimizer):
        if kept.get(name) is None:
            kept[name] = torch.zeros_like(parameter)
    if not isinstance(optimizer, torch.optim.SGD) and "step" not in kept:
        kept["step"] = 0
        if isinstance(optimizer, torch.optim.Adam | Lamb):  # AdamW is an Adam
            # As they make it: on the device where a kernel reads it there.
            reads = isinstance(optimizer, Lamb) or optimizer.defaults["fused"]
            device = parameter.device if reads else torch.device("cpu")
            kept["step"] = torch.zeros((), dtype=torch.float32, device=device)
    return {name: kept[name] for name in _moments(optimizer)}, kept


def makes_late(optimizer: Optimizer) -> bool:
    """Return whether the moments that `optimizer` makes in a first step that is skipped would not
    be filled, and so are to be made before (torch 2.13: those of a fused SGD)."""
    return isinstance(optimizer, torch.optim.SGD)


@contextmanager
def skipping(optimizer: Optimizer, found_inf: Tensor | None) -> Iterator[bool]:
    """Around a step that changes nothing where the scalar `found_inf` is 1 (None: it never is).
    Gives whether to take it: kernels that know such steps are told, by others it is left out, for
    which the host reads the number."""
    if found_inf is None:
        yield True
    elif getattr(optimizer, "_step_supports_amp_scaling", False):  # torch's word for them
        if makes_late(optimizer):
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter.grad is not None:
                    state_of(optimizer, parameter)
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        try:
            yield True
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
    else:
        yield not bool(found_inf)


def _moments(optimizer: Optimizer) -> tuple[str, ...]:
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if optimizer.defaults["momentum"] else ()
    return ("exp_avg", "exp_avg_sq")
