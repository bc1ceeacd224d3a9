"""Learn the form of an optimizer's state for a parameter of any size, by updates of stand-ins.

An optimizer may keep another state of large parameters than of small ones, as those that store
moments in 8 bits with a scale for each block of elements. So it updates a small stand-in and two
large ones, and the sizes of the entries are compared with those of the stand-ins. An entry that is
a tensor subclass counts as the plain tensors that it consists of; `exp_avg:codes` names the tensor
`codes` of the entry `exp_avg`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from whale_train.optimizers.classes import MakePart
from whale_train.strategies.plan.optimizer_classes import StateSizes, entry_size

# Sizes of small stand-ins, which have less than 4,096 elements. No two of a stand-in are equal, and
# constants in a state are seldom one of them.
_SIZES = (13, 17, 11)
_SIZES_OF_MANY = (7, 11, 3, 5, 2)  # for more than three dimensions
# Shapes of the two large stand-ins, of 24,576 and 40,960 elements: multiples of every usual block.
# No dimension has the same size in both, and no two dimensions have the same pair of sizes.
LARGE_SHAPES: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
    1: ((24576,), (40960,)),
    2: ((192, 128), (160, 256)),
    3: ((6, 64, 64), (10, 32, 128)),
    4: ((6, 32, 16, 8), (10, 16, 8, 32)),
    5: ((6, 16, 8, 8, 4), (10, 8, 16, 4, 8)),
}
Size = int | str


@dataclass(frozen=True)
class StateForm:
    """Form of an entry of an optimizer's state, or of a plain tensor within it.

    shape: the sizes of the entry's dimensions, in the words of `entry_size`.
    value: the entry for a stand-in: a tensor or a number.
    inner: the forms of the tensors of an entry that is a tensor subclass, by name.
    """

    shape: tuple[Size, ...]
    value: Tensor | float
    inner: Mapping[str, "StateForm"] = field(default_factory=dict)

    def like(self, parameter: Tensor) -> Tensor | float:
        """Return an entry of this form for `parameter`: zeros, or the entry's value where its shape
        does not depend on the parameter."""
        if not isinstance(self.value, Tensor):
            return type(self.value)(0)
        if self.inner:
            parts = {name: form.like(parameter) for name, form in self.inner.items()}
            return _wrapped(self.value, parts, parameter)
        if not self.shape:  # kept on the host by most optimizers
            return torch.zeros_like(self.value)
        sizes = [entry_size(size, tuple(parameter.shape)) for size in self.shape]
        on_device = self.value.device.type == parameter.device.type or parameter.is_meta
        device = parameter.device if on_device else self.value.device
        if all(isinstance(size, int) for size in self.shape) and not parameter.is_meta:
            return self.value.detach().to(device, copy=True)  # a table of the optimizer's own
        return torch.zeros(sizes, dtype=self.value.dtype, device=device)


Forms = Mapping[str, StateForm]


@dataclass(frozen=True)
class StateForms:
    """Forms of the entries of a state, by name, for parameters of one number of dimensions.

    small: the forms for small parameters.
    large: the forms for large parameters; empty where they are those for small ones.
    sizes: which parameters are large.
    """

    small: Forms
    large: Forms = field(default_factory=dict)
    sizes: StateSizes = field(default_factory=StateSizes)

    def of(self, shape: Sequence[int]) -> Forms:
        """Return the forms for a parameter of `shape`."""
        return self.large if self.large and self.sizes.is_large(prod(shape)) else self.small


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a state that are not None, by name, with the plain tensors of an entry
    that is a tensor subclass in its stead."""
    parts: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            parts |= {f"{name}:{inner}": getattr(value, inner) for inner in names}
        elif value is not None:
            parts[name] = value
    return parts


def entry_of(state: Mapping[str, Any], name: str) -> Any:
    """Return the entry or the plain tensor of a state that `flattened` gives the name `name`."""
    outer, _, inner = name.partition(":")
    return getattr(state[outer], inner) if inner else state[outer]


def learn_forms(make: MakePart, dims: int, device: torch.device | None = None) -> StateForms:
    """Return the forms of the state that the optimizer of `make` keeps of parameters of `dims`
    dimensions.

    device: where stand-ins are; None is the default device.

    Raises TypeError for an entry whose form is not understood, and whatever the optimizer raises.
    """
    small_parameter = stand_in(small_shape(dims), device)
    small = forms_of([(state_after_a_step(make, small_parameter), small_parameter)])
    if dims not in LARGE_SHAPES:
        return StateForms(small)
    of_large = []
    for shape in LARGE_SHAPES[dims]:
        parameter = stand_in(shape, device)
        of_large.append((state_after_a_step(make, parameter), parameter))
    if _kinds(of_large[0][0]) == _kinds(of_large[1][0]) == _kinds(_values(small)):
        return StateForms(small)
    large = forms_of(of_large)

    def is_large(num_elements: int) -> bool:
        parameter = stand_in((num_elements,) + (1,) * (dims - 1), device)
        return _kinds(state_after_a_step(make, parameter)) == _kinds(_values(large))

    return StateForms(small, large, _sizes_of_large(is_large, _block(large)))


