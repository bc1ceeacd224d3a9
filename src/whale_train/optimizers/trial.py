"""Determine how an optimizer acts by trying it on small parameters, and not by its name.

Tried are: the numbers of dimensions that it accepts; its state; whether shards of a parameter, cut
along a dimension or as ZeRO's flat partitions are, get the same update as in the full parameter;
whether a new optimizer that loads the state continues equally, as from a checkpoint; and whether an
update draws random numbers.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whale_train.errors import ConfigError, Fault
from whale_train.optimizers.classes import MakePart, load_optimizer
from whale_train.optimizers.state_forms import (
    LARGE_SHAPES,
    Forms,
    StateForm,
    StateForms,
    eagerly,
    flattened,
    learn_forms,
    small_shape,
    stand_in,
)
from whale_train.optimizers.together import Together, set_rate
from whale_train.own_code import said
from whale_train.strategies.plan.optimizer_classes import (
    NUMBER,
    OptimizerClass,
    StateEntry,
    StateSizes,
)

_MOST_DIMS = 5
# Shapes of the parameters that are cut. All sizes are even, and the last flat half begins in a row.
_SHAPES = {1: (14,), 2: (6, 10), 3: (4, 6, 8)}
_STEPS = 3
_RATE = 0.01
# Gradients differ in size by step, so that an optimizer which clips updates does so in some steps.
_SIZES_OF_GRADIENTS = (1.0, 0.01, 10.0)
_TOLERANCE = 1e-4  # relative to the largest element of an update; rounding is 1e-6


@dataclass(frozen=True)
class _Trial:
    """Small parameters, and the gradients of a few steps.

    values: the parameters' values.
    gradients: for each step, a gradient for each parameter.
    """

    values: Sequence[Tensor]
    gradients: Sequence[Sequence[Tensor]]

    def cut(self, parts: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> "_Trial":
        """Return the trial of parts of the parameters.

        parts: function that returns the parts of tensors.
        """
        return _Trial(parts(self.values), [parts(step) for step in self.gradients])


def try_optimizer(key: str, target: str, arguments: Mapping[str, Any]) -> OptimizerClass:
    """Try the optimizer `target` with `arguments`, and return how it acts.

    key: the key of the config that names the optimizer.

    Raises ConfigError where the optimizer cannot be imported, does not take an argument, or updates
    no parameter.
    """
    make = load_optimizer(key, target, arguments)
    with (
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        return _tried(key, target, arguments, make)


def _tried(key: str, target: str, arguments: Mapping[str, Any], make: MakePart) -> OptimizerClass:
    """Try the optimizer that `make` makes, and return how it acts. Raises ConfigError where it
    updates no parameter."""
    refused: dict[str, str] = {}
    states: dict[str, tuple[StateEntry, ...]] = {}
    large_states: dict[str, tuple[StateEntry, ...]] = {}
    large: dict[str, StateSizes] = {}
    decay, unsaved = None, ""
    for dims in range(_MOST_DIMS + 1):
        try:
            decay = _decay_after_a_step(make, dims)
        except Exception as error:
            refused[str(dims)] = said(error)
            continue
        try:
            forms = learn_forms(make, dims)
        except Exception as error:
            unsaved = str(error) if isinstance(error, TypeError) else f"raises {said(error)}"
            forms = StateForms({})
        states[str(dims)] = _entries(forms.small)
        if forms.large:
            large_states[str(dims)], large[str(dims)] = _entries(forms.large), forms.sizes
    if not states:
        rule, remedy = f"cannot be used: {refused['2']}", "correct its arguments or its code"
        if "'closure'" in refused["2"]:
            remedy = "use another, whose step computes no loss by a closure"
        raise ConfigError([Fault(key, target, rule, remedy)])
    taken = [dims for dims in _SHAPES if str(dims) not in refused]
    trials = [_trial([_SHAPES[dims] for dims in taken])]
    if of_large := [dims for dims in taken if str(dims) in large]:
        trials.append(_trial([LARGE_SHAPES[dims][0] for dims in of_large]))
    draws, reason = False, ""
    for trial in trials:
        updated = _updated(make, trial, seed=0)
        draws = draws or not _are_close(updated, _updated(make, trial, seed=1), trial)
        reason = reason or _unlike_in_parts(make, trial, updated)
        unsaved = unsaved or _unsaved(make, trial, updated, draws)
    return OptimizerClass(
        key,
        target,
        dict(arguments),
        float(decay) if isinstance(decay, int | float) else None,
        refused,
        states,
        large_states,
        large,
        "it draws random numbers" if draws else reason,
        unsaved,
        draws,
    )


def _decay_after_a_step(make: MakePart, dims: int) -> Any:
    """Return the weight decay of an optimizer after its first update of a parameter of `dims`
    dimensions, or None where it has none."""
    parameter = stand_in(small_shape(dims))
    optimizer = make([{"params": [parameter]}])
    parameter.grad = torch.full_like(parameter, 0.01)
    with eagerly():
        optimizer.step()
    return optimizer.param_groups[0].get("weight_decay")


def _entries(forms: Forms) -> tuple[StateEntry, ...]:
    """Return the entries of a state in the form that plans have."""
    entries = []
    for name, form in forms.items():
        entries += [_entry(f"{name}:{key}", inner) for key, inner in form.inner.items()]
        entries += [] if form.inner else [_entry(name, form)]
    return tuple(entries)


def _entry(name: str, form: StateForm) -> StateEntry:
    """Return a plain entry of a state in the form that plans have."""
    value = form.value
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return StateEntry(name, form.shape, dtype, value.dtype.itemsize)
    return StateEntry(name, (), NUMBER, 8)


def _trial(shapes: Sequence[Sequence[int]]) -> _Trial:
    """Return parameters of `shapes` with random gradients. One row of every gradient is zero."""
    generator = torch.Generator().manual_seed(20_240_229)

    def drawn(shape: Sequence[int], size: float) -> Tensor:
        return size * torch.randn(tuple(shape), generator=generator)

    values = [drawn(shape, 0.1) for shape in shapes]
    gradients = [[drawn(shape, size) for shape in shapes] for size in _SIZES_OF_GRADIENTS]
    for step in gradients:
        for gradient in step:
            gradient[1] = 0.0
    return _Trial(values, gradients)


def _updated(make: MakePart, trial: _Trial, seed: int = 0) -> list[Tensor]:
    """Return the parameters of `trial` after all steps."""
    torch.manual_seed(seed)
    parameters = [nn.Parameter(value.clone()) for value in trial.values]
    optimizer = _at_rate(Together([{"params": parameters}], [make]))
    for gradients in trial.gradients:
        _step(optimizer, parameters, gradients)
    return [parameter.detach() for parameter in parameters]


def _at_rate(optimizer: Together) -> Together:
    """Return the optimizer after setting the trial's learning rate."""
    for group in optimizer.param_groups:
        set_rate(group, _RATE)
    return optimizer


