"""Materialise the initial values of a model tensor by tensor, on demand.

A model is built on tensors without memory, and the operations of its constructor are recorded. To
materialise a parameter, the operations that it depends on are repeated. Random numbers come from a
generator seeded by the seed and the operation's number. So values depend neither on the plan nor on
the order of materialisation, and no process has to hold the whole model. They differ from the
values that one process would draw in sequence. Reading a tensor of a folder is recorded like any
operation. The idea is torchdistx's deferred initialisation.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.storage import UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from whale_train.models.weights.stored import mapped

_STORED = torch.ops.whale_train.stored.default
_ATTRIBUTE = "_whale_deferred"  # a placeholder's attribute: its recording and recorded tensor


def deferred(
    build: Callable[[], nn.Module], seed: int, *, draws_at_once: bool = False
) -> nn.Module:
    """Return the module that `build` returns, with placeholders for its parameters and buffers.

    A placeholder has the shape and dtype of its tensor, and no memory; `made` returns its value.
    With `draws_at_once`, tensors that depend on random numbers get their values at once, drawn as
    one process draws them after `torch.manual_seed(seed)`.
    """
    recording = _Recording(seed)
    with _convertible(), _Mode(allow_non_fake_inputs=True), recording:
        module = build()
    fakes = {
        id(tensor): tensor
        for tensor in (*module.parameters(), *module.buffers())
        if isinstance(tensor, FakeTensor)
    }
    drawn = recording.drawn(fakes.values()) if draws_at_once else {}
    instead = {key: recording.replacing(fake, drawn.get(key)) for key, fake in fakes.items()}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                held[name] = instead.get(id(tensor), tensor)  # type: ignore[assignment]
        for name, value in vars(part).items():
            # It is neither a parameter nor a buffer, and a forward reads it directly.
            if isinstance(value, FakeTensor):
                vars(part)[name] = recording.made(value)
    return module


def is_deferred(tensor: Tensor) -> bool:
    """Return whether `tensor` is a placeholder of `deferred`."""
    return hasattr(tensor, _ATTRIBUTE)


def made(tensor: Tensor) -> Tensor:
    """Return the initial value of a placeholder of `deferred`, or any other tensor itself.

    A value from a file is mapped into memory. It has the dtype of the file, which may differ from
    the placeholder's, and takes memory only for the parts that are read.
    """
    recorded = getattr(tensor, _ATTRIBUTE, None)
    if recorded is None:
        return tensor
    recording, fake = recorded
    value: Tensor = recording.made(fake, may_map=True)
    return value


def fill(tensor: Tensor) -> Callable[[], Tensor] | None:
    """Materialise a placeholder in place, and return a function that makes the value again.

    Return None for any other tensor, which is unchanged.
    """
    recorded = getattr(tensor, _ATTRIBUTE, None)
    if recorded is None:
        return None
    recording, fake = recorded
    delattr(tensor, _ATTRIBUTE)
    tensor.data = recording.made(fake)

    def again() -> Tensor:
        value: Tensor = recording.made(fake)
        return value

    return again


@dataclass(frozen=True)
class _View:
    """A recorded tensor as a view of its storage at that time, since `x.data = y` may exchange the
    storage later.

    storage: number of the recorded storage.
    dtype: dtype of the tensor.
    device: device of the tensor.
    offset: index of the first element in the storage.
    shape: shape of the tensor.
    stride: elements between neighbours, for each dimension.
    """

    storage: int
    dtype: torch.dtype
    device: torch.device
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, fake: Tensor) -> "_View":
        """Return the view of its storage that a recorded tensor is."""
        place = (fake.dtype, fake.device, int(fake.storage_offset()))
        return cls(_storage(fake), *place, fake.shape, fake.stride())

    def within(self, storages: Mapping[int, UntypedStorage]) -> Tensor:
        """Return the tensor of this view in memory.

        `storages` has the storages in memory, by the numbers of the recorded ones.
        """
        tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        return tensor.set_(storages[self.storage], self.offset, self.shape, self.stride)


class _Operation(NamedTuple):
    """Recorded operation.

    function: the operation that torch called.
    done: positional arguments, keyword arguments and result, with views in place of tensors.
    storages: numbers of the storages of all tensors that it reads or writes.
    """

    function: Any
    done: tuple[Any, Any, Any]
    storages: frozenset[int]

    @property
    def result(self) -> Any:
        return self.done[2]


class _Mode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensor mode of the recorded tensors and of their copies. A deep copy of the mode is the
    mode itself.

    Each fake tensor has its mode as an attribute, so that `copy.deepcopy` of a module would
    otherwise copy the mode.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Mode":
        return self


@contextmanager
def _convertible() -> Iterator[None]:
    """Let `to` and `copy.deepcopy` of a module accept parameters without memory inside of the
    context.

    `to` (dtype, device) swaps such a parameter with the converted one. torch refuses to swap a
    tensor with weak references, which FakeTensorMode has to every tensor it makes. `copy.deepcopy`
    asks for the address of the data, which warns (torch 2.13).
    """

    def put(parameter: Tensor, converted: Tensor) -> None:
        parameter.data = converted.data

    exchange = torch.utils.swap_tensors
    torch.utils.swap_tensors = put
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        torch.utils.swap_tensors = exchange


class _Recording(TorchDispatchMode):
    """Dispatch mode that records operations on tensors without memory, and can repeat some of
    them."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._operations: list[_Operation] = []
        # Numbers of the operations that write to a storage, by the storage's number.
        self._writers: dict[int, list[int]] = {}
        self._alive: list[UntypedStorage] = []  # since the id of a freed storage is reused

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            result = function(*args, **kwargs)
        except DataDependentOutputException:  # the code needs a value, as a Python number
            real_args, real_kwargs = tree_map(self._value, (args, kwargs))
            with _disable_current_modes():
                return function(*real_args, **real_kwargs)
        read = {_storage(tensor) for tensor in _fakes((args, kwargs))}
        written_storages = {_storage(tensor) for tensor in _fakes(result)} - read
        for number, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[number] if number < len(args) else kwargs.get(argument.name)
                written_storages |= {_storage(tensor) for tensor in _fakes(given)}
        if written_storages:  # else the results are views of the arguments
            number = len(self._operations)
            done = tree_map(_as_view, (args, kwargs, result))
            self._operations.append(_Operation(function, done, frozenset(read | written_storages)))
            self._alive += (tensor.untyped_storage() for tensor in _fakes((args, kwargs, result)))
            for storage in written_storages:
                self._writers.setdefault(storage, []).append(number)
        return result

    def replacing(self, fake: Tensor, value: Tensor | None) -> Tensor:
        """Return the tensor that replaces the recorded tensor `fake` in a module.

        It is `value`, or a placeholder where `value` is None. A placeholder has the shape and dtype
        of `fake`, and a single element in memory. A parameter is replaced by a parameter.
        """
        is_placeholder = value is None
        tensor = torch.empty((), dtype=fake.dtype).expand(fake.shape) if value is None else value
        if isinstance(fake, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=fake.requires_grad)
        if is_placeholder:
            setattr(tensor, _ATTRIBUTE, (self, fake))
        return tensor

    def made(self, fake: Tensor, may_map: bool = False) -> Tensor:
        """Return the value of the recorded tensor `fake`, in memory of its own.

        With `may_map`, a value that is a tensor of a file is mapped into memory, with the file's
        dtype.
        """
        view = _View.of(fake)
        with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.no_grad():
            numbers = sorted(self._needed(view.storage, len(self._operations)))
            if may_map and len(numbers) == 1:
                only = self._operations[numbers[0]]
                if only.function is _STORED and only.result == view:
                    path, name = only.done[0][:2]
                    return mapped(path, name)
            storages: dict[int, UntypedStorage] = {}
            for number in numbers:
                self._seed_for(number)
                self._do(number, storages)
            value = view.within(storages)
            is_all = value.is_contiguous() and value.nbytes == value.untyped_storage().nbytes()
            return value if is_all else value.clone(memory_format=torch.contiguous_format)

    def drawn(self, fakes: Iterable[FakeTensor]) -> dict[int, Tensor]:
        """Return the values of those of `fakes` that depend on random numbers, by id.

        They are the values of one process that runs every operation in order.
        """
        end = len(self._operations)
        draws = {number for number in range(end) if self._draws(number)}
        needed = set(draws)
        for number in draws:
            for storage in self._operations[number].storages:
                needed |= self._needed(storage, number)
        chosen: dict[int, _View] = {}
        for fake in fakes:
            view = _View.of(fake)
            needed_by_fake = self._needed(view.storage, end)
            if needed_by_fake & draws:
                chosen[id(fake)] = view
                needed |= needed_by_fake
        with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(self._seed)
            storages: dict[int, UntypedStorage] = {}
            for number in sorted(needed):
                self._do(number, storages)
            return {key: view.within(storages).clone() for key, view in chosen.items()}

    def _draws(self, number: int) -> bool:
        """Return whether operation `number` draws random numbers from the CPU's generator."""
        operation = self._operations[number]
        random = torch.Tag.nondeterministic_seeded in operation.function.tags
        return random and all(view.device.type == "cpu" for view in _views(operation.result))

    def _value(self, value: Any) -> Any:
        """Return the value of a recorded tensor, or any other value unchanged."""
        return self.made(value) if isinstance(value, FakeTensor) else value

    def _seed_for(self, number: int) -> None:
        """Seed the CPU's generator for operation `number`, if it draws random numbers."""
        if self._draws(number):
            digest = hashlib.sha256(f"{self._seed} {number}".encode()).digest()
            # torch.manual_seed would also seed the GPUs' generators, permanently.
            torch.default_generator.manual_seed(int.from_bytes(digest[:7], "little"))

    def _do(self, number: int, storages: dict[int, UntypedStorage]) -> None:
        """Repeat operation `number` on storages in memory.

        `storages` has the storages in memory, by the numbers of the recorded ones. The storages of
        the results are added.
        """

        def real(value: Any) -> Any:
            return value.within(storages) if isinstance(value, _View) else value

        operation = self._operations[number]
        args, kwargs = tree_map(real, operation.done[:2])
        result = operation.function(*args, **kwargs)
        for view, tensor in zip(tree_leaves(operation.result), tree_leaves(result), strict=True):
            if isinstance(view, _View):
                storages[view.storage] = tensor.untyped_storage()

    def _needed(self, storage: int, end: int) -> set[int]:
        """Return the numbers of the operations before `end` on which the values of a storage
        depend."""
        needed: set[int] = set()
        left = [(storage, end)]
        while left:
            storage, end = left.pop()
            for number in self._writers.get(storage, ()):
                if number < end and number not in needed:
                    needed.add(number)
                    left += [(other, number) for other in self._operations[number].storages]
        return needed


def _fakes(values: Any) -> Iterator[FakeTensor]:
    return (value for value in tree_leaves(values) if isinstance(value, FakeTensor))


def _views(values: Any) -> Iterator[_View]:
    return (value for value in tree_leaves(values) if isinstance(value, _View))


def _as_view(value: Any) -> Any:
    return _View.of(value) if isinstance(value, FakeTensor) else value


def _storage(tensor: Tensor) -> int:
    """Return the id of a tensor's storage."""
    number: int = tensor.untyped_storage()._cdata
    return number
