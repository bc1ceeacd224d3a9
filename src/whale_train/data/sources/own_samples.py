"""Read samples of a user's own dataset as arrays, and report the first fault of a sample."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from whale_train.data.dataset import LENGTHS, Batch, Indices
from whale_train.data.generators import kept_generators, seed_generators
from whale_train.data.sources.arrays import HANDED_OVER
from whale_train.errors import ConfigError, Fault
from whale_train.strategies.graph.operation_graph import InputField

TARGET = "data._target_"
Pads = Mapping[str, tuple[int, float]]


class PadOptions(BaseModel):
    """Options of a field whose rows differ in length, under `data.pad`.

    length: the length to which rows are padded along their first dimension.
    value: the value of the padding.
    longest: whether each batch is then cut to the longest row of the step's global batch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    length: int = Field(ge=1)
    value: float | int = 0
    longest: bool = False


@dataclass(eq=False)
class Samples:
    """Samples of a user's dataset, as arrays.

    target: the path of the dataset's class, for messages.
    make: function that makes the dataset.
    names: names of the parts of a sample that is a tuple, or the key of a sample for each argument
        of the model's forward; None takes the keys of a sample that is a dict.
    collate: function that makes a batch of a list of samples; None stacks them.
    pads: the padded length and the padding value of fields.
    longest: fields for which batches also have the lengths before padding.
    fields: tensors of a sample; empty until they are known.
    alike: the remedy for samples of several shapes; '' for the usual one.
    """

    target: str
    make: Callable[[], Any]
    names: tuple[str, ...] | Mapping[str, str] | None
    collate: Callable[..., Any] | None
    pads: Pads
    longest: tuple[str, ...] = ()
    fields: tuple[InputField, ...] = ()
    alike: str = ""
    _made: Any = None
    _process: int = 0
    _keeps_files: bool = field(default=False)

    @property
    def dataset(self) -> Any:
        """Return the dataset.

        A dataset that has opened files is made again in every process, because a forked process
        shares the position of an open file.
        """
        if self._made is None or (self._keeps_files and self._process != os.getpid()):
            before = _open_files()
            self._made, self._process = self.make(), os.getpid()
            self._keeps_files = bool(_open_files() - before)
        return self._made

    def read(self, rows: Indices, draws: Indices) -> Batch:
        """Return samples `rows`, int64 `[n]`, as a batch. `draws`, int64 `[n]`, seed their random
        parts."""
        samples = []
        with kept_generators():
            for row, draw in zip(rows.tolist(), draws.tolist(), strict=True):
                seed_generators(draw)
                samples.append(self.dataset[row])
            return self.batch(samples, rows)

    def batch(self, samples: Sequence[Any], rows: Indices) -> Batch:
        """Return samples as a batch. `rows`, int64 `[n]`, are their numbers."""
        if self.collate is None:
            return self._stacked(samples, rows)
        collated = self._named(self.collate(samples), f"{self.target}'s batch")
        return self._checked({x: _array(value, x) for x, value in collated.items()}, rows)

    def _stacked(self, samples: Sequence[Any], rows: Indices) -> Batch:
        """Return samples as a batch, with fields padded to their lengths."""
        columns: dict[str, list[NDArray[Any]]] = {}
        lengths: dict[str, list[int]] = {name: [] for name in self.longest}
        for row, sample in zip(rows.tolist(), samples, strict=True):
            for name, value in self._named(sample, f"sample {row}").items():
                array = _array(value, name)
                columns.setdefault(name, []).append(self._padded(name, array, row))
                if name in lengths:
                    lengths[name].append(len(array))
        uneven = {
            name: arrays
            for name, arrays in columns.items()
            if len({array.shape for array in arrays}) > 1
        }
        if uneven:
            known = {field.name: field.shape for field in self.fields}
            raise _unequal(uneven, rows, known, self.alike)
        batch = {name: np.stack(arrays) for name, arrays in columns.items()}
        checked = self._checked(batch, rows)
        own = {f"{name}{LENGTHS}": np.array(of, np.int64) for name, of in lengths.items()}
        return {**checked, **own}

    def _named(self, sample: Any, subject: str) -> dict[str, Any]:
        """Return the parts of a sample by the names of the model's arguments. `subject` names the
        sample in messages."""
        names = self.names
        if isinstance(sample, Mapping):
            if isinstance(names, Mapping):
                wanted: Mapping[str, str] = names
            else:
                wanted = {str(x): str(x) for x in (names or sample)}
            missing = [key for key in wanted.values() if key not in sample]
            if missing:
                has = ", ".join(map(str, sample))
                rule = f"is no key of {subject}, which has {has}"
                raise ConfigError([Fault("data.fields", missing[0], rule, "use one of them")])
            return {name: sample[key] for name, key in wanted.items()}
        parts = list(sample) if isinstance(sample, tuple | list) else [sample]
        own = getattr(sample, "_fields", None)  # of a named tuple
        if isinstance(names, Mapping) or (names is None and own is None):
            kind = type(sample).__name__
            rule = f"is not given, and {subject} is a {kind} of {len(parts)} without names"
            if isinstance(names, Mapping):
                rule = f"names keys, and {subject} is a {kind} of {len(parts)} without names"
            remedy = "use data.fields=[input_ids, labels] or the like, a name for each part"
            raise ConfigError([Fault("data.fields", "", rule, remedy)])
        names = names or own or ()
        if len(names) != len(parts):
            rule = f"has {len(names)} names, and {subject} has {len(parts)} parts"
            raise ConfigError(
                [Fault("data.fields", ", ".join(names), rule, "give a name for each part")]
            )
        return dict(zip(names, parts, strict=True))

    def _padded(self, name: str, array: NDArray[Any], row: int) -> NDArray[Any]:
        """Return the field `name` of sample `row`, padded where `data.pad` says so. Raises
        ConfigError where it is longer than the padded length."""
        if name not in self.pads:
            return array
        length, value = self.pads[name]
        if not array.ndim or len(array) > length:
            rule = f"is less than sample {row} has ({len(array) if array.ndim else 'a number'})"
            remedy = "use a larger one, or cut such rows in the dataset"
            raise ConfigError([Fault(f"data.pad.{name}.length", str(length), rule, remedy)])
        widths = [(0, length - len(array)), *[(0, 0)] * (array.ndim - 1)]
        return np.pad(array, widths, constant_values=value)

    def _checked(self, batch: Batch, rows: Indices) -> Batch:
        """Return a batch with the dtypes of the known fields. Raises ConfigError where it has other
        fields or shapes."""
        if not self.fields:
            return batch
        if {x.name for x in self.fields} != batch.keys():
            has, first = ", ".join(batch), ", ".join(x.name for x in self.fields)
            rule = f"gives samples of different fields: {has} (sample {rows[0]}), at first {first}"
            remedy = "give all samples the same, or choose them with data.fields"
            raise ConfigError([Fault(TARGET, self.target, rule, remedy)])
        for known in self.fields:
            array = batch[known.name]
            if array.shape[1:] != known.shape:
                shapes = {known.name: known.shape}
                raise _unequal({known.name: list(array)}, rows, shapes, self.alike)
            batch[known.name] = np.ascontiguousarray(array, known.dtype)
        return batch


