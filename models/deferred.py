"""Models whose initial values are made tensor by tensor, when somebody asks for them.

A model is built on tensors without memory, and what its constructor does to them is written down. A
parameter's value is made by doing so much of it again as that value depends on; random numbers come
from a generator seeded by the seed and the operation's number. So values depend neither on the plan
nor on who asks for them first, and nobody has to hold the whole model; they are not those that one
process would draw one after another. The idea is torchdistx's deferred initialisation.
"""

import hashlib
from collections.abc import Callable, Iterator
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

_ATTRIBUTE = "_whale_deferred"  # of a placeholder: its recording, and the tensor recorded


def deferred(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return the module that `build` gives, with placeholders for its parameters and buffers: of
    their shapes and dtypes, and without memory. `made` gives their values."""
    recording = _Recording(seed)
    with FakeTensorMode(allow_non_fake_inputs=True), recording:
        module = build()
    placeholders: dict[int, Tensor] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if isinstance(tensor, FakeTensor):
                    if id(tensor) not in placeholders:
                        placeholders[id(tensor)] = recording.placeholder(tensor)
                    held[name] = placeholders[id(tensor)]  # type: ignore[assignment]
        for name, value in vars(part).items():
            if isinstance(value, FakeTensor):  # of neither; a forward reads it as it is
                vars(part)[name] = recording.made(value)
    return module


def made(tensor: Tensor) -> Tensor:
    """Return the initial value that a placeholder of `deferred` stands for; of any other tensor,
    itself."""
    recorded = getattr(tensor, _ATTRIBUTE, None)
    if recorded is None:
        return tensor
    recording, fake = recorded
    value: Tensor = recording.made(fake)
    return value


def fill(tensor: Tensor) -> Callable[[], Tensor] | None:
    """Turn a placeholder into a tensor with its value, and return what makes that value once more.
    Return None for any other tensor, which stays as it is."""
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


class _Operation(NamedTuple):
    function: Any
    args: Any
    kwargs: Any
    result: Any
    storages: frozenset[int]  # of all tensors it reads or writes


class _Recording(TorchDispatchMode):
    """Writes down operations on tensors without memory, and does some of them again."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._operations: list[_Operation] = []
        self._writers: dict[int, list[int]] = {}  # of a storage: numbers of operations

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            result = function(*args, **kwargs)
        except DataDependentOutputException:  # a value is wanted now, as a Python number
            real_args, real_kwargs = tree_map(self._value, (args, kwargs))
            with _disable_current_modes():
                return function(*real_args, **real_kwargs)
        results = list(_fakes(result))
        if results:
            written = {_storage(tensor) for tensor in results}
            for argument, given in zip(function._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written |= {_storage(tensor) for tensor in _fakes(given)}
            read = {_storage(tensor) for tensor in _fakes((args, kwargs))}
            number = len(self._operations)
            operation = _Operation(function, args, kwargs, result, frozenset(read | written))
            self._operations.append(operation)
            for storage in written:
                self._writers.setdefault(storage, []).append(number)
        return result

    def placeholder(self, fake: Tensor) -> Tensor:
        """Return a tensor of the same shape and dtype, all of whose elements are one."""
        tensor = torch.empty((), dtype=fake.dtype).expand(fake.shape)
        if isinstance(fake, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=fake.requires_grad)
        setattr(tensor, _ATTRIBUTE, (self, fake))
        return tensor

    def made(self, fake: Tensor) -> Tensor:
        """Return the value of a recorded tensor, in memory of its own."""
        with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.no_grad():
            storages: dict[int, UntypedStorage] = {}
            for number in sorted(self._needed(_storage(fake), len(self._operations))):
                self._do(number, storages)
            return _tensor_of(fake, storages).clone(memory_format=torch.contiguous_format)

    def _value(self, value: Any) -> Any:
        return self.made(value) if isinstance(value, FakeTensor) else value

    def _do(self, number: int, storages: dict[int, UntypedStorage]) -> None:
        """Do an operation again, on what `storages` have by the recorded ones, with what it makes
        added to them."""

        def real(value: Any) -> Any:
            return _tensor_of(value, storages) if isinstance(value, FakeTensor) else value

        operation = self._operations[number]
        if torch.Tag.nondeterministic_seeded in operation.function.tags:
            digest = hashlib.sha256(f"{self._seed} {number}".encode()).digest()
            # Not torch's, which would seed the GPUs' generators too, and for good.
            torch.default_generator.manual_seed(int.from_bytes(digest[:7], "little"))
        args, kwargs = tree_map(real, (operation.args, operation.kwargs))
        result = operation.function(*args, **kwargs)
        for fake, tensor in zip(tree_leaves(operation.result), tree_leaves(result), strict=True):
            if isinstance(fake, FakeTensor):
                storages[_storage(fake)] = tensor.untyped_storage()

    def _needed(self, storage: int, end: int) -> set[int]:
        """Return the numbers of the operations before `end` that a storage's values depend on."""
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


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _tensor_of(fake: Tensor, storages: dict[int, UntypedStorage]) -> Tensor:
    """Return the tensor that a recorded one stands for: a view of its storage."""
    return torch.empty(0, dtype=fake.dtype).set_(
        storages[_storage(fake)],
        fake.storage_offset(),
        fake.shape,
        fake.stride(),
    )
