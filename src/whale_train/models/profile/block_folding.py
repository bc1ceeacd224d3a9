"""Profile deep models from a few of their blocks: of N equal blocks, three are exported.

A list in a model (`model.layers`) with a run of equal modules is cut to the run's first, second and
last module before the export. Afterwards the other blocks are added to the torch-free graph as
copies. The result is the graph of the whole model, names included. A check ensures that the second
block and the last compute the same, each from the block before it and from values that all blocks
share. A model that fails the check must be exported whole. After TAP's folding of equal subtrees
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

KEPT = 3  # modules of a run: the first, one that stands for all between, the last
_FEWEST = 5  # a shorter run is exported faster than it is unfolded

_Value = int | float | bool | str | None


@dataclass(frozen=True)
class Fold:
    """Run of equal modules in a list of a model.

    path: path of the list.
    start: index of the run's first module in the list.
    count: number of modules in the run.
    """

    path: str
    start: int
    count: int

    @property
    def left_out(self) -> int:
        """Return the number of modules that are missing in the folded list."""
        return self.count - KEPT

    def block(self, index: int) -> str:
        """Return the path of the module at `index` of the list."""
        return f"{self.path}.{index}"


class CannotUnfold(Exception):
    """The exported blocks do not represent all blocks: the model has to be exported whole."""


def folds_of(model: nn.Module) -> tuple[Fold, ...]:
    """Return the longest foldable run of equal modules of every list in `model`.

    Left out are lists inside of a folded one, lists whose modules differ by a setting of the
    model's config, and lists whose run is too short.
    """
    folds: list[Fold] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        if any(path.startswith(f"{fold.path}.") for fold in folds) or _differ_by_config(
            model, len(module)
        ):
            continue
        run = _longest_run(list(module))
        if run is not None:
            folds.append(Fold(path, *run))
    return tuple(folds)


@contextmanager
def folded(model: nn.Module, folds: Sequence[Fold]) -> Iterator[None]:
    """Cut the runs of `folds` in `model` to their first, second and last module inside of the
    context."""
    owners = [(fold, *_owner(model, fold)) for fold in folds]
    for fold, parent, name, whole_list in owners:
        modules = list(whole_list)
        remaining = modules[: fold.start + 2] + modules[fold.start + fold.count - 1 :]
        is_list = isinstance(whole_list, nn.ModuleList)
        made = nn.ModuleList(remaining) if is_list else nn.Sequential(*remaining)
        setattr(parent, name, made)
    try:
        yield
    finally:
        for _, parent, name, whole_list in owners:
            setattr(parent, name, whole_list)


def _owner(model: nn.Module, fold: Fold) -> tuple[nn.Module, str, nn.ModuleList | nn.Sequential]:
    """Return the module that contains the list of a fold, the name of the list in it, and the
    list."""
    owner, _, name = fold.path.rpartition(".")
    parent = model.get_submodule(owner)
    return parent, name, getattr(parent, name)


def unfold(graph: OperationGraph, folds: Sequence[Fold]) -> OperationGraph:
    """Return the graph of the whole model, from the `graph` of the folded model.

    Raises CannotUnfold where the exported blocks do not represent all blocks.
    """
    return numbered(repeated(graph, folds))


def repeated(graph: OperationGraph, folds: Sequence[Fold]) -> OperationGraph:
    """Return the operations of the whole model, under their names in the folded `graph`.

    A copy of an operation is named `NAME@COPY`. Raises CannotUnfold where the exported blocks do
    not represent all blocks.
    """
    for fold in folds:
        graph = _Unfolding(graph, fold).run()
    return graph


def original(operation: Operation) -> str:
    """Return the name, in the folded graph, of the operation that `repeated` copied to
    `operation`."""
    return operation.name.partition("@")[0]


_NAMED = ("input", "output")  # targets of operations that keep their names


def numbered(graph: OperationGraph) -> OperationGraph:
    """Return `graph` with the names of `canonical_names`."""
    names = dict(zip(
        (op.name for op in graph),
        canonical_names(
                (original(op), op.path, op.target not in _NAMED) for op in graph
            ),
        strict=True,
    ))  # fmt: skip
    return OperationGraph(tuple(_renamed(op, names, name=names[op.name]) for op in graph))


def _longest_run(modules: Sequence[nn.Module]) -> tuple[int, int] | None:
    """Return (start, count) of the longest run of equal modules, or None for a run that is not
    worth folding."""
    best, start = (0, 1), 0
    for index in range(1, len(modules) + 1):
        if index == len(modules) or not _equal(modules[start], modules[index], start, index):
            best = max(best, (start, index - start), key=lambda run: run[1])
            start = index
    return best if best[1] >= _FEWEST else None


def _equal(first: nn.Module, second: nn.Module, i: int, j: int) -> bool:
    """Return whether the modules at the indices `i` and `j` of a list are built alike.

    The classes, tensors and settings of all submodules are compared. A setting may be the index of
    the module.
    """
    pairs = zip(first.named_modules(), second.named_modules(), strict=False)
    if sum(1 for _ in first.modules()) != sum(1 for _ in second.modules()):
        return False
    for (path, a), (other_path, b) in pairs:
        if path != other_path or type(a) is not type(b) or _tensors(a) != _tensors(b):
            return False
        first_settings, second_settings = _settings(a), _settings(b)
        if first_settings.keys() != second_settings.keys():
            return False
        for key, value in first_settings.items():
            is_index = value is not True and value == i and second_settings[key] == j
            if second_settings[key] != value and not is_index:
                return False
    return True


def _tensors(module: nn.Module) -> list[tuple[str, tuple[int, ...], str, bool]]:
    """Return name, shape, dtype and requires_grad of a module's own parameters and buffers."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in own]


