"""The input of a rule of `independence`: one operation, its arguments and its inputs' states."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from whale_train.strategies.graph.operation_graph import (
    Argument,
    Operation,
    OperationGraph,
    Ref,
    Shape,
    Size,
)
from whale_train.strategies.independence.states import (
    FIXED,
    PerSample,
    RowPosition,
    State,
    batch_dims,
    beside,
)


@dataclass(frozen=True)
class Refused:
    """A rule's proof that samples meet in an operation.

    because: completes the sentence "the operation ...".
    """

    because: str


# None: the rule cannot say.
Answer = State | Refused | None
StateRule = Callable[["Call"], Answer]


@dataclass(frozen=True)
class Call:
    """An operation whose state a rule derives.

    graph: the graph of the operation.
    operation: the operation.
    states: the states of all earlier values, by name.
    batch_norms: the modules whose statistics the runtime computes over the whole batch.
    """

    graph: OperationGraph
    operation: Operation
    states: Mapping[str, State]
    batch_norms: frozenset[str] = frozenset()

    @property
    def shape(self) -> Shape:
        """Return the shape of the result; () where it is no tensor."""
        return self.operation.shape or ()

    @property
    def kind(self) -> str:
        """Return the operation's name without its namespace: `add.Tensor`."""
        return self.operation.target.removeprefix("aten.")

    def argument(self, position: int, name: str = "", default: Argument = None) -> Argument:
        """Return the argument at `position` or the keyword `name`; `default` if neither is
        given."""
        if position < len(self.operation.args):
            return self.operation.args[position]
        return dict(self.operation.kwargs).get(name, default)

    def name(self, position: int) -> str:
        """Return the name of the value that is the argument at `position`; '' where it is no
        value."""
        value = self.argument(position)
        return value.name if isinstance(value, Ref) else ""

    def state(self, position: int) -> State:
        """Return the state of the argument at `position`. A number is a constant."""
        name = self.name(position)
        return self.states[name] if name else FIXED

    def state_of(self, argument: Argument) -> State:
        """Return the state of `argument`. A number is a constant."""
        return self.states[argument.name] if isinstance(argument, Ref) else FIXED

    def shape_of(self, name: str) -> Shape:
        """Return the shape of the value `name`; () where it is no tensor."""
        return self.graph[name].shape or ()

    def rank_of(self, position: int) -> int:
        """Return the number of dimensions of the argument at `position`."""
        return len(self.shape_of(self.name(position)))

    def dim(self, position: int, name: str = "dim", default: int = 0, of: int = 0) -> int | None:
        """Return a dimension given as an argument, as a non-negative index into the shape of input
        `of`; None where the argument is no integer."""
        value = self.argument(position, name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        rank = self.rank_of(of)
        return value % rank if rank else 0

    def dims(self, position: int, name: str = "dim") -> tuple[int, ...] | None:
        """Return the dimensions given as an argument, as non-negative indices into the first
        input's shape: all dimensions where none are given, and None where one is no integer."""
        value, rank = self.argument(position, name), self.rank_of(0)
        if value is None or value == ():
            return tuple(range(rank))
        given = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(x, int) for x in given):
            return None
        return tuple(x % rank for x in given if isinstance(x, int)) if rank else ()

    def tensors(self) -> dict[str, State]:
        """Return the states of all inputs, by name."""
        return {name: self.states[name] for name in self.operation.inputs}

    def numbers(self) -> list[Argument]:
        """Return the positional arguments that are plain numbers."""
        return [x for x in self.operation.args if isinstance(x, int | float)]

    def shifted(self, name: str) -> State:
        """Return the state of input `name`, with its sample dimension as an index into the result's
        shape, to which the input is broadcast."""
        state = self.states[name]
        if isinstance(state, PerSample | RowPosition):
            return replace(state, dim=state.dim + len(self.shape) - len(self.shape_of(name)))
        return state

    def rows(self) -> PerSample | Refused | None:
        """Return the rows of a result that is broadcast from rows of the same samples and
        constants.

        Returns Refused where rows of different samples would be combined. Returns None where an
        input is anything else, where rows depend on the batch's size, or where no input has rows.
        """
        states = []
        for name in self.operation.inputs:
            state = self.shifted(name)
            if isinstance(state, PerSample):
                if state.degree:
                    return None
                states.append(state)
            elif state != FIXED:
                return None
        if not states:
            return None
        one = beside(states)
        return one if one is not None else Refused("puts different samples beside each other")


def factors_before(shape: Shape, dim: int) -> int | None:
    """Return the product of the dimensions before `dim`; None where one of them depends on the
    batch."""
    product = 1
    for size in shape[:dim]:
        if size.per_sample:
            return None
        product *= size.fixed
    return product


def is_whole_batch(size: Size) -> bool:
    """Return True if an extent is exactly the batch's size."""
    return size == Size(0, 1)


def only_batch_dim(shape: Shape) -> int | None:
    """Return the one dimension of `shape` that depends on the batch, in proportion to it; None
    where no dimension does, or several do."""
    dims = batch_dims(shape)
    return dims[0] if len(dims) == 1 and not shape[dims[0]].fixed else None
