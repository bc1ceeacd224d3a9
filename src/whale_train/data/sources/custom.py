"""`data._target_=...`: a dataset of the user's own.

It is a map-style `torch.utils.data.Dataset`, or any other class with `__len__` and `__getitem__`,
or a stream: a `torch.utils.data.IterableDataset`. It is imported and called here, without importing
torch.

Random parts of a sample are drawn from Python's, NumPy's and torch's global generators, which are
seeded by the sample's place in the run. So a resumed run sees the same samples under any plan.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from whale_train.data.dataset import (
    LENGTHS,
    Batch,
    Dataset,
    EvaluationSets,
    RowDataset,
    hold_back,
)
from whale_train.data.sources.own_samples import (
    TARGET,
    PadOptions,
    Samples,
    pads_of,
    refuse_unknown_pads,
)
from whale_train.data.stream import StreamDataset, state_fault_of
from whale_train.errors import ConfigError, Fault
from whale_train.own_code import (
    PATH,
    TargetKind,
    argument_faults,
    called,
    importable,
    imported,
    named_function,
    said,
)
from whale_train.strategies.graph.operation_graph import InputField

_Name = Annotated[str, Field(min_length=1)]
DATASET = TargetKind("torch.utils.data.Dataset", lambda made: _has_numbers(made))
_TORCHS = "torch.utils.data.dataset.Dataset"
_BATCH = TargetKind("dict", lambda made: issubclass(made, Mapping | tuple | list))


class Callee(BaseModel):
    """A function of the user's own, or a class whose objects can be called, with its arguments."""

    model_config = ConfigDict(frozen=True, extra="allow")

    target: str = Field(alias="_target_", pattern=PATH)


class CustomOptions(BaseModel):
    """Options of `data=custom`.

    target: path of the class of the dataset, or of a function that returns a dataset.
    fields: names of the parts of samples that are tuples, or the key of a sample for each argument
        of the model's forward; None takes the keys of samples that are dicts.
    collate: makes a batch of a list of samples; None stacks them.
    pad: padding of fields whose rows differ in length.
    workers: processes of each rank that read samples.
    shuffle: whether epochs are permuted.
    evaluation_fraction: fraction of the samples that is held back.
    evaluation: evaluation sets by name, each this data with other options; None has none.
    arguments: arguments of the class; in the config they stand beside the other options.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    kind: Literal["custom"] = "custom"
    target: str = Field(alias="_target_", pattern=PATH)
    fields: tuple[_Name, ...] | Mapping[_Name, _Name] | None = None
    collate: Callee | None = None
    pad: Mapping[_Name, PadOptions] | None = None
    workers: int = Field(1, ge=1)
    shuffle: bool = True
    evaluation_fraction: float = Field(0.0, ge=0, lt=1)
    evaluation: EvaluationSets | None = None
    arguments: Mapping[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _arguments_beside(cls, given: Any) -> Any:
        """Move the keys of the config that are not options into `arguments`."""
        if not isinstance(given, Mapping):
            return given
        own = {key: value for key, value in given.items() if key in DATA_KEYS}
        free = {key: value for key, value in given.items() if key not in DATA_KEYS}
        return {**own, "arguments": {**given.get("arguments", {}), **free}} if free else given


# The keys that the data group defines; every other key under `data` is an argument of the class.
DATA_KEYS = frozenset(
    name for key, option in CustomOptions.model_fields.items() for name in (key, option.alias)
) - {None}


def _has_numbers(made: type) -> bool:
    """Return whether a class is one of torch's datasets, or has `__getitem__` and `__len__`."""
    if _is_stream(made):
        return True
    is_torchs = any(f"{x.__module__}.{x.__name__}" == _TORCHS for x in made.__mro__)
    return is_torchs or (hasattr(made, "__getitem__") and hasattr(made, "__len__"))


_STREAMS = (
    "torch.utils.data.dataset.IterableDataset",
    "datasets.iterable_dataset.IterableDataset",
)


def _is_stream(made: type) -> bool:
    """Return whether the objects of a class yield one sample after another, without indices."""
    return any(f"{x.__module__}.{x.__name__}" in _STREAMS for x in made.__mro__)


