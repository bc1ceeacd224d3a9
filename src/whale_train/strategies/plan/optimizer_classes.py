"""Describe optimizers that a request names by their class, and how their updates behave.

The form of an optimizer's state, and whether its update is elementwise, are found by a trial
(`optimizers/trial.py`). This file holds the results, which the planner reads and a plan keeps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from whale_train.strategies.plan.program import OMITTED

NUMBER = "number"  # the dtype of an entry that is a Python number


def entry_size(size: int | str, parameter: tuple[int, ...]) -> int:
    """Return a size of an entry of a state, for a parameter of the shape `parameter`.

    size: a number; or `d0`, the size of the parameter's dimension 0, and so on; or `n/256`, the
        number of blocks of 256 elements of the parameter, the last of which may be smaller.
    """
    if isinstance(size, int):
        return size
    if size.startswith("n/"):
        return -(-prod(parameter) // int(size[2:]))
    return parameter[int(size[1:])]


@dataclass(frozen=True)
class StateSizes:
    """Which parameters are large to an optimizer that keeps another state of large ones.

    at_least: the number of elements from which on a parameter is large.
    multiple_of: a large parameter's number of elements is a multiple of this.
    """

    at_least: int = 0
    multiple_of: int = 1

    def is_large(self, num_elements: int) -> bool:
        """Return whether a parameter of `num_elements` is large."""
        return num_elements >= self.at_least and num_elements % self.multiple_of == 0


@dataclass(frozen=True)
class StateEntry:
    """Entry of the state that an optimizer keeps for a parameter.

    name: its name in the optimizer; `exp_avg:codes` is the tensor `codes` of the tensor subclass
        `exp_avg`.
    shape: its sizes, in the words of `entry_size`.
    dtype: torch's name of its dtype, or `number`.
    element_bytes: bytes of an element.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    element_bytes: int

    def sizes(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the entry for a parameter of the shape `parameter`."""
        return tuple(entry_size(x, parameter) for x in self.shape)

    def num_bytes(self, parameter: tuple[int, ...]) -> int:
        """Return the bytes of the entry for a parameter of the shape `parameter`. Scalars do not
        count: most are on the host."""
        return self.element_bytes * prod(self.sizes(parameter)) if self.shape else 0


@dataclass(frozen=True)
class OptimizerClass:
    """Optimizer that a request names by its class, with the results of its trial.

    key: the key of the config that names it.
    target: the path of the class, or of a function that returns one.
    arguments: its arguments, without the parameters.
    weight_decay: the default weight decay; None where the optimizer has no weight decay.
    refused: the reason why it refuses parameters, by their number of dimensions as text.
    states: the entries of its state, by the parameter's number of dimensions as text.
    large_states: the same for large parameters; empty where all sizes have the same entries.
    large: the parameters that are large, by their number of dimensions as text.
    unlike_in_parts: the reason why a part of a parameter is updated differently than within the
        whole; '' where the update is elementwise.
    unsaved: the reason why a checkpoint cannot hold its state; '' where it can.
    draws: True if an update draws random numbers.
    """

    key: str
    target: str
    arguments: Mapping[str, Any]
    weight_decay: float | None
    refused: Mapping[str, str] = field(default_factory=dict, metadata=OMITTED)
    states: Mapping[str, tuple[StateEntry, ...]] = field(default_factory=dict, metadata=OMITTED)
    large_states: Mapping[str, tuple[StateEntry, ...]] = field(
        default_factory=dict, metadata=OMITTED
    )
    large: Mapping[str, StateSizes] = field(default_factory=dict, metadata=OMITTED)
    unlike_in_parts: str = field(default="", metadata=OMITTED)
    unsaved: str = field(default="", metadata=OMITTED)
    draws: bool = field(default=False, metadata=OMITTED)

    @property
    def name(self) -> str:
        """Return the name of the class without its module."""
        return self.target.rpartition(".")[2]

    def entries(self, shape: tuple[int, ...]) -> tuple[StateEntry, ...]:
        """Return the entries of the state for a parameter of `shape`."""
        dims = str(min(len(shape), max(map(int, self.states), default=0)))
        if dims in self.large and self.large[dims].is_large(prod(shape)):
            return self.large_states[dims]
        return self.states.get(dims, ())

    def state_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of the state for a parameter of `shape`."""
        return sum(entry.num_bytes(shape) for entry in self.entries(shape))
