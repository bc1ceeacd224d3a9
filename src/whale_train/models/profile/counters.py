"""Find counters that a forward keeps in Python and advances in every call, and set their later
values.

A loss with a warm-up, or a layer that is frozen after some steps, is inconspicuous in the first
calls. This file finds the counters of a model, and sets them to their values after many more calls.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

# Numbers of calls after which a forward is examined again. Warm-ups last tens to thousands of
# calls.
AHEAD = (1, 2, 3, 10, 100, 1_000, 10_000, 1_000_000)

Numbers = Mapping[tuple[str, str], int]


@dataclass(frozen=True)
class Counter:
    """Integer attribute of a module that every forward changes by the same step.

    path: path of the module.
    name: name of the attribute.
    start: value before the first call.
    step: increment of a call.
    """

    path: str
    name: str
    start: int
    step: int

    def set(self, model: nn.Module, calls: int) -> None:
        """Set the counter of `model` to its value after `calls` calls."""
        setattr(model.get_submodule(self.path), self.name, self.start + calls * self.step)


def numbers(model: nn.Module) -> Numbers:
    """Return the integer attributes of the modules in `model`, by (module path, attribute name).

    Class attributes of the user's classes count too. Booleans do not.
    """
    attributes = {}
    for path, module in model.named_modules():
        for name, value in {**_of_class(type(module)), **vars(module)}.items():
            if type(value) is int:  # and no bool
                attributes[path, name] = value
    return attributes


def _of_class(made: type) -> dict[str, object]:
    """Return the attributes of a class and its bases outside of torch, by name. Counters often
    begin as class attributes."""
    classes = [x for x in reversed(made.__mro__) if not x.__module__.startswith("torch.")]
    return {name: value for x in classes for name, value in vars(x).items() if name[:2] != "__"}


def counters(model: nn.Module, call: Callable[[], object]) -> list[Counter]:
    """Return the counters of `model` that `call` advances."""
    before = numbers(model)
    call()
    after = numbers(model)
    moved = {key: after[key] - start for key, start in before.items() if key in after}
    return [Counter(*key, before[key], step) for key, step in moved.items() if step]
