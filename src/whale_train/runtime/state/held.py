"""The blocks of a run's state that a rank holds, under their names in a checkpoint.

A parameter's or buffer's name is its path in the user's model (the first path of a tied tensor). An
optimizer's moment is `state.PATH.exp_avg` or the like, as in torch's flattened optimizer state. No
name and no block depends on the plan, so any plan reads a checkpoint of any other.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

from whale_train.checkpoints.safetensors_files import Block
from whale_train.models.export.export import model_path
from whale_train.models.loss_module import LossModule
from whale_train.models.weights.kept_tensors import kept_tensors
from whale_train.optimizers.state_forms import entry_of
from whale_train.runtime.engines.base import Engine
from whale_train.runtime.graph.segment import SegmentModule
from whale_train.runtime.state.blocks import placement, whole
from whale_train.strategies.plan.plan import Plan

Folder = Literal["model", "optimizer"]


@dataclass(frozen=True)
class LocalBlock:
    """A block of a tensor that a rank holds.

    folder: the folder of the checkpoint that the tensor is in.
    name: the name of the tensor in the checkpoint.
    block: the position and shape of the block in the whole tensor.
    tensor: the elements, a view of the rank's state. If `number` is given, a copy.
    is_owner: True if this rank saves the block.
    number: for a number, or a scalar, of an optimizer's state: the dictionary that contains it, and
        its key there. None for any other block.
    is_buffer: True for a block of a buffer.
    """

    folder: Folder
    name: str
    block: Block
    tensor: Tensor
    is_owner: bool
    number: tuple[dict[str, Any], str] | None = None
    is_buffer: bool = False


def paths_of(engine: Engine) -> dict[int, str]:
    """Return the paths, in the user's model, of the tensors of an engine's module, by tensor id."""
    paths: dict[int, str] = {}
    for owner in engine.module.modules():
        if isinstance(owner, SegmentModule):
            paths |= {id(tensor): path for path, tensor in owner.held()}
    if paths:
        return paths
    named = (*engine.module.named_parameters(), *engine.module.named_buffers())
    return {id(tensor): model_path(name) for name, tensor in named}


class RankState:
    """The state that `rank` holds of the tensors `names`, with their optimizer states.

    All ranks must make it together: the first rank that holds a block without an optimizer state
    saves the block. Rank 0 saves a tensor that no rank holds because no loss depends on it; its
    values are taken from `module`, whose weights are still the initial ones.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        plan: Plan,
        rank: int,
        names: frozenset[str],
        module: LossModule,
    ) -> None:
        self._engines, self._plan, self._rank, self._names = engines, plan, rank, names
        self._saved_here = frozenset[tuple[str, Block]]()
        constants = [(block.name, block.block) for block in self._constants()]
        held: list[list[tuple[str, Block]]] = [[]] * plan.world_size
        dist.all_gather_object(held, constants)
        before = {key for keys in held[:rank] for key in keys}
        self._saved_here = frozenset(key for key in constants if key not in before)
        somewhere = {path for task_graph in plan.task_graphs for path in task_graph.trained}
        somewhere |= {path for keys in held for path, _ in keys}
        unheld = names - somewhere if rank == 0 else frozenset()
        self._left = {path: x for path, x in kept_tensors(module).items() if path in unheld}

    def blocks(self) -> list[LocalBlock]:
        """Return all blocks of this rank.

        Call it outside of an update.
        """
        trained = (x for engine in self._engines for x in _trained(engine, self._plan, self._rank))
        return [*trained, *self.untrained()]

    def untrained(self) -> Iterator[LocalBlock]:
        """Yield the blocks of buffers, and of parameters that are frozen or that the loss does not
        depend on.

        On rank 0 these include the tensors that no rank holds.
        """
        yield from self._constants()
        for path, tensor in self._left.items():
            is_buffer = not isinstance(tensor, nn.Parameter)
            for block, view in whole(tensor.shape).blocks(tensor.detach()):
                yield LocalBlock("model", path, block, view, True, is_buffer=is_buffer)

    def make(self, is_saved: Callable[[str], bool]) -> None:
        """Create the optimizer states of the trained parameters whose path `is_saved` accepts.

        An optimizer would otherwise create them in a later update.
        """
        for engine in self._engines:
            paths = paths_of(engine)
            trained = (p for p in engine.module.parameters() if p.requires_grad)
            engine.make_states([p for p in trained if is_saved(paths[id(p)])])

    def read(self) -> None:
        """Make the engines use the values that were written to the blocks."""
        for engine in self._engines:
            engine.read_states()

    def _constants(self) -> Iterator[LocalBlock]:
        """Yield the blocks of the buffers and of the untrained parameters that engines hold."""
        for engine in self._engines:
            paths = paths_of(engine)
            trained = {id(p) for p in engine.module.parameters() if p.requires_grad}
            for tensor in (*engine.module.parameters(), *engine.module.buffers()):
                path = paths[id(tensor)]
                if id(tensor) in trained or path not in self._names:
                    continue
                where = placement(self._plan, self._rank, path, _local_shape(tensor))
                held, start = engine.constant(tensor)
                for block, view in where.blocks(held, start):
                    is_owner = (path, block) in self._saved_here
                    is_buffer = not isinstance(tensor, nn.Parameter)
                    yield LocalBlock("model", path, block, view, is_owner, is_buffer=is_buffer)


def _trained(engine: Engine, plan: Plan, rank: int) -> Iterator[LocalBlock]:
    """Yield the blocks of an engine's trained parameters and of its optimizer states."""
    paths = paths_of(engine)
    for state in engine.states():
        path = paths[id(state.parameter)]
        where = placement(plan, rank, path, _local_shape(state.parameter))
        tensors: dict[tuple[Folder, str], Tensor] = {("model", path): state.value}
        tensors |= {("optimizer", f"state.{path}.{k}"): slot for k, slot in state.slots.items()}
        for (folder, name), tensor in tensors.items():
            for block, view in where.blocks(tensor, state.start):
                yield LocalBlock(folder, name, block, view, state.is_owner)
        is_owner = state.is_owner and not state.start and where.has_first_element
        for key in state.apart:
            entry, name = entry_of(state.entries, key), f"state.{path}.{key}"
            if isinstance(entry, Tensor) and entry.dim():
                for block, view in whole(entry.shape).blocks(entry.detach()):
                    yield LocalBlock("optimizer", name, block, view, is_owner)
                continue
            copied = _copied(entry, key)
            number = (state.entries, key)
            yield LocalBlock("optimizer", name, Block((), ()), copied, is_owner, number=number)
    for parameter in engine.computed_with():
        path = paths[id(parameter)]
        where = placement(plan, rank, path, tuple(parameter.shape))
        for block, view in where.blocks(parameter.detach()):
            yield LocalBlock("model", path, block, view, False)


def _copied(number: Any, name: str) -> Tensor:
    """Return a copy of the number `name` of an optimizer's state, as a scalar on the host.

    Counts of updates are fp32 in every checkpoint. Other Python numbers are fp64.
    """
    if name == "step":
        return torch.tensor(float(number))
    if isinstance(number, Tensor):
        return number.detach().cpu().clone()
    return torch.tensor(number, dtype=torch.float64)


def _local_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a rank's tensor before ZeRO 3 partitioned it among the copies."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))
