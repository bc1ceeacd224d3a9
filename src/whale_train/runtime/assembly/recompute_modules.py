"""Make modules of an unchanged model compute their forward again in the backward."""

from collections.abc import Callable, Container, Iterator
from functools import wraps
from typing import Any

import torch
from torch import nn

from whale_train.models.export.export import model_path
from whale_train.runtime.base.recompute import Recomputed


def recompute_modules(module: nn.Module, paths: Container[str]) -> None:
    """Make the modules at `paths` of the model in `module` keep the inputs of a training forward
    alone, and compute everything else again in the backward. A list of modules, which has no
    forward, stands for its entries."""
    for name, part in list(module.named_modules()):
        if model_path(name) in paths:
            for called in called_modules(part):
                called.forward = _recomputed(called)


def called_modules(part: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, or the modules of a list."""
    if isinstance(part, nn.ModuleList | nn.ModuleDict):
        for child in part.children():
            yield from called_modules(child)
    else:
        yield part


def _recomputed(part: nn.Module) -> Callable[..., Any]:
    """Return the function that replaces the forward of `part`, with the forward's signature."""
    inner = part.forward
    run = Recomputed()

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not part.training or not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        held = ((x._buffers, name) for x in part.modules() for name in x._buffers)
        buffers: Any = [(at, name) for at, name in held if at[name] is not None]
        return run(inner, buffers, *args, **kwargs)

    return forward
