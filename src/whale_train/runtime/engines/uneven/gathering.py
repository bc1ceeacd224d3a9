"""Gather the weights of a block while the block runs, and free them afterwards (ZeRO 3).

A block is gathered when one of its weights is read: as an attribute of its module, when its module
is called, or when a backward takes it out of what autograd saved. So no model is rewritten, and a
module may read the weights of another. A block is freed when its forward ends, and in the
backward when its gradients are on their way to their owners.
"""

from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from whale_train.runtime.engines.uneven.flat_unit import FlatUnit, storage_key
from whale_train.strategies.graph.block_paths import block_of, unit_of


def blocks_by_parameter(
    module: nn.Module, compiled: Sequence[nn.Module]
) -> dict[nn.Parameter, str]:
    """Return the path of the block of every parameter, in the order of the parameters. A tied one
    belongs to the block that names it first. Each of the modules `compiled` is one block, since the
    hooks of modules inside do nothing in compiled code."""
    names = {id(part): name for name, part in module.named_modules()}
    at_once = {names[id(part)] for part in compiled}
    blocks: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters():
        own = name.rpartition(".")[0]
        blocks[parameter] = unit_of(own, at_once) or block_of(own)
    return blocks


class Gathering:
    """The gathered weights of a module.

    module: the module.
    blocks: the units of each block, by the path of the block's module.
    gathers: called with a unit when it is made, gathered (True) or freed (False); None: nothing is
        called.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Mapping[str, Sequence[FlatUnit]],
        gathers: Callable[[FlatUnit, bool], None] | None = None,
    ) -> None:
        self._gathers = gathers or (lambda unit, is_gathered: None)
        self._blocks = {path: tuple(units) for path, units in blocks.items()}
        self._block_of = {u: path for path, units in self._blocks.items() for u in units}
        self._units = {p: unit for unit in self._block_of for p in unit.parameters}
        self._by_storage = {unit.storage_key: unit for unit in self._block_of}
        self._is_active = self._is_backward = False
        self._whole: list[str] = []  # the gathered blocks, in the order they were gathered
        self._again: set[str] = set()  # blocks that a backward has read in a forward
        self._waiting = {path: self._trained(path) for path in self._blocks}
        for unit in self._block_of:
            self._gathers(unit, False)
        modules = dict(module.named_modules())
        for path, units in self._blocks.items():
            held = [parameter for unit in units for parameter in unit.parameters]
            modules[path].register_forward_pre_hook(self._before_forward(held[:1]))
            modules[path].register_forward_hook(self._after_forward(path))
        for part in modules.values():
            own = [p for p in part._parameters.values() if p is not None]
            if own:
                part.register_forward_pre_hook(self._before_forward(own))
                part._parameters = _Read(part._parameters, self._read)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Gather what a forward in this context reads, and free all of it at the end."""
        self._is_active = True
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._is_active = False
            self.free()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Gather what a backward in this context reads, and free all of it at the end."""
        self._is_active = self._is_backward = True
        try:
            yield
        finally:
            self._is_active = self._is_backward = False
            self.free()

    def done(self, unit: FlatUnit) -> None:
        """Free the block of `unit`, whose gradients have been taken, if no other trained unit of it
        still waits for gradients."""
        path = self._block_of[unit]
        self._waiting[path].discard(unit)
        if not self._waiting[path]:
            self._free(path)
            self._waiting[path] = self._trained(path)

    def free(self) -> None:
        """Free all blocks."""
        for path in list(self._whole):
            self._free(path)
        self._waiting = {path: self._trained(path) for path in self._blocks}

    def _trained(self, path: str) -> set[FlatUnit]:
        return {unit for unit in self._blocks[path] if unit.is_trained}

    def _gather(self, path: str) -> None:
        if path in self._whole:
            return
        if self._is_backward:
            # A node of autograd reads the weights that it saved, and no others. A block that runs
            # its forward again saves them once more, until its gradients are taken.
            for before in self._whole[:-1]:
                if before not in self._again:
                    self._free(before)
        self._whole.append(path)
        for unit in self._blocks[path]:
            unit.gather()
            self._gathers(unit, True)

    def _free(self, path: str) -> None:
        self._again.discard(path)
        if path in self._whole:
            self._whole.remove(path)
            for unit in self._blocks[path]:
                unit.release()
                self._gathers(unit, False)

    def _read(self, parameter: nn.Parameter) -> None:
        """Gather the block of a parameter that is about to be read."""
        if torch.compiler.is_compiling():  # the block was gathered before
            return
        if self._is_active and parameter in self._units:
            path = self._block_of[self._units[parameter]]
            self._gather(path)
            if self._is_backward:
                self._again.add(path)

    def _before_forward(self, own: Sequence[nn.Parameter]) -> Callable[..., None]:
        def gather(*_: object) -> None:
            for parameter in own:
                self._read(parameter)

        return gather

    def _after_forward(self, path: str) -> Callable[..., None]:
        def free(*_: object) -> None:
            if torch.compiler.is_compiling():
                return
            if not self._is_backward:  # a forward that runs again is read by the backward
                self._free(path)

        return free

    def _pack(self, tensor: Tensor) -> Any:
        """Return a tensor that autograd saves, with the unit that its memory belongs to, if any."""
        unit = self._by_storage.get(storage_key(tensor))
        return tensor if unit is None else (tensor, unit)

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        tensor, unit = saved
        self._gather(self._block_of[unit])
        assert isinstance(tensor, Tensor)
        return tensor


class _Read(dict[str, nn.Parameter | None]):
    """The parameters of a module by name, which calls `read` with each that is taken by its name,
    as attributes of a module are, or in an iteration over all."""

    def __init__(
        self, held: Mapping[str, nn.Parameter | None], read: Callable[[nn.Parameter], None]
    ) -> None:
        super().__init__(held)
        self._read = read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._read(parameter)
        return parameter

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        for parameter in self.values():
            if parameter is not None:
                self._read(parameter)
        return super().items()
