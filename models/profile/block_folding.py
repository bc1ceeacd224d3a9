"""Deep models measured by a few of their blocks: equal blocks are exported three times, not N.

A list of a model (`model.layers`) that holds a run of equal modules is cut to the run's first,
second and last before the export; afterwards the torch-free graph gets the others back, as copies
of the second. The result is the graph of the whole model, names and all: it is checked that the
second block and the last compute the same, each of the block before it and of what all share, and
whatever is not so is left to be exported whole. After TAP's folding of equal subtrees
(arXiv 2302.00247).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from torch import nn

from whale_train.models.export.export import canonical_names
from whale_train.strategies.graph.operation_graph import Argument, Operation, OperationGraph, Ref

KEPT = 3  # of a run: the first, one that stands for all between, the last
_FEWEST = 5  # a shorter run is exported sooner than it is unfolded

_Value = int | float | bool | str | None


@dataclass(frozen=True)
class Fold:
    """A run of `count` equal modules in the list at `path`, from index `start` on."""

    path: str
    start: int
    count: int

    @property
    def left_out(self) -> int:
        return self.count - KEPT

    def block(self, index: int) -> str:
        return f"{self.path}.{index}"


class CannotUnfold(Exception):
    """What stands for all blocks does not: the model has to be exported whole."""


def folds_of(model: nn.Module) -> tuple[Fold, ...]:
    """Return the longest run of equal modules in every list of `model` that is inside of no
    other."""
    found: list[Fold] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        if any(path.startswith(f"{fold.path}.") for fold in found) or _differ_by_config(
            model, len(module)
        ):
            continue
        run = _longest_run(list(module))
        if run is not None:
            found.append(Fold(path, *run))
    return tuple(found)


@contextmanager
def folded(model: nn.Module, folds: Sequence[Fold]) -> Iterator[None]:
    """`model` with the runs of `folds` cut to what is kept of them, while inside."""
    whole = [(each, *_owner(model, each)) for each in folds]
    for each, parent, name, whole_list in whole:
        modules = list(whole_list)
        kept = modules[: each.start + 2] + modules[each.start + each.count - 1 :]
        is_list = isinstance(whole_list, nn.ModuleList)
        made = nn.ModuleList(kept) if is_list else nn.Sequential(*kept)
        setattr(parent, name, made)
    try:
        yield
    finally:
        for _, parent, name, whole_list in whole:
            setattr(parent, name, whole_list)


def _owner(model: nn.Module, each: Fold) -> tuple[nn.Module, str, nn.ModuleList | nn.Sequential]:
    """Return what holds the list of a fold, under what name, and the list."""
    owner, _, name = each.path.rpartition(".")
    parent = model.get_submodule(owner)
    return parent, name, getattr(parent, name)


def unfold(graph: OperationGraph, folds: Sequence[Fold]) -> OperationGraph:
    """Return the graph of the whole model, from that of the folded one. Raises CannotUnfold."""
    return numbered(repeated(graph, folds))


def repeated(graph: OperationGraph, folds: Sequence[Fold]) -> OperationGraph:
    """Return the whole model's operations under the names they have in the folded `graph`, and
    copies of them as `NAME@COPY`. Raises CannotUnfold."""
    for each in folds:
        graph = _Unfolding(graph, each).run()
    return graph


def original(operation: Operation) -> str:
    """Return the name in the folded graph of what `repeated` made an operation of."""
    return operation.name.partition("@")[0]


_NAMED = ("input", "output")  # that keep their names


def numbered(graph: OperationGraph) -> OperationGraph:
    """`graph` with its operations named as `canonical_names` would."""
    names = dict(zip(
        (op.name for op in graph),
        canonical_names(
                (original(op), op.path, op.target not in _NAMED) for op in graph
            ),
        strict=True,
    ))  # fmt: skip
    return OperationGraph(tuple(_renamed(op, names, name=names[op.name]) for op in graph))


def _longest_run(modules: Sequence[nn.Module]) -> tuple[int, int] | None:
    """Return (start, count) of the longest run of equal modules, if it is worth folding."""
    best, start = (0, 1), 0
    for index in range(1, len(modules) + 1):
        if index == len(modules) or not _equal(modules[start], modules[index], start, index):
            best = max(best, (start, index - start), key=lambda run: run[1])
            start = index
    return best if best[1] >= _FEWEST else None


def _equal(first: nn.Module, second: nn.Module, i: int, j: int) -> bool:
    """Return whether two modules at the indices `i` and `j` of a list are built alike: the classes,
    shapes and settings of all there is in them; a setting may be the index itself."""
    pairs = zip(first.named_modules(), second.named_modules(), strict=False)
    if sum(1 for _ in first.modules()) != sum(1 for _ in second.modules()):
        return False
    for (path, a), (other_path, b) in pairs:
        if path != other_path or type(a) is not type(b) or _tensors(a) != _tensors(b):
            return False
        ours, theirs = _settings(a), _settings(b)
        if ours.keys() != theirs.keys():
            return False
        for key, value in ours.items():
            is_index = value is not True and value == i and theirs[key] == j
            if theirs[key] != value and not is_index:
                return False
    return True


def _tensors(module: nn.Module) -> list[tuple[str, tuple[int, ...], str, bool]]:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in own]


def _settings(module: nn.Module) -> Mapping[str, _Value]:
    return {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("_") and isinstance(value, int | float | bool | str | None)
    }


def _differ_by_config(model: nn.Module, count: int) -> bool:
    """Return whether a setting of the model is a list with an entry for each of `count` modules,
    which are not all the same: kinds of attention that take turns."""
    config = getattr(model, "config", None)
    lists = (x for x in vars(config).values() if isinstance(x, list | tuple)) if config else ()
    return any(len(x) == count and any(a != b for a, b in pairwise(x)) for x in lists)


class _Unfolding:
    """One run of blocks given back to a graph. `second` and `last` are the operations of the two
    blocks that the others are made of; the first may compute for all what export lets them share
    (a product of sizes)."""

    def __init__(self, graph: OperationGraph, fold: Fold) -> None:
        self.graph, self.fold = graph, fold
        blocks: list[list[Operation]] = [[] for _ in range(KEPT)]
        for operation in graph:
            number = self.number_of(operation)
            if number is not None and 0 <= number < KEPT:
                blocks[number].append(operation)
        self.first, self.second, self.last = blocks
        self.in_second = {operation.name: i for i, operation in enumerate(self.second)}
        self.in_last = {operation.name: i for i, operation in enumerate(self.last)}
        # Weights that all blocks read go by their last place.
        weights = {operation.name for operation in self.last if operation.path}
        self.shared = weights.intersection(x for op in self.second for x in references(op))
        self.check()

    def number_of(self, operation: Operation) -> int | None:
        """Return the place, counted from the run's first, of the block an operation belongs to."""
        for path in (operation.path, operation.module):
            if path.startswith(f"{self.fold.path}."):
                index = path[len(self.fold.path) + 1 :].partition(".")[0]
                return int(index) - self.fold.start
        return None

    def check(self) -> None:
        """Raise CannotUnfold unless what lies between the first and the last block can be made
        of these two."""
        where = self.fold.path
        if not len(self.second) == len(self.last) > 0:
            raise CannotUnfold(f"{where}: blocks differ in number of operations")
        targets = {operation.name: operation.target for operation in self.first}
        for b, c in zip(self.second, self.last, strict=True):
            ours, theirs = list(references(b)), list(references(c))
            there = self.fold.block(self.fold.start + 1)
            same_path = _moved_path(c.path, self.fold.block(self.fold.start + 2), there) == b.path
            alike = _without_names(b) == _without_names(c) and same_path
            if not alike or len(ours) != len(theirs):
                raise CannotUnfold(f"{where}: {b.name} and {c.name} differ")
            for mine, other in zip(ours, theirs, strict=True):
                if other in self.shared:
                    alike = mine == other
                elif other in self.in_last:
                    alike = self.in_second.get(mine) == self.in_last[other]
                elif other in self.in_second:  # handed on from block to block
                    alike = targets.get(mine) == self.second[self.in_second[other]].target
                else:
                    alike = mine == other
                if not alike:
                    raise CannotUnfold(f"{where}: {b.name} and {c.name} read different values")
        inside = self.in_second.keys() | self.in_last.keys()
        for operation in self.graph:
            if operation.name not in inside and not self.in_second.keys().isdisjoint(
                references(operation)
            ):
                raise CannotUnfold(f"{operation.name} reads out of a block in the middle")
        computed = [op.name in inside for op in self.graph if not op.path]
        within = computed[computed.index(True) :]
        if not all(within[: sum(within)]):
            raise CannotUnfold(f"{where}: something is computed between its blocks")

    def run(self) -> OperationGraph:
        made: list[Operation] = []
        for in_middle, operations in groupby(self.graph, key=lambda op: op.name in self.in_second):
            run = list(operations)
            if not in_middle:
                made += [self.moved(operation) for operation in run]
                continue
            made += run
            for copy in range(1, self.fold.left_out + 1):
                made += [self.copied(self.in_second[operation.name], copy) for operation in run]
        _check_order(made)
        return OperationGraph(tuple(made))

    def copied(self, number: int, copy: int) -> Operation:
        """Return the operation `number` of the `copy`-th block after the second."""
        source = self.last[number]
        here = self.fold.block(self.fold.start + KEPT - 1)
        there = self.fold.block(self.fold.start + 1 + copy)
        return _renamed(
            source,
            {name: self.name_for(name, copy) for name in references(source)},
            name=self.copy_name(number, copy),
            module=_moved_path(source.module, here, there),
            path=_moved_path(source.path, here, there),
        )

    def name_for(self, name: str, copy: int) -> str:
        """Return what the last block calls `name`, as the `copy`-th block after the second calls
        it."""
        if name in self.shared:
            return name
        if name in self.in_last:
            return self.copy_name(self.in_last[name], copy)
        if name in self.in_second:
            return self.copy_name(self.in_second[name], copy - 1)
        return name

    def copy_name(self, number: int, copy: int) -> str:
        """Return a name of the copy's own: `numbered` gives the one it has in the whole model's
        graph."""
        name = self.second[number].name
        return f"{name}@{copy}" if copy else name

    def moved(self, operation: Operation) -> Operation:
        """Return an operation outside of the middle, under the paths of the whole model; the last
        block reads the last copy."""
        names = {name: name for name in references(operation)}
        if operation.name in self.in_last:
            for name in names.keys() & self.in_second.keys():
                names[name] = self.copy_name(self.in_second[name], self.fold.left_out)
        here = there = ""
        number = self.number_of(operation)
        if number is not None and number >= KEPT - 1:
            index = self.fold.start + number
            here, there = self.fold.block(index), self.fold.block(index + self.fold.left_out)
        return _renamed(
            operation,
            names,
            module=_moved_path(operation.module, here, there),
            path=_moved_path(operation.path, here, there),
        )


