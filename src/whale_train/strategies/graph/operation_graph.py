"""The model as the planner sees it: its operations, parameters and inputs, without torch.

The graph comes from `torch.export`. Operations and values keep its names, which the profile, the
plan, the cost model and the runtime's rewrites share. Sizes that depend on the batch are multiples
of it (`Size(0, 16)` is 16 x batch); everything is *per sample* unless its name says otherwise.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property


@dataclass(frozen=True, order=True)
class Size:
    """The extent of one dimension: `fixed + per_sample * batch`."""

    fixed: int
    per_sample: int = 0

    def at(self, batch: int) -> int:
        """Return the extent for a batch of `batch` samples."""
        return self.fixed + self.per_sample * batch

    def __str__(self) -> str:
        if not self.per_sample:
            return str(self.fixed)
        follows = "batch" if self.per_sample == 1 else f"{self.per_sample}*batch"
        return f"{follows}+{self.fixed}" if self.fixed else follows


Shape = tuple[Size, ...]

# The targets of parameters (`frozen` ones are not trained), and of all tensors that a model holds.
WEIGHTS = ("parameter", "frozen")
HELD = (*WEIGHTS, "buffer")
# The targets of operations that compute nothing.
GIVEN = (*HELD, "input", "output", "graph")

# Used in place of an input's index: the operation's own value, and a tensor that is not the value
# of any operation, such as statistics and masks.
OWN, INSIDE = -1, -2

# Operations that can compute their weight's gradient themselves (rewrites.py): products, with the
# positions of their input, weight and bias among their arguments, and lookups.
PRODUCTS = {"aten.linear.default": (0, 1, 2), "aten.addmm.default": (1, 2, 0)}
LOOKUP = "aten.embedding.default"

# Operations that autocast runs in 16 bits, on CPUs and GPUs alike, casting every floating-point
# operand; the last one is that of models/grouped_product.py.
LOWERED = ("linear", "addmm", "mm", "bmm", "matmul", "baddbmm", "conv1d", "conv2d", "conv3d",
           "scaled_dot_product_attention", "grouped_mm")  # fmt: skip


@dataclass(frozen=True)
class Ref:
    """An argument that is the value of another operation."""

    name: str


# An argument of an operation: another value, a constant, or a list of them. Dtypes and devices of
# tensors are given as their names.
Argument = Ref | Size | int | float | bool | str | None | tuple["Argument", ...]


@dataclass(frozen=True)
class Operation:
    """One node of the exported graph.

    name: the name of the operation and of its value.
    target: the ATen overload (`aten.linear.default`), or `input`, `parameter`, `frozen` (a
        parameter that is not trained), `buffer`, `graph` (a subgraph that a higher-order operation
        runs) or `output`.
    args: the positional arguments.
    kwargs: the keyword arguments, as pairs of name and argument.
    shape: the extents of the value; None where it is no tensor.
    dtype: the name of the value's dtype (`float32`).
    module: the path of the module whose forward the operation belongs to.
    path: the name of a parameter or buffer in the model.
    flops: FLOP of the forward, per sample.
    saved: tensors that autograd saves for the operation's backward, as pairs of a place and bytes,
        per sample in fp32. A place is an index of `inputs`, `OWN` for the operation's own value, or
        `INSIDE` for an intermediate value.
    saved_on_cpu: `saved` on a CPU, where it differs; else empty. A CPU has no fused attention that
        drops, and saves all weights of it.
    memory: the index of the input whose storage the value shares; `OWN` where it has its own.
    after: the operations that changed an input in place, under another name than the one that this
        operation reads.
    random: True if it draws random numbers. A dropout of 0 does not.
    writes: the names of the buffers, or other attributes of the model, that it writes into.
    changes: the value that it changes in place and returns; '' for none.
    """

    name: str
    target: str
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    shape: Shape | None = None
    dtype: str = ""
    module: str = ""
    path: str = ""
    flops: float = 0.0
    saved: tuple[tuple[int, float], ...] = ()
    memory: int = OWN
    after: tuple[str, ...] = ()
    random: bool = False
    writes: tuple[str, ...] = ()
    changes: str = ""
    saved_on_cpu: tuple[tuple[int, float], ...] = ()

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the values that the operation reads, in order, without repetition."""
        names: dict[str, None] = {}

        def visit(argument: Argument) -> None:
            if isinstance(argument, Ref):
                names.setdefault(argument.name)
            elif isinstance(argument, tuple):
                for part in argument:
                    visit(part)

        visit(self.args)
        for _, argument in self.kwargs:
            visit(argument)
        return tuple(names)


