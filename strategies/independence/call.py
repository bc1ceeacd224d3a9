"""One operation as the rules of `independence` see it: its arguments and its inputs' states."""

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
    """A rule's proof that samples meet, and why."""

    because: str


# None: the rule cannot say.
Answer = State | Refused | None
StateRule = Callable[["Call"], Answer]


@dataclass(frozen=True)
class Call:
    """`operation` of `graph`; `states` are those of all values before it. `batch_norms` are the
    modules whose statistics the runtime takes over the whole batch."""

    graph: OperationGraph
    operation: Operation
    states: Mapping[str, State]
    batch_norms: frozenset[str] = frozenset()

    @property
    def shape(self) -> Shape:
        return self.operation.shape or ()

    @property
    def kind(self) -> str:
        """The operation's name without its namespace: `add.Tensor`."""
        return self.operation.target.removeprefix("aten.")

    def argument(self, position: int, name: str = "", default: Argument = None) -> Argument:
        """Return the argument at `position`, or by keyword, or `default`."""
        if position < len(self.operation.args):
            return self.operation.args[position]
        return dict(self.operation.kwargs).get(name, default)

    def name(self, position: int) -> str:
        """Return the name of the value that is the argument at `position`, or ''."""
        value = self.argument(position)
        return value.name if isinstance(value, Ref) else ""

    def state(self, position: int) -> State:
        """Return the state of the argument at `position`; numbers are constants."""
        name = self.name(position)
        return self.states[name] if name else FIXED

    def state_of(self, argument: Argument) -> State:
        return self.states[argument.name] if isinstance(argument, Ref) else FIXED

    def shape_of(self, name: str) -> Shape:
        return self.graph[name].shape or ()

    def rank_of(self, position: int) -> int:
        return len(self.shape_of(self.name(position)))

    def dim(self, position: int, name: str = "dim", default: int = 0, of: int = 0) -> int | None:
        """Return a dimension given as an argument, counted from the front of input `of`."""
        value = self.argument(position, name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        rank = self.rank_of(of)
        return value % rank if rank else 0

    def dims(self, position: int, name: str = "dim") -> tuple[int, ...] | None:
        """Return dimensions given as an argument; all of them where none are given."""
        value, rank = self.argument(position, name), self.rank_of(0)
        if value is None or value == ():
            return tuple(range(rank))
        listed = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(x, int) for x in listed):
            return None
        return tuple(x % rank for x in listed if isinstance(x, int)) if rank else ()

    def tensors(self) -> dict[str, State]:
        """Return the states of all inputs, by name."""
        return {name: self.states[name] for name in self.operation.inputs}

    def numbers(self) -> list[Argument]:
        """Return the positional arguments that are plain numbers."""
        return [x for x in self.operation.args if isinstance(x, int | float)]

    def shifted(self, name: str) -> State:
        """Return an input's state with its sample dimension counted in a result that the input is
        broadcast to."""
        state = self.states[name]
        if isinstance(state, PerSample | RowPosition):
            return replace(state, dim=state.dim + len(self.shape) - len(self.shape_of(name)))
        return state

    def rows(self) -> PerSample | Refused | None:
        """Return how the rows of a result lie that is made of rows of the same samples alone, by
        broadcasting; None where an input is neither rows nor a constant."""
        found = []
        for name in self.operation.inputs:
            state = self.shifted(name)
            if isinstance(state, PerSample):
                if state.degree:
                    return None
                found.append(state)
            elif state != FIXED:
                return None
        if not found:
            return None
        one = beside(found)
        return one if one is not None else Refused("puts different samples beside each other")


def factors_before(shape: Shape, dim: int) -> int | None:
    """Return the number of elements that the dimensions before `dim` count through; None where
    that follows the batch."""
    product = 1
    for size in shape[:dim]:
        if size.per_sample:
            return None
        product *= size.fixed
    return product


def is_whole_batch(size: Size) -> bool:
    return size == Size(0, 1)


def only_batch_dim(shape: Shape) -> int | None:
    """Return the one dimension of `shape` that follows the batch, in proportion; else None."""
    dims = batch_dims(shape)
    return dims[0] if len(dims) == 1 and not shape[dims[0]].fixed else None
