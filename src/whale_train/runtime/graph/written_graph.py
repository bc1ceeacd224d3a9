"""A graph under construction, with the module that holds the functions it calls."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn


@dataclass(frozen=True)
class WrittenGraph:
    """A graph under construction.

    graph: the graph.
    root: the module whose submodules hold the functions that the graph calls.
    made: nodes of the graph, by the names of the exported values that they compute.
    """

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
        """Append a node that calls `function` with `args` and `kwargs`, and return it.

        A graph can only name members of a module, so `function` becomes a submodule of `root`.
        """
        name = f"{name}_{len(self.graph.nodes)}"
        self.root.add_module(name, Called(function))
        return self.graph.call_module(name, tuple(args), kwargs or {})


class Called(nn.Module):
    """A module that calls one function of a graph."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)