def kind_of(operation: Operation) -> str:
    """Return the name of an ATen operation without its overload (`linear`); '' for any other
    target."""
    return _kind_of_target(operation.target)


@cache
def _kind_of_target(target: str) -> str:
    return target.partition(".")[2].partition(".")[0]


def value_bytes(operation: Operation, samples: float = 1) -> float:
    """Return the bytes of an operation's value for `samples` samples. A value without a batch
    dimension counts in full; a value that is no tensor counts 0."""
    if operation.shape is None:
        return 0.0
    total = float(DTYPE_BYTES.get(operation.dtype, 4))
    for size in operation.shape:
        total *= size.fixed + size.per_sample * samples
    return total


DTYPE_BYTES = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "bool": 1, "uint8": 1}


@dataclass(frozen=True)
class OperationGraph:
    """Operations in the order they run; the last one is the output."""

    operations: tuple[Operation, ...]

    @cached_property
    def by_name(self) -> dict[str, Operation]:
        """Return every operation by its name."""
        return {operation.name: operation for operation in self.operations}

    @cached_property
    def places(self) -> dict[str, int]:
        """Return the position of every operation in the order they run, by its name."""
        return {operation.name: place for place, operation in enumerate(self.operations)}

    @cached_property
    def users(self) -> dict[str, tuple[str, ...]]:
        """Return, for each value, the names of the operations that read it, in order."""
        readers: dict[str, list[str]] = {operation.name: [] for operation in self.operations}
        for operation in self.operations:
            for name in operation.inputs:
                readers[name].append(operation.name)
        return {name: tuple(users) for name, users in readers.items()}

    @cached_property
    def num_bytes(self) -> dict[str, float]:
        """Return the bytes of every value, per sample. A value that is no tensor counts the tensors
        in it."""
        sizes: dict[str, float] = {}
        for operation in reversed(self.operations):
            sizes[operation.name] = value_bytes(operation)
            if operation.shape is None:
                users = (self[name] for name in self.users[operation.name])
                sizes[operation.name] = sum(
                    sizes[user.name]
                    for user in users
                    if user.memory != OWN and user.inputs[user.memory] == operation.name
                )
        return sizes

    @cached_property
    def made_of_parameters(self) -> frozenset[str]:
        """Return the names of the trained parameters and of all values computed from them."""
        parameters = {op.name for op in self.operations if op.target == "parameter"}
        return frozenset(self.descendants(parameters))

    @cached_property
    def lowered_readers(self) -> dict[str, tuple[bool, bool]]:
        """Return two flags for every weight, frozen ones included, by its path.

        The first is True if an operation that autocast lowers to 16 bits reads the weight, the
        second if any other operation reads it. A view of a weight counts as the weight.
        """
        readers: dict[str, tuple[bool, bool]] = {}
        for operation in self.operations:
            if operation.target not in WEIGHTS:
                continue
            lowered, other = readers.get(operation.path, (False, False))
            views = [operation.name]
            while views:
                view = views.pop()
                for user in (self[name] for name in self.users[view]):
                    if user.memory != OWN and user.inputs[user.memory] == view:
                        views.append(user.name)
                    elif kind_of(user) in LOWERED:
                        lowered = True
                    else:
                        other = True
            readers[operation.path] = (lowered, other)
        return readers

    @cached_property
    def trained(self) -> frozenset[str]:
        """Return the names of the values that have a gradient: the trained parameters, and the
        values computed from them that are floating-point or no tensor."""
        with_gradient: set[str] = set()
        for operation in self.operations:
            reached = any(name in with_gradient for name in operation.inputs)
            has_one = operation.shape is None or "float" in operation.dtype
            if operation.target == "parameter" or (reached and has_one):
                with_gradient.add(operation.name)
        return frozenset(with_gradient)

    @cached_property
    def memory_of(self) -> dict[str, str]:
        """Return, for each value, the operation that owns its storage: its own, or that of the
        value it is a view of."""
        owners: dict[str, str] = {}
        for operation in self.operations:
            own = operation.memory == OWN
            source = operation.name if own else operation.inputs[operation.memory]
            owners[operation.name] = operation.name if own else owners[source]
        return owners

    @cached_property
    def gradients_of(self) -> dict[str, tuple[str, ...]]:
        """Return, for each operation, the owners of the storage of the inputs for which its
        backward computes gradients. Weights are left out; an owner that is read twice occurs
        twice."""
        return {
            operation.name: tuple(
                self.memory_of[name]
                for name in operation.inputs
                if name in self.trained and self[name].target != "parameter"
            )
            for operation in self.operations
        }

    def __getitem__(self, name: str) -> Operation:
        return self.by_name[name]

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    @cached_property
    def updates(self) -> tuple[str, ...]:
        """Return the names of the operations that write into a buffer, in the order they run."""
        return tuple(
            operation.name
            for operation in self.operations
            if operation.target != "aten.detach_.default"  # marked as a write, changes no value
            and any(self[name].target == "buffer" for name in operation.writes)
        )

    @cached_property
    def changed_buffers(self) -> dict[str, frozenset[str]]:
        """Return the operations that read or write each buffer that the forward writes into, by the
        buffer's path. Reads and writes through a view count."""
        targets = (self[name] for update in self.updates for name in self[update].writes)
        touching: dict[str, set[str]] = {x.path: set() for x in targets if x.target == "buffer"}
        path_of: dict[str, str] = {}  # by the name of a value in the storage of such a buffer
        for operation in self.operations if touching else ():
            if operation.target == "buffer" and operation.path in touching:
                path_of[operation.name] = operation.path
            for place, name in enumerate(operation.inputs):
                if name in path_of:
                    touching[path_of[name]].add(operation.name)
                    if operation.memory == place:
                        path_of[operation.name] = path_of[name]
        return {path: frozenset(names) for path, names in touching.items()}

    def ancestors(self, names: set[str]) -> set[str]:
        """Return the names of all values that `names` are computed from, `names` included."""
        reached = set(names)
        for operation in reversed(self.operations):
            if operation.name in reached:
                reached.update(operation.inputs)
                reached.update(operation.after)
        return reached

    def descendants(self, names: set[str]) -> set[str]:
        """Return the names of all values computed from `names`, `names` included."""
        reached = set(names)
        for operation in self.operations:
            if any(name in reached for name in (*operation.inputs, *operation.after)):
                reached.add(operation.name)
        return reached


