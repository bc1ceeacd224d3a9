"""Update groups of parameters by optimizers of different classes, as one optimizer.

On CPUs, an optimizer that compiles its update by torch.compile runs eagerly: a compilation takes
seconds for each shape of a parameter (torchao 0.18).
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from whale_train.optimizers.classes import Groups, MakePart
from whale_train.optimizers.state_forms import eagerly, learn_forms

NUMBER = "optimizer"  # the key of a group for the number of its optimizer
_OWN = (NUMBER, "lr_scale")  # keys of a group that are not arguments of its optimizer


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
                on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
                try:
                    with eagerly() if on_cpu else nullcontext():
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


def set_rate(group: dict[str, Any], lr: float) -> None:
    """Set the learning rate of a group; a rate that is a tensor keeps its identity."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group without the keys that its optimizer does not take."""
    return {key: value for key, value in group.items() if key not in _OWN}


def _state_like(make: MakePart, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return the state that an update would make for `parameter`, with zeros as values."""
    real = torch.device("cpu") if parameter.is_meta else parameter.device
    # Around a parameter on the meta device, a dispatch mode may record operations.
    unwatched = _disable_current_modes() if parameter.is_meta else nullcontext()
    rate = float(group["lr"])  # a tensor of the group's own would be shared

    def at_rate(groups: Groups) -> Optimizer:
        return make([{**x, "lr": rate} for x in groups])

    with unwatched, torch.device(real):
        forms = learn_forms(at_rate, parameter.dim(), real).of(parameter.shape)
    return {name: form.like(parameter) for name, form in forms.items()}
