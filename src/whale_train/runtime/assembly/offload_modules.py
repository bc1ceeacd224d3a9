"""Make modules of an unchanged model send what their forward saves to the host."""

from collections.abc import Callable, Container
from functools import wraps
from typing import Any

import torch
from torch import nn

from whale_train.models.export.export import model_path
from whale_train.runtime.assembly.recompute_modules import called_modules
from whale_train.runtime.base.host_copies import HostCopies


def offload_modules(module: nn.Module, paths: Container[str], copies: HostCopies) -> None:
    """Make the modules at `paths` of the model in `module` send what a training forward saves to
    `copies`. A list of modules, which has no forward, stands for its entries.

    Call it after `recompute_modules`, so that the inputs of a module that runs again are sent.
    """
    for name, part in list(module.named_modules()):
        if model_path(name) in paths:
            for called in called_modules(part):
                called.forward = _sent(called, copies)


def _sent(part: nn.Module, copies: HostCopies) -> Callable[..., Any]:
    """Return the function that replaces the forward of `part`, with the forward's signature."""
    inner = part.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not part.training or not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        with copies.sending((*part.parameters(), *part.buffers())):
            return inner(*args, **kwargs)

    return forward
