"""Compile the blocks of an unchanged model: the outermost members of its module lists.

A block that computes a loss is not compiled, as `GlobalMeans` must see the loss's operations.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from whale_train.models.batch_parts.dropout_off import drops
from whale_train.models.batch_parts.target_means import target_mean
from whale_train.models.export.export import model_path
from whale_train.runtime.base.recompute import is_second_run
from whale_train.runtime.compile.compiler import Compiler, are_operations_seen
from whale_train.runtime.kernels.sync_batch_norm import GlobalBatchNorm
from whale_train.strategies.graph.block_paths import is_repeated


def compile_blocks(module: nn.Module, compiler: Compiler) -> list[nn.Module]:
    """Make every block of `module` run code of `compiler` from its second forward on; return the
    blocks.

    The first forward runs uncompiled and shows whether the block computes a loss. Blocks of one
    class that differ only in the values of their tensors share their code. Batch norms that
    communicate stay uncompiled.
    """
    blocks: list[nn.Module] = []
    within: tuple[str, ...] = ()
    for name, part in module.named_modules():
        if isinstance(part, GlobalBatchNorm):  # it communicates with other ranks
            alone: Any = torch.compiler.disable
            part.forward = alone(part.forward)  # type: ignore[method-assign]
        if not is_repeated(model_path(name)) or name.startswith(within):
            continue
        if next(part.children(), None) is None or isinstance(part, nn.ModuleList | nn.ModuleDict):
            continue
        within = (*within, name + ".")
        blocks.append(part)
        wrapped = _Block(part.forward, compiler, model_path(name)).wrapped()
        part.forward = wrapped
    return blocks


class _Block:
    """The forward of one block, uncompiled and compiled."""

    def __init__(self, forward: Callable[..., Any], compiler: Compiler, name: str) -> None:
        self._forward, self._compiler, self._name = forward, compiler, name
        self._code = compiler.code(forward)
        self._seen: _Calls | None = None
        self._ran_code = False

    def wrapped(self) -> Callable[..., Any]:
        """Return the function that replaces the forward, with the forward's signature."""

        @wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._seen is None:
            with _Calls() as calls:
                result = self._forward(*args, **kwargs)
            self._seen = calls
            return result
        if not is_second_run():  # which repeats the first one
            eager = self._seen.losses or are_operations_seen(drops=self._seen.drops)
            self._ran_code = not eager
        if not self._ran_code:
            return self._forward(*args, **kwargs)
        with self._compiler.compiling(self._name):
            return self._code(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """A mode that records whether a mean over targets (`losses`) or dropout (`drops`) is
    computed."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = self.drops = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.losses = self.losses or target_mean(func, args, kwargs) is not None
        self.drops = self.drops or drops(func, args, kwargs)
        return func(*args, **kwargs)
