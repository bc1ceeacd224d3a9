"""Detect sparse gradients, as those of embedding tables with `sparse=True`.

A sparse gradient has only the rows that were looked up. Ranks sum dense gradients, engines keep
dense ones in buckets, and most optimizers update every row in every step, whatever its gradient.
This file detects sparse gradients while a model's forward runs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whale_train.errors import ConfigError, Fault

# Arguments that ask for sparse gradients: embedding's and embedding_bag's, gather's.
_ASKING = ("sparse", "sparse_grad")


class SparseCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records operations whose operands will get sparse gradients.

    arguments: names of the arguments that ask for sparse gradients.
    targets: the operations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arguments: list[str] = []
        self.targets: list[str] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        asking = _asking(func, args, kwargs)
        if asking is not None and torch.is_grad_enabled():
            operands = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
            if any(x.requires_grad for x in operands):
                self.arguments.append(asking)
                self.targets.append(str(func))
        return func(*args, **kwargs)

    def refuse(self, model: str, where: Sequence[str]) -> None:
        """Raise ConfigError where an operation was recorded.

        model: name of the model.
        where: places in the model, for the fault.
        """
        if self.arguments:
            places = ", ".join(dict.fromkeys(where))
            rule = f"has sparse gradients in {places}, and ranks sum and keep dense ones"
            remedy = f"use {'=False, '.join(dict.fromkeys(self.arguments))}=False"
            raise ConfigError([Fault("model", model, rule, remedy)])


def may_be_sparse(module: fx.GraphModule) -> bool:
    """Return whether any call of a graph, or of a graph inside it, asks for sparse gradients."""
    graphs = (m for m in module.modules() if isinstance(m, fx.GraphModule))
    nodes = (node for graph in graphs for node in graph.graph.nodes)
    return any(_asking(node.target, node.args, node.kwargs) is not None for node in nodes)


def _asking(target: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the name of the argument by which a call asks for sparse gradients, or None."""
    if not isinstance(target, OpOverload):
        return None
    for place, argument in enumerate(target._schema.arguments):
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        if argument.name in _ASKING and given is True:
            return str(argument.name)
    return None
