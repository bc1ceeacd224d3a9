"""The model as the planner sees it: its operations, parameters and inputs, without torch.

The graph is the one `torch.export` gives; operations and values keep its names, so that the
profile, the plan, the cost model and the runtime's rewrite all speak of the same things. Sizes
that follow the batch are multiples of it (`Size(0, 16)` is 16 x batch); everything is *per
sample* unless its name says otherwise.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property


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

# The targets of parameters, of which those that are frozen are not trained, and of all that a model
# holds.
WEIGHTS = ("parameter", "frozen")
HELD = (*WEIGHTS, "buffer")

# Instead of the place of an input: the operation's own value, and what is no operation's value,
# such as statistics and masks.
OWN, INSIDE = -1, -2

# What sees to its weight's gradient itself where a step has several backwards: leaves it for later,
# or adds it to what there is (runtime/kernels/matmul.py, runtime/kernels/weight_gradients.py).
PRODUCTS = ("aten.linear.default", "aten.addmm.default")
LOOKUP = "aten.embedding.default"

# What autocast runs in 16 bits, on CPUs and GPUs alike, casting every floating-point operand; the
# last is models/grouped_product.py's.
LOWERED = ("linear", "addmm", "mm", "bmm", "matmul", "baddbmm", "conv1d", "conv2d", "conv3d",
           "scaled_dot_product_attention", "grouped_mm")  # fmt: skip


@dataclass(frozen=True)
class Ref:
    """An argument that is another operation's value."""

    name: str


# What an operation is called with: other values, constants, and lists of them. Tensors' dtypes
# and devices are given as their names.
Argument = Ref | Size | int | float | bool | str | None | tuple["Argument", ...]


@dataclass(frozen=True)
class Operation:
    """One node of the exported graph.

    `target` is the ATen overload (`aten.linear.default`), or `input`, `parameter`, `frozen` (a
    parameter that is not trained), `buffer`, `graph` (one that a higher-order operation runs) or
    `output`; of what the model holds, `path` is its name there. `module` is the path of the module
    whose forward it belongs to. `shape` is None for values that are not tensors.
    `flops` are the forward's, per sample. `saved` is what it has autograd keep for its backward:
    which of `inputs` by its place, its own value (`OWN`) or what it makes on the way to it
    (`INSIDE`), and how many bytes, per sample in fp32. `memory` is the place of the input in whose
    memory its value lies, `OWN` where it has memory of its own. `after` are operations that
    changed in place what it reads, under another name than the one it reads it by. `random` says
    that it draws random numbers, which a dropout of 0 does not. `writes` are the buffers that it
    writes into.
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

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads, in order, each once."""
        found: dict[str, None] = {}

        def visit(argument: Argument) -> None:
            if isinstance(argument, Ref):
                found.setdefault(argument.name)
            elif isinstance(argument, tuple):
                for part in argument:
                    visit(part)

        visit(self.args)
        for _, argument in self.kwargs:
            visit(argument)
        return tuple(found)


def block_of(module: str) -> str:
    """Return the block a module belongs to: its path up to the last number (`encoder.layers.3`),
    which is how lists of equal blocks are written; without one, the module itself."""
    parts = module.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbered[-1] + 1]) if numbered else module


def is_repeated(block: str) -> bool:
    """Return whether a block is one of a list, as those of deep models are."""
    return any(part.isdecimal() for part in block.split("."))


def kind_of(operation: Operation) -> str:
    """Return the name of an ATen operation without its overload (`linear`), or nothing."""
    return operation.target.partition(".")[2].partition(".")[0]


def value_bytes(operation: Operation, samples: float = 1) -> float:
    """Return the bytes of a value for so many samples; a value without a batch counts whole."""
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
        return {operation.name: operation for operation in self.operations}

    @cached_property
    def users(self) -> dict[str, tuple[str, ...]]:
        """For each value, the operations that read it, in order."""
        found: dict[str, list[str]] = {operation.name: [] for operation in self.operations}
        for operation in self.operations:
            for name in operation.inputs:
                found[name].append(operation.name)
        return {name: tuple(users) for name, users in found.items()}

    @cached_property
    def num_bytes(self) -> dict[str, float]:
        """Bytes of every value per sample; of what is no tensor, those of the tensors in it."""
        found: dict[str, float] = {}
        for operation in reversed(self.operations):
            found[operation.name] = value_bytes(operation)
            if operation.shape is None:
                users = (self[name] for name in self.users[operation.name])
                found[operation.name] = sum(
                    found[user.name]
                    for user in users
                    if user.memory != OWN and user.inputs[user.memory] == operation.name
                )
        return found

    @cached_property
    def made_of_parameters(self) -> frozenset[str]:
        """Parameters, and all that is computed of them."""
        parameters = {op.name for op in self.operations if op.target == "parameter"}
        return frozenset(self.descendants(parameters))

    @cached_property
    def lowered_readers(self) -> dict[str, tuple[bool, bool]]:
        """For every parameter, by its path: whether some operation reads it that autocast lowers to
        16 bits, and whether some other does. A view of a parameter is the parameter."""
        found: dict[str, tuple[bool, bool]] = {}
        for operation in self.operations:
            if operation.target not in WEIGHTS:
                continue
            lowered, other = found.get(operation.path, (False, False))
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
            found[operation.path] = (lowered, other)
        return found

    @cached_property
    def trained(self) -> frozenset[str]:
        """The values that have a gradient: parameters, and what is computed of them and is
        floating, or no tensor."""
        found: set[str] = set()
        for operation in self.operations:
            reached = any(name in found for name in operation.inputs)
            has_one = operation.shape is None or "float" in operation.dtype
            if operation.target == "parameter" or (reached and has_one):
                found.add(operation.name)
        return frozenset(found)

    def __getitem__(self, name: str) -> Operation:
        return self.by_name[name]

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    @cached_property
    def updates(self) -> tuple[str, ...]:
        """The operations that write into a buffer, in the order they run."""
        return tuple(
            operation.name
            for operation in self.operations
            if operation.target != "aten.detach_.default"  # said to write, and changes no value
            and any(self[name].target == "buffer" for name in operation.writes)
        )

    @cached_property
    def changed_buffers(self) -> dict[str, frozenset[str]]:
        """For every buffer that the forward writes into, by its path: the operations that read or
        write it, under its own name or that of a view."""
        written = (self[name] for update in self.updates for name in self[update].writes)
        touching: dict[str, set[str]] = {x.path: set() for x in written if x.target == "buffer"}
        path_of: dict[str, str] = {}  # of the values that lie in the memory of such a buffer
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
        """Everything `names` are computed from, themselves included."""
        found = set(names)
        for operation in reversed(self.operations):
            if operation.name in found:
                found.update(operation.inputs)
                found.update(operation.after)
        return found

    def descendants(self, names: set[str]) -> set[str]:
        """Everything computed from `names`, themselves included."""
        found = set(names)
        for operation in self.operations:
            if any(name in found for name in (*operation.inputs, *operation.after)):
                found.add(operation.name)
        return found


