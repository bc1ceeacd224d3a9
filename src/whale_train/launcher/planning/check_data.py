"""Check that a request's data fits the model: the range of tokens and classes, and the samples for
evaluations."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whale_train.config import Request
from whale_train.data.dataset import Dataset, RowDataset, can_be_searched, first_row
from whale_train.data.evaluation_sets import OpenedData
from whale_train.data.mixture import MixedDataset
from whale_train.data.sources.text import IGNORED_LABEL
from whale_train.data.sources.text_files import TextFilesOptions
from whale_train.data.stream import StreamDataset
from whale_train.errors import Fault
from whale_train.strategies.graph.operation_graph import (
    InputField,
    ModelProfile,
    Operation,
    OperationGraph,
    Ref,
)
from whale_train.strategies.plan.plan import Decision


def check_data(
    request: Request, profile: ModelProfile, data: OpenedData, faults: list[Fault]
) -> None:
    """Add a fault for each disagreement between the data and the model.

    The checks are: samples for evaluations, a stream that a checkpoint can hold, a parameter to
    train, and the range of tokens and classes.
    """
    every, dataset = request.train.evaluate_every, data.training
    if every is not None and not dataset.num_evaluation_samples and not data.sets:
        rule, remedy = (
            "needs held-back samples, and there are none",
            "raise data.evaluation_fraction",
        )
        remedy += ", name sets in data.evaluation, or use null"
        if isinstance(dataset, StreamDataset):  # a stream cannot hold samples back
            remedy = "name sets in data.evaluation, or use null"
        faults.append(Fault("train.evaluate_every", str(every), rule, remedy))
    if every is None and data.sets:
        rule = "is never evaluated (train.evaluate_every=null)"
        remedy = "use train.evaluate_every=100 or the like, or leave it out"
        faults.append(Fault("data.evaluation", ", ".join(data.sets), rule, remedy))
    if isinstance(dataset, StreamDataset) and dataset.state_fault and request.may_save:
        remedy = "correct it, or write no checkpoints"
        target = getattr(request.data, "target", "")
        faults.append(Fault("data._target_", target, dataset.state_fault, remedy))
    if not profile.parameters:
        rule, remedy = "has no parameter to train", "give it one with requires_grad"
        faults.append(Fault("model", request.names.get("model", ""), rule, remedy))
    name = request.names.get("data", "")
    _check_numbers(profile, name, dataset, faults)
    for key, dataset in data.sets.items():
        of_set = replace(profile, inputs=dataset.fields)
        _check_numbers(of_set, f"{name}, set {key},", dataset, faults)


def _check_numbers(profile: ModelProfile, name: str, dataset: Dataset, faults: list[Fault]) -> None:
    """Add a fault for each kind of integers in `dataset` that the model cannot take.

    name: the name of the data, for messages.
    """
    for number in _numbers(profile):
        fault = number.fault(name, dataset)
        if fault is not None and fault not in faults:
            faults.append(fault)


def explain_data(request: Request, dataset: Dataset) -> tuple[Decision, ...]:
    """Return notes for the plan on the data, and on the number of steps where `train.epochs` gives
    it."""
    notes = dataset.notes if isinstance(dataset, RowDataset | MixedDataset) else ()
    decisions = [Decision(note.key, note.value, "", note.reason) for note in notes]
    # Text files have no labels at padding, and for seq2seq the mask is not the labels' own.
    if not isinstance(request.data, TextFilesOptions):
        decisions += padded_labels(dataset)
    if isinstance(dataset, StreamDataset):
        reason = "the data is a stream; every rank goes through all of it, for its own samples"
        decisions.append(Decision("data.shuffle", "as the stream comes", "", reason))
    train = request.train
    if train.epochs is not None:
        reason = f"train.epochs={train.epochs:g} of {dataset.num_samples:,} samples, "
        reason += f"{train.global_batch} a step"
        decisions.append(Decision("train.steps", str(train.steps), "", reason))
    return tuple(decisions)


def explain_vocabulary(request: Request, profile: ModelProfile) -> tuple[Decision, ...]:
    """Return a note for the plan where a Hugging Face model that starts at random has a vocabulary
    at least twice as large as the data needs."""
    if request.model.architecture is None or request.model.pretrained is not None:
        return ()
    if request.names.get("data") != "text_files":
        return ()
    for number in _numbers(profile):
        is_table = number.what == "rows" and number.field is not None
        if is_table and 0 < 2 * number.bound <= number.count:
            reason = f"all tokens of the data are below {number.bound:,}; "
            reason += f"model.config.vocab_size={number.bound} takes less memory and time"
            return (Decision("model.config.vocab_size", f"{number.count:,}", "", reason),)
    return ()


_LOOKED_AT = 256  # number of samples that are searched for labels at padding


def padded_labels(dataset: Dataset) -> tuple[Decision, ...]:
    """Return a note for the plan where the first samples have counted labels at positions that the
    attention mask marks as padding; nothing for data without an `attention_mask` of the labels'
    shape."""
    shapes = {field.name: field.shape for field in dataset.fields if field.is_integer}
    if "labels" not in shapes or shapes.get("attention_mask") != shapes["labels"]:
        return ()
    batch = dataset.samples(np.arange(min(_LOOKED_AT, dataset.num_samples)))
    padded = batch["attention_mask"] == 0
    counted = int((padded & (batch["labels"] != IGNORED_LABEL)).sum())
    if not counted:
        return ()
    reason = (
        f"{counted:,} of {int(padded.sum()):,} padded places in the first {len(padded)} samples "
    )
    reason += f"have a label that the loss counts; write {IGNORED_LABEL} there to leave them out"
    return (Decision("data.labels", "padding is trained on", "", reason),)


@dataclass(frozen=True)
class _Numbers:
    """Integers from the data that an operation uses as rows of a table, or as classes.

    field: the input that the integers come from; None for the positions of a sequence.
    narrowed: the operations that select part of `field`, in order.
    offset: the number that the model adds to the values of `field`.
    bound: the exclusive upper bound of the integers; 0 where it is unknown.
    what: `rows` or `classes`.
    count: number of rows or classes of the `owner`.
    owner: the path of the table, or of the operation that computes the logits; `the model` without
        a path.
    ignored: the class that the loss ignores; None where it ignores none.
    dtype: the dtype of the integers at the operation.
    """

    field: InputField | None
    narrowed: tuple[Operation, ...]
    offset: int
    bound: int
    what: str
    count: int
    owner: str
    ignored: int | None
    dtype: str

    def fault(self, data: str, dataset: Dataset) -> Fault | None:
        """Return the fault of these integers, or None.

        data: the name of the data, for messages.
        dataset: the data, which is searched for the first row out of range if it can be searched.
        """
        name = "positions" if self.field is None else self.field.name
        if self.what == "classes" and self.dtype not in _CLASS_DTYPES:
            rule = f"has {name} of dtype {self.dtype}, and {self.owner} numbers {self.what} by them"
            return Fault("data", data, rule, f"save {name} as int64")
        is_negative = self.field is not None and self.field.lower_bound + self.offset < 0
        if self.bound <= self.count and not is_negative:
            return None
        if self.field is not None and can_be_searched(dataset):
            wrong = first_row(dataset, self.field, self._are_wrong)
            if wrong is None:  # every number out of range is ignored or not read
                return None
            if wrong.value + self.offset < 0:
                rule = f"has {name} of {wrong.value} (in row {wrong.row}, from 0 on), and "
                rule += f"{self.owner} numbers its {self.count} {self.what} from 0"
                remedy = f"number {name} from 0"
                if self.ignored is not None:
                    remedy += f", write {self.ignored - self.offset} where there is none"
                return Fault("data", data, rule, f"{remedy}, or use other data")
        if self.bound <= self.count:
            return None
        most = self.bound - 1
        rule = f"has {name} up to {most}, and {self.owner} has {self.count} {self.what}"
        remedy = f"use a model with at least {self.bound} {self.what}, or other data"
        if self.field is None and data.partition(",")[0] in ("text", "text_files"):
            remedy = f"use data.sequence_length={self.count}, or a model with at least "
            remedy += f"{self.bound} {self.what}"
        return Fault("data", data, rule, remedy)

    def _are_wrong(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the elements of `values` `[n, ...]` that are out of range, as int64 `[m]`."""
        for operation in self.narrowed:
            values = _narrowed(operation, values)
        values = values.astype(np.int64)
        numbers = values + self.offset
        wrong = (numbers < 0) | (numbers >= self.count)
        if self.ignored is not None:
            wrong &= numbers != self.ignored
        return values[wrong]