@dataclass(frozen=True)
class Parameter:
    """A learned tensor.

    path: its name in the model.
    shape: its extents.
    bytes_per_element: bytes of an element as it is stored, less than 1 for a weight in 4 bits.
    aliases: further names of a tied parameter.
    """

    path: str
    shape: tuple[int, ...]
    bytes_per_element: float = 4
    aliases: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        product = 1
        for extent in self.shape:
            product *= extent
        return product


@dataclass(frozen=True)
class InputField:
    """One named tensor of a sample.

    name: the name of the field.
    shape: the extents without the batch.
    dtype: the name of the dtype.
    upper_bound: the exclusive upper bound of its integers; 0 where it is unknown or the field has
        no integers.
    lower_bound: the smallest of its integers where that is known to be negative, else 0.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    upper_bound: int = 0
    lower_bound: int = 0

    @property
    def is_integer(self) -> bool:
        """Return True if the field's dtype is an integer type."""
        return self.dtype.startswith(("int", "uint"))


@dataclass(frozen=True)
class Logits:
    """The logits that `model.loss=cross_entropy` reads.

    shape: the extents after the batch.
    class_dim: the dimension of the classes, 1 or -1, counted with the batch.
    is_open: True if both dimensions were possible by shape.
    """

    shape: tuple[int, ...]
    class_dim: int
    is_open: bool

    @property
    def num_classes(self) -> int:
        """Return the number of classes."""
        return self.shape[self.class_dim if self.class_dim < 0 else self.class_dim - 1]