def _check_order(operations: Sequence[Operation]) -> None:
    """Raise CannotUnfold unless every value is there before it is read."""
    known: set[str] = set()
    for operation in operations:
        if operation.name in known or not known.issuperset(references(operation)):
            raise CannotUnfold(f"{operation.name} would not stand where it can")
        known.add(operation.name)


def _without_names(operation: Operation) -> Operation:
    """Return what two operations of equal blocks have in common."""
    nameless = dict.fromkeys(references(operation), "")
    return _renamed(operation, nameless, name="", module="", path="")


def references(operation: Operation) -> Iterator[str]:
    """Yield the names of all that an operation reads, each as often as it is read, in order."""

    def visit(argument: Argument) -> Iterator[str]:
        if isinstance(argument, Ref):
            yield argument.name
        elif isinstance(argument, tuple):
            for part in argument:
                yield from visit(part)

    yield from visit(operation.args)
    for _, argument in operation.kwargs:
        yield from visit(argument)
    yield from operation.after


def _renamed(operation: Operation, names: Mapping[str, str], **changes: Any) -> Operation:
    """`operation` reading the values that `names` says, and changed as `changes` says."""

    def visit(argument: Argument) -> Argument:
        if isinstance(argument, Ref):
            return Ref(names[argument.name])
        if isinstance(argument, tuple):
            return tuple(visit(part) for part in argument)
        return argument

    return replace(
        operation,
        args=tuple(visit(argument) for argument in operation.args),
        kwargs=tuple((key, visit(argument)) for key, argument in operation.kwargs),
        after=tuple(names[name] for name in operation.after),
        **changes,
    )


def _moved_path(path: str, here: str, there: str) -> str:
    if here and (path == here or path.startswith(f"{here}.")):
        return there + path[len(here) :]
    return path
