"""A graph as it is written, with the module that holds what it calls."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn


@dataclass(frozen=True)
class WrittenGraph:
    """A graph that calls functions of `root`; `made` are its nodes by the names of the values that
    they stand for."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    root: nn.Module = field(default_factory=nn.Module)
    made: dict[str, fx.Node] = field(default_factory=dict)

    def call(
        self,
        function: Callable[..., Any],
        args: list[Any],
        name: str,
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:
        """Return a node that calls `function`: graphs can only name what a module holds."""
        name = f"{name}_{len(self.graph.nodes)}"
        self.root.add_module(name, Called(function))
        return self.graph.call_module(name, tuple(args), kwargs or {})


class Called(nn.Module):
    """A function that a graph calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)