def open_custom(options: CustomOptions) -> Dataset:
    """Return the user's dataset. The fields are those of its first samples.

    Raises ConfigError where the class cannot be imported, is not a dataset, raises, or returns
    samples that are not numbers of one shape.
    """
    samples = _samples(options)
    if _is_stream(type(samples.dataset)):
        return _opened_stream(options, samples)
    count = _length(options, samples.dataset)
    if count is None:
        raise _refused(options, "has no length", _NUMBERED)
    if not count:
        raise _refused(options, "has no samples", "give it at least one")
    first = np.arange(min(2, count))
    try:
        batch = samples.read(first, first)
    except ConfigError:
        raise
    except Exception as error:
        raise _refused(options, f"raised {said(error)} for sample 0 or 1", "correct it") from error
    _set_fields(samples, batch)
    held_back = hold_back(count, options.evaluation_fraction)
    longest = tuple(samples.longest)
    return RowDataset(
        *(samples.fields, held_back, samples.read), workers=options.workers, longest=longest
    )


def _length(options: CustomOptions, dataset: Any) -> int | None:
    """Return the length of a dataset, or None where it has none.

    Raises ConfigError where `__len__` raises anything but TypeError or NotImplementedError.
    """
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
    except Exception as error:
        rule = f"has a __len__ that raised {said(error)}"
        raise _refused(options, rule, "correct it") from error


def _set_fields(samples: Samples, batch: Batch) -> None:
    """Set the fields of all samples to those of `batch`. Raises ConfigError where `data.pad` names
    another field."""
    samples.fields = tuple(
        InputField(name, array.shape[1:], array.dtype.name)
        for name, array in batch.items()
        if not name.endswith(LENGTHS)
    )
    refuse_unknown_pads(samples.pads, batch)


def _opened_stream(options: CustomOptions, samples: Samples) -> StreamDataset:
    """Return the user's stream. Raises ConfigError for options that need indices, and where the
    first samples cannot be used."""
    faults = []
    if options.workers > 1:
        rule = f"is more than one, and {options.target} is a stream, which one process of each "
        faults.append(Fault("data.workers", str(options.workers), rule + "rank reads", "use 1"))
    if options.evaluation_fraction:
        rule = f"holds samples back by their numbers, and {options.target} is a stream"
        remedy = "use 0, and name a set in data.evaluation"
        key = "data.evaluation_fraction"
        faults.append(Fault(key, str(options.evaluation_fraction), rule, remedy))
    if faults:
        raise ConfigError(faults)
    made = samples.dataset
    length = _length(options, made)
    if length == 0:
        raise _refused(options, "has no samples", "give it at least one")
    has_state = all(callable(getattr(made, x, None)) for x in ("state_dict", "load_state_dict"))
    stream = StreamDataset(samples, (), length, has_state)
    first = np.arange(2 if length is None else min(2, length))
    try:
        _set_fields(samples, stream.samples(first))
        stream.fields = samples.fields
        stream.state_fault = state_fault_of(stream) if has_state else ""
    except ConfigError:
        raise
    except Exception as error:
        raise _refused(options, f"raised {said(error)} at its beginning", "correct it") from error
    return stream


_NUMBERED = "give it __len__ and __getitem__, so that any plan can go on with any sample"


def _samples(options: CustomOptions) -> Samples:
    """Return the samples of the user's dataset, which is made at its first use."""
    with importable(os.getcwd()):
        made = imported(TARGET, options.target, DATASET)
        faults = argument_faults(made, options.arguments, "data", options.target.rpartition(".")[2])
        if faults:
            raise ConfigError(faults)
        arguments = {key: called(f"data.{key}", value) for key, value in options.arguments.items()}
        collate = None
        if options.collate is not None:
            given = options.collate.model_extra or {}
            collate = named_function("data.collate", options.collate.target, given, _BATCH)

    def make() -> Any:
        try:
            with importable(os.getcwd()):
                return made(**arguments)
        except Exception as error:
            rule = f"cannot be made: it raised {said(error)}"
            raise _refused(options, rule, "correct its arguments or its code") from error

    pads, longest = pads_of(options.pad)
    if pads and collate is not None:
        rule = "has no effect beside data.collate, which makes the batches"
        raise ConfigError([Fault("data.pad", "", rule, "leave one of them out")])
    return Samples(options.target, make, options.fields, collate, pads, longest)


def _refused(options: CustomOptions, rule: str, remedy: str) -> ConfigError:
    return ConfigError([Fault(TARGET, options.target, rule, remedy)])