def _numbers(profile: ModelProfile) -> Iterator[_Numbers]:
    """Yield each kind of integers in the data that the model is known to use as rows or classes."""
    fields = {field.name: field for field in profile.inputs}
    labels = fields.get("labels")
    if profile.graph is None:
        if profile.logits is not None and labels is not None:
            of_loss = (profile.logits.num_classes, "the model", IGNORED_LABEL, "int64")
            yield _Numbers(labels, (), 0, labels.upper_bound, "classes", *of_loss)
        return
    for operation in profile.graph:
        is_loss = operation.target in _CROSS_ENTROPIES
        if not is_loss and operation.target != "aten.embedding.default":
            continue
        table, numbers = operation.args[:2]
        assert isinstance(table, Ref)
        assert isinstance(numbers, Ref)
        holder, dtype = profile.graph[table.name], profile.graph[numbers.name].dtype
        shape = holder.shape or ()
        if is_loss and "float" in dtype and profile.graph[numbers.name].shape == shape:
            continue  # the labels are probabilities of classes
        source = _source(profile.graph, numbers.name)
        if source is None:
            continue
        # Rows are dimension 0 of a table. Classes are dimension 1 of logits, or 0 without a batch.
        count = shape[min(1, len(shape) - 1) if is_loss else 0].fixed if shape else source.stop
        field = fields.get(source.name)
        bound = source.stop if field is None else field.upper_bound
        ignored = _option(operation, 4, "ignore_index", IGNORED_LABEL) if is_loss else None
        yield _Numbers(
            field=field,
            narrowed=source.narrowed,
            offset=source.offset,
            bound=bound + source.offset if bound else 0,
            what="classes" if is_loss else "rows",
            count=count,
            owner=holder.path or "the model",
            ignored=ignored,
            dtype=dtype,
        )


