"""Work of the operations of the graph on a device: FLOP and bytes, forward and backward.

Operations of one kind share a roofline (`roofline.py`). This file decides the kind of an operation
and the bytes it moves, from targets and shapes alone. Views move nothing. A value that is read
through a view counts as it lies in memory. Equal operations are one entry with a count, so that
ninety-six equal blocks are priced as one.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from enum import StrEnum

from whale_train.strategies.graph.operation_graph import (
    DTYPE_BYTES,
    HELD,
    PRODUCTS,
    Operation,
    OperationGraph,
    Ref,
)
from whale_train.strategies.layouts.propagation import RULES, differentiable, reshape


class KernelKind(StrEnum):
    """Kind of an operation, by what limits its speed."""

    PRODUCT = "product"  # matrix products
    SCALED = "scaled"  # products with weights, forwards and gradients of inputs in 8 bits
    CONVOLUTION = "convolution"
    ATTENTION = "attention"  # softmax(Q K) V as one operation
    POINTWISE = "pointwise"  # elementwise, a few instructions for each element
    FUNCTION = "function"  # elementwise, by an approximation: exp, sine, SiLU
    GELU = "gelu"
    TANH = "tanh"
    RANDOM = "random"  # a random number for every element: dropout
    NORM = "norm"  # rows (of a BatchNorm: channels) normalised to mean 0 and variance 1
    SOFTMAX = "softmax"
    SUM = "sum"  # reductions of many elements to few
    LOOKUP = "lookup"  # rows of a table by number
    LOSS = "loss"  # the cross-entropy of logits
    COPY = "copy"  # elements are moved, none is computed
    VIEW = "view"  # no element is moved
    UPDATE = "update"  # the optimizer's update of all parameters at once
    PARTITION = "partition"  # a step's work of ZeRO 1 and 2 on the gradients they send
    GATHER = "gather"  # the work of ZeRO 3 on the tensors it sends, a module at a time


BY_FLOPS = frozenset((
    KernelKind.PRODUCT, KernelKind.SCALED, KernelKind.CONVOLUTION, KernelKind.ATTENTION,
))  # fmt: skip


@dataclass(frozen=True)
class Traffic:
    """Bytes read and written, counted in fp32.

    fixed: bytes that do not depend on the batch.
    each: bytes for every sample.
    """

    fixed: float = 0.0
    each: float = 0.0

    def at(self, samples: float) -> float:
        """Return the bytes for `samples` samples."""
        return self.fixed + self.each * samples

    def times(self, factor: float) -> "Traffic":
        """Return the traffic times `factor`."""
        return Traffic(factor * self.fixed, factor * self.each)

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.fixed + other.fixed, self.each + other.each)


_NONE = Traffic()


@dataclass(frozen=True)
class Work:
    """Work of one operation on one device. Equal works have equal prices.

    kind: the kind of the operation.
    flops: FLOP of the forward per sample, 2 for each multiply-add.
    forward: traffic of the forward.
    backward: traffic of the backward. None: the forward's traffic, at the kind's backward roofline.
    input_gradient: True if the backward computes gradients of inputs.
    weight_gradient: True if the backward computes the gradient of a weight.
    rounded: traffic of the factors that a product rounds to 8 bits.
    """

    kind: KernelKind
    flops: float
    forward: Traffic
    backward: Traffic | None
    input_gradient: bool
    weight_gradient: bool
    rounded: Traffic = _NONE


# A function from the names of a value and a reader to a fraction of the value, 0 to 1. With a
# reader, an operation, it is the fraction that this operation reads; with None, the fraction held.
PartOfValue = Callable[[str, str | None], float]


def whole(value: str, reader: str | None = None) -> float:
    """Return 1.0, the fraction of a value that is not sharded."""
    return 1.0


class Works:
    """The operations of one graph as work.

    Facts that hold for every stage and split are computed once: which values have a gradient, which
    value's storage a view shares, and which values a transpose left transposed in memory.

    scaled: the names of the products that round their factors to 8 bits.
    """

    def __init__(self, graph: OperationGraph, scaled: Container[str] = ()) -> None:
        self.graph, self.scaled = graph, scaled
        self.with_gradient = differentiable(graph)
        self._transposed: dict[str, bool] = {}
        self._memory: dict[str, str] = {}
        for operation in graph:
            self._note(operation)

    def of(
        self, names: Iterable[str], part: PartOfValue = whole, added_to: Container[str] = ()
    ) -> Counter[Work]:
        """Return the works of the operations `names`, with the number of times that each occurs.

        part: gives the fraction of a value that this rank holds.
        added_to: names of parameters whose gradients already exist, so that a lookup's backward
            adds to them without filling zeros first.
        """
        counts: Counter[Work] = Counter()
        for name in names:
            operation = self.graph[name]
            if operation.target in _NO_WORK:
                continue
            counts[self._work(operation, part, added_to)] += 1
            if name in self.with_gradient and self._has_bias(operation):
                summed = self._traffic(name, part)
                counts[Work(KernelKind.SUM, 0.0, _NONE, summed, False, True)] += 1
            readers = sum(user in self.with_gradient for user in self.graph.users[name])
            if name in self.with_gradient and readers > 1 and operation.shape is not None:
                summed = self._traffic(name, part).times(3)
                added = Work(KernelKind.POINTWISE, 0.0, _NONE, summed, True, False)
                counts[added] += readers - 1
        return counts

    def _note(self, operation: Operation) -> None:
        name = operation.name
        before = operation.inputs[0] if operation.inputs else ""
        turned = self._transposed.get(before, False)
        is_view = _short(operation) in _VIEWS and not self._copies(operation)
        if kernel_kind(operation) is KernelKind.ATTENTION:
            turned = True  # its result has the heads of a token adjacent, as projections need
        elif _short(operation) in _TURNING:
            turned = not turned
        elif not is_view:
            turned = False
        self._transposed[name] = turned
        self._memory[name] = self._memory.get(before, before) if is_view and before else name

    def _copies(self, operation: Operation) -> bool:
        """Return True if an operation that can be a view copies its elements: to convert them to
        another dtype, or to merge dimensions that a transpose has separated."""
        name = _short(operation)
        before = operation.inputs[0] if operation.inputs else ""
        if name in _CASTS:
            return bool(before) and self.graph[before].dtype != operation.dtype
        joins = name == "contiguous" or RULES.get(operation.target) is reshape
        return joins and name not in ("view", "unflatten") and self._transposed.get(before, False)

    def _work(self, operation: Operation, part: PartOfValue, added_to: Container[str]) -> Work:
        gradient = operation.name in self.with_gradient
        kind = kernel_kind(operation)
        is_view = _short(operation) in _VIEWS and not self._copies(operation)
        if is_view or (kind is KernelKind.RANDOM and not operation.random):
            if gradient and _takes_part(operation):
                return self._put(operation, part)
            return Work(KernelKind.VIEW, 0.0, _NONE, _NONE, gradient, False)
        result = self._traffic(operation.name, part)
        traffic = result
        for name in operation.inputs:
            held = self._held(name)
            traffic += self._traffic(held, part, operation.name if held == name else None)
        weights = [name for name in operation.inputs if self._is_weight(name)]
        others = [
            name for name in operation.inputs
            if name in self.with_gradient and name not in weights
        ]  # fmt: skip
        of_input, of_weight = gradient and bool(others), gradient and bool(weights)
        back: Traffic | None = None
        share = 1.0
        if kind in BY_FLOPS:
            read = (part(name, operation.name) for name in operation.inputs)
            share = min(part(operation.name, None), *read)
            if kind is KernelKind.PRODUCT and not weights:
                # The gradient of the other factor, which costs as much.
                of_weight = gradient and len(others) > 1
            elif _short(operation) in _RECURRENT:
                of_input = gradient  # the gradient of the hidden states, which is always computed
        elif kind is KernelKind.LOOKUP:
            traffic = result.times(2)
            if gradient:  # it has the size of the whole table, and is mostly zeros
                table = operation.inputs[0]
                made = _NONE if table in added_to else self._traffic(table, part)
                back = result.times(2) + made
        elif kind is KernelKind.POINTWISE:
            back = self._pointwise_backward(operation, part, gradient)
        rounded = _NONE
        if operation.name in self.scaled:
            kind = KernelKind.SCALED
            for place in PRODUCTS[operation.target][:2]:
                factor = operation.args[place]
                assert isinstance(factor, Ref)
                rounded += self._traffic(factor.name, part, operation.name)
        flops = operation.flops * share
        return Work(kind, flops, traffic, back, of_input, of_weight, rounded)

    def _put(self, operation: Operation, part: PartOfValue) -> Work:
        """Return the work of writing the gradient of a part of a value into a gradient of the full
        value's size. A split writes all its parts at once; other operations write one part between
        zeros."""
        full = self._traffic(operation.inputs[0], part)
        read = full if operation.shape is None else self._traffic(operation.name, part)
        return Work(KernelKind.COPY, 0.0, _NONE, full + read, True, False)

    def _pointwise_backward(
        self, operation: Operation, part: PartOfValue, gradient: bool
    ) -> Traffic:
        """Return the traffic of an elementwise backward: one pass for each input that gets a
        gradient.

        A pass moves three values of the result's size. Sums need no pass, since they pass their
        gradient on. A broadcast input takes one more read of the result's size.
        """
        if not gradient:
            return _NONE
        back, result = _NONE, self._traffic(operation.name, part)
        for name in operation.inputs:
            if name not in self.with_gradient and not self._is_weight(name):
                continue
            spread = self._traffic(name, part) != result
            passes = _short(operation) not in _SUMS
            back += result.times(3.0 * passes) + (result if spread else _NONE)
        return back

    def _has_bias(self, operation: Operation) -> bool:
        """Return True if a product adds a bias.

        The bias' gradient is a sum over all rows of the result's gradient. Adding the bias itself
        costs no notable time, since the product is accumulated on top of it.
        """
        shapes = (
            self.graph[name].shape
            for name in operation.inputs
            if kernel_kind(operation) in _WITH_BIAS and self._is_weight(name)
        )
        return any(shape is not None and len(shape) == 1 for shape in shapes)

    def _is_weight(self, name: str) -> bool:
        """Return True if a value is a parameter, or a view of one."""
        return self.graph[self._memory[name]].target == "parameter"

    def _held(self, name: str) -> str:
        """Return the value whose storage an operation reads for `name`: the source of an expanded
        view, else `name`."""
        return self._memory[name] if _short(self.graph[name]) in _SPREADING else name

    def _traffic(self, name: str, part: PartOfValue, reader: str | None = None) -> Traffic:
        operation = self.graph[name]
        if operation.shape is None:
            return _NONE
        num_bytes = DTYPE_BYTES.get(operation.dtype, 4) * part(name, reader)
        follows = any(size.per_sample for size in operation.shape)
        for size in operation.shape:
            num_bytes *= size.per_sample or size.fixed
        return Traffic(0.0, num_bytes) if follows else Traffic(num_bytes)


def kernel_kind(operation: Operation) -> KernelKind:
    """Return the kind of `operation`, by what limits its speed. An unknown operation counts as
    elementwise."""
    return _KINDS.get(_short(operation), KernelKind.POINTWISE)


def _short(operation: Operation) -> str:
    """Return the short name of an operation: `add` for `aten.add_.Tensor`."""
    if operation.target == "<built-in function getitem>":
        return "getitem"
    parts = operation.target.split(".")
    return parts[1].rstrip("_") if len(parts) > 1 else operation.target


def _takes_part(operation: Operation) -> bool:
    """Return True if an operation gives a part of its input, so that its backward writes a gradient
    of the input's size. The items of a split do not count, since their gradients are joined once,
    at the split."""
    name = _short(operation)
    if name == "slice":
        start, stop = (*operation.args[2:4], None, None)[:2]
        everything = start in (None, 0) and (not isinstance(stop, int) or stop >= 2**62)
        return not everything and not isinstance(stop, Ref)
    return name in _TAKING_PART


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


_NO_WORK = frozenset(("input", *HELD, "graph", "output"))
_TURNING = _names("transpose permute t numpy_T mT mH movedim")
_CASTS = _names("to _to_copy type_as float")
_SPREADING = _names("expand expand_as broadcast_to")
_TAKING_PART = _names("split split_with_sizes chunk tensor_split unbind select narrow expand")
_SUMS = _names("add sub rsub")
_VIEWS = _TURNING | _CASTS | _SPREADING | _TAKING_PART | _names(
    "getitem view reshape _unsafe_view flatten unflatten slice squeeze unsqueeze detach alias "
    "contiguous sym_size"
)  # fmt: skip
_WITH_BIAS = (KernelKind.PRODUCT, KernelKind.CONVOLUTION)
# Products with the previous step's hidden state, all steps and layers as one operation.
_RECURRENT = _names("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
_OF_KIND = {
    KernelKind.PRODUCT: "linear addmm matmul mm bmm baddbmm einsum _grouped_mm grouped_mm "
    "grouped_mm_fallback " + " ".join(_RECURRENT),
    KernelKind.CONVOLUTION: "conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d",
    KernelKind.ATTENTION: "scaled_dot_product_attention",
    KernelKind.FUNCTION: "silu sigmoid softplus mish elu hardswish exp log log1p erf sin cos",
    KernelKind.GELU: "gelu",
    KernelKind.TANH: "tanh",
    KernelKind.RANDOM: "dropout alpha_dropout feature_dropout native_dropout bernoulli rand "
    "rand_like randn randn_like rrelu",
    KernelKind.NORM: "layer_norm rms_norm group_norm batch_norm",
    KernelKind.SOFTMAX: "softmax _softmax log_softmax _log_softmax logsumexp",
    KernelKind.SUM: "sum mean amax amin var std linalg_vector_norm argmax argmin any all",
    KernelKind.LOOKUP: "embedding index index_select gather take_along_dim",
    KernelKind.LOSS: "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d",
    KernelKind.COPY: "cat stack clone repeat repeat_interleave pad constant_pad_nd flip roll "
    "contiguous reshape _unsafe_view flatten to _to_copy type_as float",
}
_KINDS = {name: kind for kind, names in _OF_KIND.items() for name in names.split()}
