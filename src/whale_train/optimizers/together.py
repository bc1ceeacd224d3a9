"""Update groups of parameters by optimizers of different classes, as one optimizer.

An optimizer's state for a parameter is learnt by trying the optimizer on a small parameter: names,
shapes, dtypes and devices of the entries. An entry with the parameter's own shape can be sharded as
the parameter is.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from whale_train.optimizers.classes import MakePart

NUMBER = "optimizer"  # the key of a group for the number of its optimizer
_OWN = (NUMBER, "lr_scale")  # keys of a group that are not arguments of its optimizer
# Sizes of small parameters. No two are equal, and constants in a state are seldom one of them.
_SIZES = (13, 17, 11, 7, 5)


class Together(Optimizer):
    """Several optimizers as one. Each updates the groups that have its number.

    groups: parameters and their options. `optimizer` is the number of a group's optimizer, 0 where
        it is not given.
    makers: functions that make the optimizers, by number.

    An engine may replace the parameters of a group, and may step some groups alone, as DeepSpeed
    does. A step does nothing for parameters on the meta device.

    Raises ValueError where an optimizer makes another number of groups than it was given.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], makers: Sequence[MakePart]) -> None:
        self._makers = makers
        self._parts: dict[int, Optimizer] = {}
        self._numbers: dict[int, int] = {}  # the number of a group's optimizer, by the group's id
        held: dict[int, dict[str, Any]] = {}  # groups of the parts, by their index in `groups`
        for number, make in enumerate(makers):
            places = [i for i, group in enumerate(groups) if group.get(NUMBER, 0) == number]
            if not places:
                continue
            part = make([_options(groups[place]) for place in places])
            if len(part.param_groups) != len(places):
                made = f"{len(part.param_groups)} groups of {len(places)}"
                raise ValueError(f"it makes {made}, so that their learning rates cannot be set")
            self._parts[number] = part
            for place, group in zip(places, part.param_groups, strict=True):
                group["lr_scale"] = groups[place].get("lr_scale", 1.0)
                self._numbers[id(group)] = number
                held[place] = group
        super().__init__([held[place] for place in sorted(held)], {})
        self._begins_full = {number for number, part in self._parts.items() if part.state}
        for part in self._parts.values():
            self.state.update(part.state)
            part.state = self.state
        self._first = set(self.state)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        self._forget_exchanged()
        for number, part in self._parts.items():
            groups = [x for x in self.param_groups if self._numbers[id(x)] == number]
            parameters = [parameter for group in groups for parameter in group["params"]]
            if any(parameter.is_meta for parameter in parameters):
                continue
            if number in self._begins_full:
                for group in groups:
                    self._begin(self._makers[number], group)
            if parameters:
                all_groups, part.param_groups = part.param_groups, groups
                try:
                    part.step()
                finally:
                    part.param_groups = all_groups

    def make_states(self, parameters: Mapping[Tensor, int] | Iterable[Tensor]) -> None:
        """Make the state of those of `parameters` that have none, in the form that an update makes.

        parameters: parameters of the groups. A parameter that is in no group at the moment needs
            the index of its group, as the value in a mapping.

        The entries are zeros, to be overwritten by the caller.
        """
        places = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        if isinstance(parameters, Mapping):
            places |= parameters
        for parameter in parameters:
            if not self.state.get(parameter):
                group = self.param_groups[places[parameter]]
                make = self._makers[self._numbers[id(group)]]
                self.state[parameter] = _state_like(make, group, parameter)

    def _begin(self, make: MakePart, group: dict[str, Any]) -> None:
        """Make the state that the optimizer's constructor would make, for those parameters of
        `group` that have none."""
        for parameter in group["params"]:
            if parameter not in self.state:
                options = {key: x for key, x in group.items() if key not in (*_OWN, "params")}
                fresh = make([{**options, "params": [parameter]}])
                self.state[parameter] = dict(fresh.state[parameter])

    def _forget_exchanged(self) -> None:
        """Free the states that constructors made for parameters which an engine has replaced."""
        if self._first:
            held = {p for group in self.param_groups for p in group["params"]}
            for parameter in self._first - held:
                self.state.pop(parameter, None)
            self._first = set()


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group without the keys that its optimizer does not take."""
    return {key: value for key, value in group.items() if key not in _OWN}


@dataclass(frozen=True)
class StateForm:
    """Form of an entry of an optimizer's state.

    shape: the sizes of the entry's dimensions; `d0`, `d1`, ... stand for the sizes of the
        parameter's dimensions.
    value: the entry for a small parameter: a tensor or a number.
    """

    shape: tuple[int | str, ...]
    value: Tensor | float

    def like(self, parameter: Tensor) -> Tensor | float:
        """Return a zero entry of this form for `parameter`."""
        if not isinstance(self.value, Tensor):
            return type(self.value)(0)
        if not self.shape:  # kept on the host by most optimizers
            return torch.zeros_like(self.value)
        sizes = [x if isinstance(x, int) else parameter.shape[int(x[1:])] for x in self.shape]
        on_device = self.value.device.type == parameter.device.type or parameter.is_meta
        device = parameter.device if on_device else self.value.device
        return torch.zeros(sizes, dtype=self.value.dtype, device=device)


def small_parameter(dims: int, device: torch.device | None = None) -> nn.Parameter:
    """Return a parameter of `dims` dimensions, no two of equal size."""
    sizes = [_SIZES[dim % len(_SIZES)] + dim // len(_SIZES) for dim in range(dims)]
    return nn.Parameter(torch.full(sizes, 0.1, device=device))


def forms_of(state: Mapping[str, Any], parameter: Tensor) -> dict[str, StateForm]:
    """Return the forms of the entries of `state`, by name.

    state: the optimizer's state for `parameter`.
    parameter: a small parameter, as `small_parameter` returns.

    Raises TypeError for an entry that is neither a tensor nor a number, or whose name cannot be a
    tensor's in a file.
    """
    forms = {}
    for name, value in state.items():
        if value is None:
            continue
        if not isinstance(value, Tensor | int | float):
            raise TypeError(f"keeps {name}, which is of type {type(value).__name__}")
        if not isinstance(name, str) or "." in name:
            raise TypeError(f"keeps {name!r}, which is no name of a tensor in a file")
        sizes = tuple(value.shape) if isinstance(value, Tensor) else ()
        shape = list(parameter.shape)
        named = [f"d{shape.index(size)}" if size in shape else size for size in sizes]
        forms[name] = StateForm(tuple(named), value)
    return forms


def _state_like(make: MakePart, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return the state that an update would make for `parameter`, with zeros as values."""
    real = torch.device("cpu") if parameter.is_meta else parameter.device
    # Around a parameter on the meta device, a dispatch mode may record operations.
    unwatched = _disable_current_modes() if parameter.is_meta else nullcontext()
    with unwatched, torch.device(real):
        small = small_parameter(parameter.dim(), real)
        small.grad = torch.full_like(small, 0.01)
        optimizer = make([{"params": [small], "lr": group["lr"]}])
        optimizer.step()
        forms = forms_of(optimizer.state[small], small)
    return {name: form.like(parameter) for name, form in forms.items()}