def pads_of(padded: Mapping[str, PadOptions] | None) -> tuple[Pads, tuple[str, ...]]:
    """Return the length and the value of every padded field, and the fields whose batches are cut
    to their longest row."""
    pads = {name: (pad.length, float(pad.value)) for name, pad in (padded or {}).items()}
    return pads, tuple(name for name, pad in (padded or {}).items() if pad.longest)


def refuse_unknown_pads(pads: Pads, names: Iterable[str]) -> None:
    """Raise ConfigError where `data.pad` names another field than those of the data, `names`."""
    known = [x for x in names if not x.endswith(LENGTHS)]
    unknown = [x for x in pads if x not in known]
    if unknown:
        rule = f"is no field of the data, which has {', '.join(known)}"
        raise ConfigError([Fault(f"data.pad.{unknown[0]}", "", rule, "leave it out")])


def _array(value: Any, name: str) -> NDArray[Any]:
    """Return a part of a sample as an array, in the dtype that the model gets. Raises ConfigError
    where it is not numbers."""
    if hasattr(value, "detach"):  # a tensor of torch
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    array = np.asarray(value)
    dtype = HANDED_OVER.get(array.dtype.name)
    if dtype is None:
        rule = f"is no number: {name} of a sample is a {type(value).__name__} ({array.dtype})"
        remedy = "name the parts to take with data.fields, or make numbers of it in the dataset"
        raise ConfigError([Fault(f"data.{name}", "", rule, remedy)])
    return array.astype(dtype)


def _unequal(
    uneven: Mapping[str, Sequence[NDArray[Any]]],
    rows: Indices,
    known: Mapping[str, tuple[int, ...]],
    remedy: str = "",
) -> ConfigError:
    """Return the error of fields whose rows differ in shape.

    uneven: the rows of each such field.
    known: the expected shape of a field's rows; the first row's shape for other fields.
    remedy: the remedy; '' is the usual one, which pads labels with -100, a value that losses
        ignore.
    """
    pads = ", ".join(
        f"{name}: {{length: N, value: {-100 if name == 'labels' else 0}}}" for name in uneven
    )
    remedy = remedy or f"use 'data.pad={{{pads}}}', or make them alike in the dataset"
    faults = []
    for name, arrays in uneven.items():
        shape = known.get(name, arrays[0].shape)
        number = next(i for i, array in enumerate(arrays) if array.shape != shape)
        rule = f"has samples of several shapes: {list(arrays[number].shape)} "
        rule += f"(sample {rows[number]}), elsewhere {list(shape)}"
        faults.append(Fault(f"data.{name}", "", rule, remedy))
    return ConfigError(faults)


def _open_files() -> set[str]:
    """Return the files that this process has open, each with its file descriptor."""
    here = "/proc/self/fd"
    opened = set()
    for number in os.listdir(here) if os.path.isdir(here) else ():
        try:
            path = os.readlink(f"{here}/{number}")
        except OSError:  # the descriptor of the listing itself, which is closed by then
            continue
        if path.startswith("/") and not path.startswith(("/dev/", "/proc/")):
            opened.add(f"{number} {path}")
    return opened
