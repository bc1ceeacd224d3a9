"""Streams: the user's own datasets that yield one sample after another, without indices.

Every rank iterates over the whole stream, and makes arrays of its own samples alone. A place of the
run is a place of the stream. Where the stream ends, another object of the class begins it again. An
object with `set_epoch` is told the number of the pass, since an object that had a state loaded may
begin again at that state. Random parts of a sample are drawn from generators that are seeded by the
place, so that all ranks see the same samples.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whale_train.data.dataset import Batch, Dataset, Indices
from whale_train.data.generators import kept_generators, seed_generators
from whale_train.data.sources.own_samples import Samples
from whale_train.strategies.graph.operation_graph import InputField

ENDLESS = 2**62  # the number of samples of a stream without a length
_END = object()
_LOOKED_AT = 256  # the most samples of a stream that `looked_at` takes


@dataclass(eq=False)
class StreamDataset:
    """A stream as a dataset, whose indices are places of the stream.

    source: makes the stream, and arrays of its samples.
    fields: tensors of a sample.
    length: number of samples; None where the stream has no length.
    has_state: whether the stream has `state_dict` and `load_state_dict`.
    state_fault: why a run cannot resume from the state; '' where it can, and for a stream without
        state.
    keeps: number of samples that are cached for repeated reads.
    """

    source: Samples
    fields: tuple[InputField, ...]
    length: int | None
    has_state: bool
    state_fault: str = ""
    keeps: int = 64
    _reader: "StreamReader | None" = None
    _kept: "OrderedDict[int, Any]" = field(default_factory=OrderedDict)

    @property
    def num_samples(self) -> int:
        return ENDLESS if self.length is None else self.length

    @property
    def num_evaluation_samples(self) -> int:
        return 0

    @property
    def longest(self) -> tuple[str, ...]:
        """Return the fields whose batches are cut to their longest row."""
        return self.source.longest

    @property
    def lost_place(self) -> str:
        """Return why a run cannot resume in the stream, as the end of a sentence, or '' where it
        can."""
        if not self.has_state:
            return "has no state_dict and load_state_dict"
        return self.state_fault

    def samples(self, indices: Indices, draws: Indices | None = None) -> Batch:
        """Return the samples at places `indices` of the stream, int64 `[n]`. The draws are the
        places.

        A place before the last one read restarts the stream, unless its sample is cached.
        """
        wanted = indices.tolist()
        first = min((x for x in wanted if x not in self._kept), default=None)
        if first is not None:
            if self._reader is None or self._reader.position > first:
                self._reader = StreamReader(self, int)
                self._kept.clear()
            count = max(wanted) + 1 - self._reader.position
            for place, sample in self._reader.read(count):
                self._kept[place] = sample
        batch = self.source.batch([self._kept[x] for x in wanted], indices)
        while len(self._kept) > max(self.keeps, len(wanted)):
            self._kept.popitem(last=False)
        return batch

    def evaluation_samples(self, indices: Indices) -> Batch:
        raise AssertionError("a stream holds nothing back")


class StreamReader:
    """Reader of a stream from one place on.

    stream: the stream, of which a new object is made.
    draw_of: function that returns the draw of a place.
    position: the place of the next sample.
    state: the result of `state` before that sample; '' at the beginning of the first pass.
    """

    def __init__(
        self,
        stream: StreamDataset,
        draw_of: Callable[[int], int],
        position: int = 0,
        state: str = "",
    ) -> None:
        self.position = self._begun = position
        self._stream, self._draw_of = stream, draw_of
        saved = json.loads(state) if state else {}
        self._pass = int(saved.get("pass", 0))
        self._samples: Any = None
        self._iterator = self._begin(saved.get("state"))

    def _begin(self, state: Any = None) -> Iterator[Any]:
        """Return an iterator over a new object of the stream, from the beginning or from a loaded
        state."""
        with kept_generators():
            seed_generators(self._draw_of(self.position))
            self._samples = self._stream.source.make()
            if hasattr(self._samples, "set_epoch"):
                self._samples.set_epoch(self._pass)
            if state is not None:
                self._samples.load_state_dict(state)
            return iter(self._samples)

    def read(self, count: int) -> Iterator[tuple[int, Any]]:
        """Yield the place and the value of each of the next `count` samples.

        Raises RuntimeError for a stream with more or fewer samples than its length.
        """
        with kept_generators():
            for place in range(self.position, self.position + count):
                seed_generators(self._draw_of(place))
                sample = self._next()
                self.position = place + 1
                yield place, sample

    def _next(self) -> Any:
        """Return the next sample, beginning the next pass where one ends. Raises RuntimeError for a
        stream without samples, and for a wrong length."""
        sample = next(self._iterator, _END)
        length, name = self._stream.length, self._stream.source.target
        is_due = length is not None and self.position % length == 0
        if sample is not _END:
            if is_due and self.position > self._begun:
                raise RuntimeError(f"{name} gives more samples than its length, {length:,}")
            return sample
        if length is not None and not is_due:
            given = self.position % length
            raise RuntimeError(f"{name} ends after {given:,} samples, and its length is {length:,}")
        self._pass, self._begun = self._pass + 1, self.position
        self._iterator = self._begin()
        sample = next(self._iterator, _END)
        if sample is _END:
            raise RuntimeError(f"{name} gives no sample")
        return sample

    def state(self) -> str:
        """Return the pass and the state of the stream as JSON. Raises RuntimeError for a state that
        JSON cannot hold."""
        state = self._samples.state_dict()
        fault = json_fault(state)
        if fault:
            raise RuntimeError(f"{self._stream.source.target} has a state that {fault}")
        return json.dumps({"pass": self._pass, "state": state})


def json_fault(value: Any, path: str = "state_dict()") -> str:
    """Return why a value would not survive JSON, as the end of a sentence, or '' where it would."""
    if value is None or type(value) in (bool, int, float, str):
        return ""
    if type(value) is list:
        inside = ((x, f"{path}[{number}]") for number, x in enumerate(value))
    elif isinstance(value, Mapping):
        keys = [key for key in value if type(key) is not str]
        if keys:
            return f"JSON cannot hold: {path} has the key {keys[0]!r}, which is no text"
        inside = ((x, f"{path}[{key!r}]") for key, x in value.items())
    else:
        return f"JSON cannot hold: {path} is a {type(value).__name__}"
    return next(filter(None, (json_fault(x, place) for x, place in inside)), "")


def state_fault_of(stream: StreamDataset) -> str:
    """Return why a run cannot resume from a stream's state, as the end of a sentence, or '' where
    it can.

    A new object of the class loads the state after two samples. The next sample of the new object
    must be the third. Raises whatever the stream raises.
    """
    reader = StreamReader(stream, int)
    for _ in reader.read(2):
        pass
    try:
        state = reader.state()
    except RuntimeError as error:
        return str(error).removeprefix(f"{stream.source.target} ")
    reloaded = StreamReader(stream, int, 2, state)
    third, other = (
        stream.source.batch([sample], np.array([place]))
        for place, sample in (*reader.read(1), *reloaded.read(1))
    )
    if all(np.array_equal(third[name], other[name], equal_nan=True) for name in third):
        return ""
    rule = "has a state that another sample follows: two samples, state_dict, load_state_dict and "
    return rule + "the next sample give another one than three samples do"


def looked_at(dataset: Dataset, count: int) -> Indices:
    """Return the indices of up to `count` training samples that represent all, int64, ascending.

    They are evenly spread and include the first and the last. Of a stream they are the first ones,
    at most `_LOOKED_AT`.
    """
    if isinstance(dataset, StreamDataset):
        return np.arange(min(count, _LOOKED_AT, dataset.num_samples))
    if dataset.num_samples <= count:
        return np.arange(dataset.num_samples)
    return np.arange(count) * (dataset.num_samples - 1) // (count - 1)