def _settings(module: nn.Module) -> Mapping[str, _Value]:
    """Return the module's own public attributes that are numbers, strings or None."""
    return {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("_") and isinstance(value, int | float | bool | str | None)
    }


def _differ_by_config(model: nn.Module, count: int) -> bool:
    """Return whether a setting in the model's config differs among the `count` modules of a list.

    Such a setting is a list with an entry for each module, for example for alternating kinds of
    attention.
    """
    config = getattr(model, "config", None)
    lists = (x for x in vars(config).values() if isinstance(x, list | tuple)) if config else ()
    return any(len(x) == count and any(a != b for a, b in pairwise(x)) for x in lists)


class _Unfolding:
    """Expansion of one run of blocks in a graph of the folded model.

    The missing blocks are copied from the operations of the second and the last block. The first
    block may compute values that export shares among all blocks (a product of sizes).
    """

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
        # A weight that all blocks share has its path in the last block.
        weights = {operation.name for operation in self.last if operation.path}
        self.shared = weights.intersection(x for op in self.second for x in references(op))
        self.check()

    def number_of(self, operation: Operation) -> int | None:
        """Return the index in the folded run of the block that contains an operation.

        The run's first block has index 0. Return None for an operation outside of the list.
        """
        for path in (operation.path, operation.module):
            if path.startswith(f"{self.fold.path}."):
                index = path[len(self.fold.path) + 1 :].partition(".")[0]
                return int(index) - self.fold.start
        return None

    def check(self) -> None:
        """Raise CannotUnfold unless the second and the last block can represent the missing
        blocks."""
        where = self.fold.path
        if not len(self.second) == len(self.last) > 0:
            raise CannotUnfold(f"{where}: blocks differ in number of operations")
        targets = {operation.name: operation.target for operation in self.first}
        for b, c in zip(self.second, self.last, strict=True):
            second_names, last_names = list(references(b)), list(references(c))
            second_path = self.fold.block(self.fold.start + 1)
            same_path = (
                _moved_path(c.path, self.fold.block(self.fold.start + 2), second_path) == b.path
            )
            is_equal = _without_names(b) == _without_names(c) and same_path
            if not is_equal or len(second_names) != len(last_names):
                raise CannotUnfold(f"{where}: {b.name} and {c.name} differ")
            for our_name, other in zip(second_names, last_names, strict=True):
                if other in self.shared:
                    is_equal = our_name == other
                elif other in self.in_last:
                    is_equal = self.in_second.get(our_name) == self.in_last[other]
                elif other in self.in_second:  # passed on from block to block
                    is_equal = targets.get(our_name) == self.second[self.in_second[other]].target
                else:
                    is_equal = our_name == other
                if not is_equal:
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
        """Return the graph with all blocks.

        Raises CannotUnfold where a value would be read before it is computed.
        """
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
        last_path = self.fold.block(self.fold.start + KEPT - 1)
        copy_path = self.fold.block(self.fold.start + 1 + copy)
        return _renamed(
            source,
            {name: self.name_for(name, copy) for name in references(source)},
            name=self.copy_name(number, copy),
            module=_moved_path(source.module, last_path, copy_path),
            path=_moved_path(source.path, last_path, copy_path),
        )

    def name_for(self, name: str, copy: int) -> str:
        """Return the name, in the `copy`-th block after the second, of the value `name` of the last
        block."""
        if name in self.shared:
            return name
        if name in self.in_last:
            return self.copy_name(self.in_last[name], copy)
        if name in self.in_second:
            return self.copy_name(self.in_second[name], copy - 1)
        return name

    def copy_name(self, number: int, copy: int) -> str:
        """Return the name of operation `number` in the `copy`-th block after the second.

        The name is unique in the graph. `numbered` replaces it by the name in the whole model's
        graph.
        """
        name = self.second[number].name
        return f"{name}@{copy}" if copy else name

    def moved(self, operation: Operation) -> Operation:
        """Return an operation outside of the second block, with the paths of the whole model.

        An operation of the last block reads the values of the last copy.
        """
        names = {name: name for name in references(operation)}
        if operation.name in self.in_last:
            for name in names.keys() & self.in_second.keys():
                names[name] = self.copy_name(self.in_second[name], self.fold.left_out)
        old = new = ""
        number = self.number_of(operation)
        if number is not None and number >= KEPT - 1:
            index = self.fold.start + number
            old, new = self.fold.block(index), self.fold.block(index + self.fold.left_out)
        return _renamed(
            operation,
            names,
            module=_moved_path(operation.module, old, new),
            path=_moved_path(operation.path, old, new),
        )


def _check_order(operations: Sequence[Operation]) -> None:
    """Raise CannotUnfold unless every value is computed once, and before it is read."""
    known: set[str] = set()
    for operation in operations:
        if operation.name in known or not known.issuperset(references(operation)):
            raise CannotUnfold(f"{operation.name} would not stand where it can")
        known.add(operation.name)


def _without_names(operation: Operation) -> Operation:
    """Return an operation without names and paths, for comparison with that of an equal block."""
    nameless = dict.fromkeys(references(operation), "")
    return _renamed(operation, nameless, name="", module="", path="")


def references(operation: Operation) -> Iterator[str]:
    """Yield the names of all values that an operation reads, in order, with repetitions."""

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
    """Return `operation` with the values it reads renamed by `names`, and `changes` of fields."""

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


def _moved_path(path: str, old: str, new: str) -> str:
    """Return a path in the module `old` as the same path in the module `new`, or any other path
    unchanged."""
    if old and (path == old or path.startswith(f"{old}.")):
        return new + path[len(old) :]
    return path
