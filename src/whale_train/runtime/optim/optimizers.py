"""Make the optimizers with which engines update whole parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

from whale_train.optimizers.classes import load_optimizer
from whale_train.optimizers.state_forms import flattened
from whale_train.optimizers.together import NUMBER, Together
from whale_train.runtime.base.copies import Copies
from whale_train.runtime.optim.lamb import Lamb
from whale_train.runtime.optim.lars import Lars
from whale_train.runtime.optim.shard_norms import Shards
from whale_train.strategies.plan.optimizer_classes import OptimizerClass
from whale_train.strategies.plan.plan import PlannedParameterGroup


class MakeOptimizer(Protocol):
    """A function that makes the optimizer of some parameters."""

    def __call__(self, parameters: list[nn.Parameter], copies: Copies | None = None) -> Optimizer:
        """Return the optimizer of `parameters`; `copies` lists those that are shards (None: all are
        whole)."""


def options_of(
    groups: Sequence[PlannedParameterGroup], by_path: Mapping[str, Tensor]
) -> dict[Tensor, dict[str, float]]:
    """Return the own options of the parameters of `groups`, as entries of optimizer groups.

    by_path: tensors of this rank by their paths.
    """
    options: dict[Tensor, dict[str, float]] = {}
    for group in groups:
        own: dict[str, float] = {"lr_scale": group.lr_scale}
        if group.weight_decay is not None:
            own["weight_decay"] = group.weight_decay
        if group.optimizer:
            own[NUMBER] = group.optimizer
        if not group.trust_ratio:
            own["trust_ratio"] = False
        options |= {by_path[path]: own for path in group.parameters if path in by_path}
    return options


def in_groups(
    parameters: Sequence[nn.Parameter], own: Mapping[Tensor, dict[str, float]]
) -> list[dict[str, Any]]:
    """Return `parameters` as an optimizer's groups, one for each set of equal options.

    own: the options of the parameters that have their own.
    """
    groups: dict[tuple[tuple[str, float], ...], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(tuple(own.get(parameter, {}).items()), []).append(parameter)
    return [{"params": members, **dict(options)} for options, members in groups.items()]


def make_together(classes: Sequence[OptimizerClass]) -> Callable[[list[dict[str, Any]]], Optimizer]:
    """Return a function that makes one optimizer of groups of parameters from several optimizer
    classes."""
    makers = [load_optimizer(x.key, x.target, x.arguments) for x in classes]
    return lambda groups: Together(groups, makers)


def of_classes(
    classes: Sequence[OptimizerClass], own: Mapping[Tensor, dict[str, float]]
) -> MakeOptimizer:
    """Return a function that makes one optimizer of parameters from several optimizer classes.

    own: the options of the parameters that have their own.
    """
    make_of_groups = make_together(classes)

    def make(parameters: list[nn.Parameter], copies: Copies | None = None) -> Optimizer:
        return make_of_groups(in_groups(parameters, own))

    return make


def make_optimizer(
    name: str, options: dict[str, Any], own: Mapping[Tensor, dict[str, float]] | None = None
) -> MakeOptimizer:
    """Return a function that makes torch's optimizer `name`, LAMB or LARS, with `options`.

    own: the options of the parameters that have their own.
    """
    kinds: dict[str, Callable[..., Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }

    with_norms: dict[str, Callable[..., Optimizer]] = {"lamb": Lamb, "lars": Lars}

    def make(parameters: list[nn.Parameter], copies: Copies | None = None) -> Optimizer:
        if name in with_norms:
            shards = _shards(parameters, copies)
            return with_norms[name](in_groups(parameters, own or {}), **options, shards=shards)
        return kinds[name](in_groups(parameters, own or {}), **options)

    return make


def _shards(parameters: list[nn.Parameter], copies: Copies | None) -> Shards | None:
    """Return the parameters of which this rank has shards, or None if all are whole."""
    if copies is None or copies.shard_group is None:
        return None
    group = copies.shard_group

    def add_up(vector: Tensor) -> Tensor:
        dist.all_reduce(vector, group=group)
        return vector

    return Shards([p for p in parameters if p in copies.sharded], add_up)


@dataclass(frozen=True)
class KeptState:
    """The state that an optimizer has of a parameter.

    moments: tensors of the parameter's shape, by the optimizer's names. The plain tensors of a
        tensor subclass have names as `exp_avg:codes`.
    entries: the optimizer's dictionary that holds all of the state.
    apart: names of the other entries: tensors of other shapes, and numbers. `entry_of` returns an
        entry by its name.
    """

    moments: dict[str, Tensor]
    entries: dict[str, Any]
    apart: tuple[str, ...]


def state_of(optimizer: Optimizer, parameter: Tensor) -> KeptState:
    """Return the state that `optimizer` has of `parameter`.

    State that the first update would create is created here, except for optimizers that are named
    by their class.
    """
    entries = optimizer.state[parameter]
    if isinstance(optimizer, Together):
        shape, plain = parameter.shape, flattened(entries)
        moments = {
            name: x
            for name, x in plain.items()
            if isinstance(x, Tensor) and x.shape == shape and shape
        }
        return KeptState(moments, entries, tuple(name for name in plain if name not in moments))
    for name in _moments(optimizer):
        if entries.get(name) is None:
            entries[name] = torch.zeros_like(parameter)
    if not isinstance(optimizer, torch.optim.SGD | Lars) and "step" not in entries:
        entries["step"] = 0
        if isinstance(optimizer, torch.optim.Adam | Lamb):  # AdamW is an Adam
            # Where the optimizer itself would make it: on the device if a kernel reads it there.
            reads = isinstance(optimizer, Lamb) or optimizer.defaults["fused"]
            device = parameter.device if reads else torch.device("cpu")
            entries["step"] = torch.zeros((), dtype=torch.float32, device=device)
    moments = {name: entries[name] for name in _moments(optimizer)}
    return KeptState(moments, entries, ("step",) if "step" in entries else ())


def makes_late(optimizer: Optimizer) -> bool:
    """Return True if moments created in a skipped first step would stay unfilled.

    Such moments must be created before the step (torch 2.13: those of a fused SGD).
    """
    return isinstance(optimizer, torch.optim.SGD)


@contextmanager
def skipping(optimizer: Optimizer, found_inf: Tensor | None) -> Iterator[bool]:
    """Yield True if the caller must take the step inside the context.

    Where the scalar `found_inf` is 1, the step must change nothing (None: the step is always
    taken). For optimizers whose kernels read `found_inf`, it is set and the step is taken. For
    others the host reads the number, and yields False if it is 1.
    """
    if found_inf is None:
        yield True
    elif getattr(optimizer, "_step_supports_amp_scaling", False):  # torch's mark of such kernels
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
        yield found_inf.is_meta or not bool(found_inf)


def _moments(optimizer: Optimizer) -> tuple[str, ...]:
    """Return the names of the moments that `optimizer` has of every parameter."""
    if isinstance(optimizer, torch.optim.SGD | Lars):
        return ("momentum_buffer",) if optimizer.defaults["momentum"] else ()
    return ("exp_avg", "exp_avg_sq")