@dataclass(frozen=True)
class ModelProfile:
    """Size and cost of a model, measured without its weights.

    name: the name of the model.
    parameters: the trained parameters.
    inputs: the tensors of a sample.
    forward_flops: FLOP of a forward, per sample (2 for each multiply-add).
    activation_bytes: bytes that autograd keeps between forward and backward, per sample in fp32.
    buffer_bytes: bytes of the model's buffers.
    graph: the operations; None where the model cannot be exported. Only strategies that run the
        model as it is can then use it.
    export_error: the reason why the model cannot be exported.
    batch_norm_modules: the paths of its BatchNorms.
    linear_weights: the paths of the weights of linear layers that compute nothing but a product.
    unused_parameters: the parameters that never get a gradient.
    perhaps_unused: where the forward varies, the parameters that got no gradient from one batch and
        may get one from another.
    unequal_parts: the difference between a batch and its parts that a comparison found; '' for
        none, or where nothing was compared.
    unequal_remedy: the remedy for `unequal_parts`.
    frozen: the parameters that are not trained and have no gradient.
    varies: True if the operations of a forward vary, because it depends on the values of a batch,
        draws random numbers itself or changes from call to call.
    own_draws: sources of random numbers of the forward other than torch's default generator; '' for
        none.
    logits: the logits of `model.loss=cross_entropy`; None where the model computes its own loss.
    batch_sizes: the smallest and the largest batch that the graph is valid for; a largest of 0
        means no limit.
    """

    name: str
    parameters: tuple[Parameter, ...]
    inputs: tuple[InputField, ...]
    forward_flops: float
    activation_bytes: float
    buffer_bytes: int = 0
    graph: OperationGraph | None = None
    export_error: str = ""
    batch_norm_modules: tuple[str, ...] = ()
    linear_weights: tuple[str, ...] = ()
    unused_parameters: tuple[str, ...] = ()
    perhaps_unused: tuple[str, ...] = ()
    unequal_parts: str = ""
    unequal_remedy: str = ""
    frozen: tuple[Parameter, ...] = ()
    varies: bool = False
    own_draws: str = ""
    logits: Logits | None = None
    batch_sizes: tuple[int, int] = (1, 0)

    @cached_property
    def parameter_by_path(self) -> dict[str, Parameter]:
        """Return the trained parameters by all their names, aliases included."""
        return _by_path(self.parameters)

    @cached_property
    def weight_by_path(self) -> dict[str, Parameter]:
        """Return the trained and the frozen parameters by all their names, aliases included."""
        return _by_path((*self.parameters, *self.frozen))

    def weights_read(self, names: Iterable[str]) -> dict[str, str]:
        """Return the path of every weight among the values `names` of the graph, by the value's
        name. A tied weight has the same path under each of its names."""
        assert self.graph is not None
        operations = (self.graph[name] for name in names)
        return {x.name: self.weight_by_path[x.path].path for x in operations if x.target in WEIGHTS}

    @cached_property
    def weight_elements(self) -> dict[str, int]:
        """Return the number of elements of every weight, frozen ones included, by its path."""
        return {p.path: p.elements for p in (*self.parameters, *self.frozen)}

    @cached_property
    def narrow(self) -> frozenset[str]:
        """Return the paths of the weights that are read only by operations which autocast lowers to
        16 bits.

        A 16-bit value of such a weight gives the same results as an fp32 one. A model without a
        graph has none.
        """
        return frozenset(path for path, read in self._readers.items() if read == (True, False))

    @cached_property
    def cast(self) -> frozenset[str]:
        """Return the paths of the weights of which autocast makes 16-bit copies if they are fp32.
        For a model without a graph, these are all weights."""
        if self.graph is None:
            return frozenset(weight.path for weight in (*self.parameters, *self.frozen))
        return frozenset(path for path, read in self._readers.items() if read[0])

    @cached_property
    def _readers(self) -> dict[str, tuple[bool, bool]]:
        """Return the flags of `OperationGraph.lowered_readers` by canonical path, combined over all
        names of a tied weight."""
        readers: dict[str, tuple[bool, bool]] = {}
        for name, read in (self.graph.lowered_readers if self.graph else {}).items():
            if name in self.weight_by_path:
                path = self.weight_by_path[name].path
                before = readers.get(path, (False, False))
                readers[path] = (before[0] or read[0], before[1] or read[1])
        return readers

    @property
    def parameter_elements(self) -> int:
        """Return the number of elements of all trained parameters."""
        return sum(parameter.elements for parameter in self.parameters)

    @cached_property
    def quantised(self) -> tuple[Parameter, ...]:
        """Return the frozen parameters that are stored in 4 bits."""
        return tuple(weight for weight in self.frozen if weight.bytes_per_element < 1)

    @cached_property
    def frozen_bytes(self) -> float:
        """Return the bytes of all frozen parameters."""
        return sum(weight.elements * weight.bytes_per_element for weight in self.frozen)


def _by_path(parameters: Iterable[Parameter]) -> dict[str, Parameter]:
    return {name: p for p in parameters for name in (p.path, *p.aliases)}