def _step(optimizer: Together, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Take a step with `gradients`, one for each parameter."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()


def _are_close(updated: Sequence[Tensor], wanted: Sequence[Tensor], trial: _Trial) -> bool:
    """Return whether two results for the parameters of `trial` are equal but for rounding."""
    return all(
        _distance(x, y, before) <= _TOLERANCE
        for x, y, before in zip(updated, wanted, trial.values, strict=True)
    )


def _distance(updated: Tensor, wanted: Tensor, before: Tensor) -> float:
    """Return the largest difference between two updates of a parameter, relative to the largest
    element of the wanted update.

    before: the parameter before the updates.

    Where values are not finite, the distance is 0 for equal results and infinite for others.
    """
    both = torch.stack([updated, wanted])
    if not bool(both.isfinite().all()):
        return 0.0 if torch.equal(updated.nan_to_num(), wanted.nan_to_num()) else torch.inf
    moved = float((wanted - before).abs().max())
    apart = float((updated - wanted).abs().max())
    return apart / moved if moved else (torch.inf if apart else 0.0)


def _unlike_in_parts(make: MakePart, trial: _Trial, updated: Sequence[Tensor]) -> str:
    """Return why parts of a parameter get another update than in the full parameter, or '' where
    the updates are equal."""
    for dim in range(max(value.dim() for value in trial.values)):
        of_dim = [i for i, value in enumerate(trial.values) if value.dim() > dim]

        def halves(
            tensors: Sequence[Tensor], of: list[int] = of_dim, at: int = dim
        ) -> list[Tensor]:
            return [half for i in of for half in tensors[i].chunk(2, at)]

        how = f"cut in two along its dimension {dim}"
        if reason := _unlike(lambda x: _updated(make, x), trial.cut(halves), halves(updated), how):
            return reason
    total = sum(value.numel() for value in trial.values)

    def flat_halves(tensors: Sequence[Tensor]) -> list[Tensor]:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return [flat[: total // 2 + 1], flat[total // 2 + 1 :]]

    flat, wanted = trial.cut(flat_halves), flat_halves(updated)
    return _unlike(lambda x: _updated_flat(make, trial, x), flat, wanted, "flattened")


def _unlike(
    update: Callable[[_Trial], Sequence[Tensor]], parts: _Trial, wanted: Sequence[Tensor], how: str
) -> str:
    """Return why the result of `update` for `parts` differs from `wanted`, or '' where it does not.

    how: how the parameters were cut, for the answer.
    """
    try:
        updated = update(parts)
    except Exception as error:
        return f"of a parameter that is {how} it raises {said(error)}"
    distances = map(_distance, updated, wanted, parts.values)
    largest = max(distances)
    if largest <= _TOLERANCE:
        return ""
    off = "is another one" if largest == torch.inf else f"differs by {largest:.2g} of itself"
    return f"the update of a parameter that is {how} {off}"


def _updated_flat(make: MakePart, trial: _Trial, flat: _Trial) -> list[Tensor]:
    """Return the flat halves after all steps. Each half replaces the full parameters in the group
    of an optimizer that was made for them, as in DeepSpeed's ZeRO."""
    halves = []
    for number, half in enumerate(flat.values):
        torch.manual_seed(0)
        full_parameters = [nn.Parameter(value.clone()) for value in trial.values]
        optimizer = _at_rate(Together([{"params": full_parameters}], [make]))
        parameter = nn.Parameter(half.clone())
        optimizer.param_groups[0]["params"] = [parameter]
        for gradients in flat.gradients:
            _step(optimizer, [parameter], [gradients[number]])
        halves.append(parameter.detach())
    return halves


def _unsaved(make: MakePart, trial: _Trial, uninterrupted: Sequence[Tensor], draws: bool) -> str:
    """Return why a new optimizer with the same state continues differently, or '' where it does
    not.

    uninterrupted: the parameters after all steps of one optimizer.
    draws: whether updates draw random numbers, which makes a comparison impossible; then ''.
    """
    if draws:
        return ""
    torch.manual_seed(0)
    parameters = [nn.Parameter(value.clone()) for value in trial.values]
    before = _at_rate(Together([{"params": parameters}], [make]))
    for gradients in trial.gradients[:-1]:
        _step(before, parameters, gradients)
    after = _at_rate(Together([{"params": parameters}], [make]))
    after.make_states(parameters)
    for parameter in parameters:
        saved, made = flattened(before.state[parameter]), flattened(after.state[parameter])
        if saved.keys() != made.keys():
            return "keeps other entries after some updates than after the first"
        for name, value in made.items():
            if isinstance(value, Tensor):
                if value.shape != saved[name].shape or value.dtype != saved[name].dtype:
                    return f"keeps {name} of a form that is not known before"
                value.copy_(saved[name])
            else:
                after.state[parameter][name] = saved[name]
    _step(after, parameters, trial.gradients[-1])
    if _are_close([p.detach() for p in parameters], uninterrupted, trial):
        return ""
    return "keeps something of its updates outside of its state of parameters"
