"""Describe optimizers that a request names by their class, and how their updates act.

The form of an optimizer's state and whether it updates elements alone are found out by trying
(`optimizers/trial.py`). Here are the answers, which the planner reads and a plan keeps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from whale_train.strategies.plan.program import OMITTED

NUMBER = "number"  # the dtype of an entry that is a number of Python's


@dataclass(frozen=True)
class StateEntry:
    """Entry of the state that an optimizer keeps for a parameter.

    name: its name in the optimizer.
    shape: its sizes; `d0` is the size of the parameter's dimension 0, and so on.
    dtype: its dtype by torch's name for it, or `number`.
    element_bytes: bytes of an element.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    element_bytes: int

    def sizes(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the entry for a parameter of the shape `parameter`."""
        return tuple(x if isinstance(x, int) else parameter[int(x[1:])] for x in self.shape)

    def num_bytes(self, parameter: tuple[int, ...]) -> int:
        """Return the bytes of the entry for a parameter of the shape `parameter`.

        Scalars are not counted. Most are kept on the host.
        """
        return self.element_bytes * prod(self.sizes(parameter)) if self.shape else 0


@dataclass(frozen=True)
class OptimizerClass:
    """Optimizer that a request names by its class, and what trying it has shown.

    key: the key of the config that names it.
    target: the path of the class, or of the function that makes one.
    arguments: its arguments, beside the parameters.
    weight_decay: the weight decay of a parameter that has none of its own; None where the
        optimizer has no weight decay.
    refused: why it refuses parameters, by their number of dimensions, as text.
    states: the entries of its state, by the number of the parameter's dimensions, as text.
    unlike_in_parts: why a part of a parameter is updated otherwise than within the whole; empty
        where elements are updated alone.
    unsaved: why a checkpoint cannot hold its state; empty where it can.
    draws: whether an update draws random numbers.
    """

    key: str
    target: str
    arguments: Mapping[str, Any]
    weight_decay: float | None
    refused: Mapping[str, str] = field(default_factory=dict, metadata=OMITTED)
    states: Mapping[str, tuple[StateEntry, ...]] = field(default_factory=dict, metadata=OMITTED)
    unlike_in_parts: str = field(default="", metadata=OMITTED)
    unsaved: str = field(default="", metadata=OMITTED)
    draws: bool = field(default=False, metadata=OMITTED)

    @property
    def name(self) -> str:
        """Return the name of the class without its module."""
        return self.target.rpartition(".")[2]

    def entries(self, dims: int) -> tuple[StateEntry, ...]:
        """Return the entries of the state for a parameter of `dims` dimensions."""
        known = max(map(int, self.states), default=0)
        return self.states.get(str(min(dims, known)), ())

    def state_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of the state for a parameter of `shape`."""
        return sum(entry.num_bytes(shape) for entry in self.entries(len(shape)))