@dataclass(frozen=True)
class Parameter:
    """A learned tensor. `aliases` are the further names of a tied one."""

    path: str
    shape: tuple[int, ...]
    bytes_per_element: int = 4
    aliases: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        product = 1
        for extent in self.shape:
            product *= extent
        return product


@dataclass(frozen=True)
class InputField:
    """One named tensor of a sample: its shape without the batch, dtype, and the exclusive upper
    bound of its integers (0: unknown or not integers). `lower_bound` is their least where one is
    known to be negative, else 0."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    upper_bound: int = 0
    lower_bound: int = 0

    @property
    def is_integer(self) -> bool:
        return self.dtype.startswith(("int", "uint"))


@dataclass(frozen=True)
class Logits:
    """The logits that `model.loss=cross_entropy` reads: their shape after the batch, and where the
    classes are, 1 or -1 (counted with the batch). `is_open`: both were possible by shape."""

    shape: tuple[int, ...]
    class_dim: int
    is_open: bool

    @property
    def num_classes(self) -> int:
        return self.shape[self.class_dim if self.class_dim < 0 else self.class_dim - 1]


@dataclass(frozen=True)
class ModelProfile:
    """What a model is and what it costs, measured without its weights.

    `parameters` are trained, and `frozen` are the others, which have no gradient.
    `graph` is None when the model cannot be exported; `export_error` then says why, and only
    strategies that run the model as it is can use it. `forward_flops` and `activation_bytes` are
    per sample in fp32 (2 FLOPs a multiply-add; bytes autograd keeps between forward and
    backward). `batch_sizes` are the smallest and the largest batch (0: any) that the graph is of.
    `own_draws` says what the forward draws random numbers from, beside torch's default generator
    ('': nothing). What a forward runs `varies` that looks at the values of a batch, draws by itself
    or changes from call to call. `unused_parameters` get no gradient, whatever the batch; where the
    forward varies, `perhaps_unused` got none from one batch, and may from another.
    `unequal_parts` says what a batch and its parts were found to differ in when they were compared
    ('': nothing, or not compared), `unequal_remedy` what the user can do. `logits` are None where
    the model computes its own loss.
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
        """Trained parameters by every name they have, aliases included."""
        return _by_path(self.parameters)

    @cached_property
    def weight_by_path(self) -> dict[str, Parameter]:
        """The same, of frozen ones too."""
        return _by_path((*self.parameters, *self.frozen))

    def weights_read(self, names: Iterable[str]) -> dict[str, str]:
        """Return the path of every weight among the values `names` of the graph; a tied one has the
        same path under each of its names."""
        assert self.graph is not None
        listed = (self.graph[name] for name in names)
        return {x.name: self.weight_by_path[x.path].path for x in listed if x.target in WEIGHTS}

    @cached_property
    def weight_elements(self) -> dict[str, int]:
        """The elements of every weight, by path."""
        return {p.path: p.elements for p in (*self.parameters, *self.frozen)}

    @cached_property
    def narrow(self) -> frozenset[str]:
        """The paths of the parameters that nothing reads but what autocast lowers to 16 bits, so
        that their 16-bit values are as good; none of a model whose operations are not known."""
        return frozenset(path for path, read in self._readers.items() if read == (True, False))

    @cached_property
    def cast(self) -> frozenset[str]:
        """The paths of the parameters of which autocast makes 16-bit copies where they are whole;
        all of a model whose operations are not known."""
        if self.graph is None:
            return frozenset(each.path for each in (*self.parameters, *self.frozen))
        return frozenset(path for path, read in self._readers.items() if read[0])

    @cached_property
    def _readers(self) -> dict[str, tuple[bool, bool]]:
        found: dict[str, tuple[bool, bool]] = {}
        for name, read in (self.graph.lowered_readers if self.graph else {}).items():
            if name in self.weight_by_path:
                path = self.weight_by_path[name].path
                before = found.get(path, (False, False))
                found[path] = (before[0] or read[0], before[1] or read[1])
        return found

    @property
    def parameter_elements(self) -> int:
        return sum(parameter.elements for parameter in self.parameters)

    @cached_property
    def frozen_bytes(self) -> int:
        return sum(each.elements * each.bytes_per_element for each in self.frozen)


def _by_path(parameters: Iterable[Parameter]) -> dict[str, Parameter]:
    return {name: p for p in parameters for name in (p.path, *p.aliases)}