def _sizes_of_large(is_large: Any, block: int) -> StateSizes:
    """Return which parameters are large, by bisection over their number of elements.

    is_large: function that returns whether a parameter of a number of elements is large.
    block: the number of elements of a block of the state.
    """
    first = prod(LARGE_SHAPES[1][0])
    step = 1 if is_large(first + 1) else block
    low, high = 0, first // step  # `high` steps of elements are large, `low` are not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_large(middle * step) else (middle, high)
    return StateSizes(high * step, step)


def _block(forms: Forms) -> int:
    """Return the largest number of elements that an entry has one element for."""
    plain = [y for x in forms.values() for y in (x.inner.values() or (x,))]
    of_blocks = [size for form in plain for size in form.shape if isinstance(size, str)]
    return max((int(x[2:]) for x in of_blocks if x.startswith("n/")), default=1)


def small_shape(dims: int) -> tuple[int, ...]:
    """Return the shape of a small stand-in of `dims` dimensions, no two of equal size."""
    if dims <= len(_SIZES):
        return _SIZES[:dims]
    many = len(_SIZES_OF_MANY)
    return tuple(_SIZES_OF_MANY[dim % many] + 12 * (dim // many) for dim in range(dims))


def stand_in(shape: Sequence[int], device: torch.device | None = None) -> nn.Parameter:
    """Return a parameter of `shape`."""
    return nn.Parameter(torch.full(tuple(shape), 0.1, device=device))


def state_after_a_step(make: MakePart, parameter: nn.Parameter) -> dict[str, Any]:
    """Return the state that the optimizer of `make` has of `parameter` after a first update."""
    parameter.grad = torch.full_like(parameter, 0.01)
    optimizer = make([{"params": [parameter]}])
    with eagerly():
        optimizer.step()
    return dict(optimizer.state[parameter])


@contextmanager
def eagerly() -> Iterator[None]:
    """Within the context, run what an optimizer compiles by torch.compile without compiling it."""
    with torch.compiler.set_stance("force_eager"):
        yield


def forms_of(states: Sequence[tuple[Mapping[str, Any], Tensor]]) -> dict[str, StateForm]:
    """Return the forms of the entries of a state, by name.

    states: states of one optimizer, each with its parameter: one small stand-in, or two large ones.

    Raises TypeError for an entry that is neither a tensor nor a number, whose name cannot be a
    tensor's in a file, or whose size has no known relation to the parameter's.
    """
    forms = {}
    shapes = [tuple(parameter.shape) for _, parameter in states]
    for name, value in states[0][0].items():
        if value is None:
            continue
        if not isinstance(value, Tensor | int | float):
            raise TypeError(f"keeps {name}, which is of type {type(value).__name__}")
        if not isinstance(name, str) or "." in name or ":" in name:
            raise TypeError(f"keeps {name!r}, which is no name of a tensor in a file")
        values = [state[name] for state, _ in states]
        inner: dict[str, StateForm] = {}
        if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
            for key in value.__tensor_flatten__()[0]:
                tensors = [getattr(x, key) for x in values]
                inner[key] = StateForm(_shape_of(f"{name}:{key}", tensors, shapes), tensors[0])
        shape = _shape_of(name, values, shapes) if isinstance(value, Tensor) else ()
        forms[name] = StateForm(shape, value, inner)
    return forms


def _shape_of(
    name: str, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
) -> tuple[Size, ...]:
    """Return the shape of an entry in the words of `entry_size`.

    tensors: the entry for each parameter.
    shapes: the shapes of the parameters.

    Raises TypeError where a size follows from neither a dimension nor the number of elements.
    """
    if len({tensor.dim() for tensor in tensors}) > 1:
        raise TypeError(f"keeps {name}, whose number of dimensions goes by the size of a parameter")
    pairs = list(zip(*shapes, strict=True))
    numbers = [prod(shape) for shape in shapes]
    named: list[Size] = []
    for sizes in zip(*(tuple(tensor.shape) for tensor in tensors), strict=True):
        counted = zip(numbers, sizes, strict=True)
        blocks = {-(-number // size) if size else 0 for number, size in counted}
        if sizes in pairs:
            named.append(f"d{pairs.index(sizes)}")
        elif len(set(sizes)) == 1:
            named.append(sizes[0])
        elif len(blocks) == 1:
            named.append(f"n/{blocks.pop()}")
        else:
            raise TypeError(f"keeps {name}, whose size has no known relation to the parameter's")
    return tuple(named)


def _values(forms: Forms) -> dict[str, Tensor | float]:
    """Return the entries that `forms` were learnt of."""
    return {name: form.value for name, form in forms.items()}


def _kinds(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the kind of each plain entry of a state, by name: its dtype, or its type."""
    return {
        name: str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        for name, value in flattened(state).items()
    }


def _wrapped(value: Tensor, parts: Mapping[str, Any], parameter: Tensor) -> Tensor:
    """Return a tensor of the subclass of `value`, in the shape of `parameter`, that consists of
    `parts`."""
    _, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    size = parameter.shape
    strides = parameter.stride()
    wrapped: Tensor = type(value).__tensor_unflatten__(parts, context, size, strides)  # type: ignore[attr-defined]
    return wrapped