def _option(operation: Operation, position: int, name: str, default: int) -> int:
    """Return an integer argument of an operation, given by position or by name, or `default`."""
    given = dict(operation.kwargs).get(name, default)
    argument = operation.args[position] if len(operation.args) > position else given
    assert isinstance(argument, int)
    return argument


@dataclass(frozen=True)
class _Source:
    """The origin of integers: an input of the model, or the positions of a sequence.

    name: the name of the input, or `positions`.
    narrowed: the operations that select part of the input, in order.
    offset: the number that the model adds to the values.
    stop: the last position plus 1; 0 where it is unknown.
    """

    name: str
    narrowed: tuple[Operation, ...]
    offset: int
    stop: int = 0


def _source(graph: OperationGraph, name: str) -> _Source | None:
    """Return the origin of the integers that the node `name` computes, or None where it is not
    known.

    The integers are traced back to an input or to the positions of a sequence, through operations
    that move values (slices, pads, reshapes) or add a constant.
    """
    offset = 0
    moves: list[Operation] = []  # in reverse order
    while True:
        operation = graph[name]
        if operation.target == "input":
            narrowed = []
            for move in reversed(moves):
                if move.target not in _NARROWING:
                    break
                narrowed.append(move)
            return _Source(name, tuple(narrowed), offset)
        if operation.target.startswith("aten.arange."):
            stop = operation.args[0 if operation.target == "aten.arange.default" else 1]
            return _Source("positions", (), offset, stop) if isinstance(stop, int) else None
        if len(operation.inputs) != 1:
            return None
        if operation.target == "aten.add.Tensor":
            shift = operation.args[1]
            if not isinstance(shift, int):
                return None
            offset += shift
        elif operation.target in _MOVES:
            moves.append(operation)
        else:
            return None
        name = operation.inputs[0]


def _narrow_slice(values: NDArray[Any], dim: int = 0, *bounds: Any) -> NDArray[Any]:
    """Return `values[start:stop:step]` along `dim`, as aten.slice does.

    bounds: start, stop and step.
    """
    taken: NDArray[Any] = values[(slice(None),) * (dim % values.ndim) + (slice(*bounds),)]
    return taken


def _select(values: NDArray[Any], dim: int, place: int) -> NDArray[Any]:
    """Return `values` at index `place` of `dim`, without the dimension `dim`, as aten.select
    does."""
    taken: NDArray[Any] = values.take(place, axis=dim)
    return taken


_NARROWING: dict[str, Callable[..., NDArray[Any]]] = {
    "aten.slice.Tensor": _narrow_slice,
    "aten.select.int": _select,
}


def _narrowed(operation: Operation, values: NDArray[Any]) -> NDArray[Any]:
    """Return the part of `values` that an operation selects.

    `values` is returned whole if the operation selects in the first dimension (samples), or has an
    argument that is no integer.
    """
    plain = [*operation.args[1:], *(x for _, x in operation.kwargs)]
    if operation.kwargs or not all(x is None or isinstance(x, int) for x in plain):
        return values
    if not plain or plain[0] in (0, -values.ndim):
        return values
    return _NARROWING[operation.target](values, *plain)


_MOVES = (
    *("aten.slice.Tensor", "aten.pad.default", "aten.constant_pad_nd.default", "aten.select.int"),
    *(
        "aten.view.default",
        "aten.reshape.default",
        "aten.flatten.using_ints",
        "aten.expand.default",
    ),
    *(
        "aten.unsqueeze.default",
        "aten.squeeze.dim",
        "aten.contiguous.default",
        "aten.clone.default",
    ),
    *("aten.to.dtype", "aten.to.device", "aten.to.dtype_layout", "aten._to_copy.default"),
    *("aten.detach.default", "aten.alias.default", "aten.lift_fresh_copy.default"),
)
_CROSS_ENTROPIES = (
    "aten.cross_entropy_loss.default",
    *("aten.nll_loss.default", "aten.nll_loss2d.default", "aten.nll_loss_nd.default"),
)
_CLASS_DTYPES = ("int64", "uint8")  # the dtypes of classes that torch's losses accept
