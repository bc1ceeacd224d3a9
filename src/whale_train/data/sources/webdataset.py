"""`data=webdataset`: samples in tar files, named by WebDataset's rules, with random access.

An index (`data/shards/shard_index.py`) gives every sample a number. So a rank reads only the
members of its own samples, in any order, and no shuffle buffer is needed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from whale_train.data.dataset import LENGTHS, Batch, Dataset, Note, RowDataset, hold_back
from whale_train.data.paths import UserPath
from whale_train.data.shards.decoders import (
    KINDS,
    PICKLES,
    TEXTS,
    decoder_of,
    kind_in,
    split_extension,
)
from whale_train.data.shards.shard_fields import ShardField
from whale_train.data.shards.shard_files import shard_files
from whale_train.data.shards.shard_index import indexed
from whale_train.data.shards.shard_reader import ShardReader
from whale_train.data.sources.image_steps import EXTENSIONS as IMAGES
from whale_train.data.sources.image_steps import (
    ImageOptions,
    ImageReader,
    OwnStep,
    image_reader,
    own_function,
)
from whale_train.data.sources.own_samples import PadOptions, Samples, pads_of, refuse_unknown_pads
from whale_train.data.tokens.make_store import cache_folder
from whale_train.data.tokens.text_encoder import (
    TOKENIZER_KEY,
    Encoder,
    text_encoder,
    tokenizer_folder,
)
from whale_train.errors import ConfigError, Fault
from whale_train.own_code import TargetKind, said
from whale_train.strategies.graph.operation_graph import InputField

_Name = Annotated[str, Field(min_length=1)]
_Paths = UserPath | Annotated[tuple[UserPath, ...], Field(min_length=1)]
_FIELDS: Mapping[str, str | tuple[str, ...]] = {
    "pixel_values": ("jpg", "jpeg", "png", "webp"),
    "labels": "cls",
}
_ALIKE = "resize images with data.transform, and make other fields alike with data.pad or "
_ALIKE += "data.convert"
_FIELDS_OF_ONE = TargetKind("dict", lambda made: issubclass(made, Mapping))
_NUMBERS_OF_ONE = TargetKind("tensor, array, list, int or float", lambda made: made is not str)


class WebdatasetOptions(ImageOptions):
    """Options of `data=webdataset`.

    path: patterns of the shards: `*`, `{000..009}`, `{a,b}`.
    fields: the extension of a sample's member for each argument of the model's forward, or several
        extensions of which every sample has one; `json:KEY` and `npz:ARRAY` take a part. None is
        images (jpg, jpeg, png, webp) as `pixel_values`, and cls as `labels`.
    convert: functions that convert fields other than images to numbers.
    tokenizer: folder of the tokenizer that makes token numbers of texts without a function in
        `convert`, or `owner/name` of the Hugging Face hub; None where no text is tokenised.
    map: function that makes the model's fields of a sample's, as dicts; None leaves them as they
        are. What it draws is seeded by the sample's place in the run.
    pad: padding of fields whose rows differ in length.
    cache: folder of the indexes; None is a folder in the user's cache.
    """

    kind: Literal["webdataset"] = "webdataset"
    path: _Paths
    fields: Mapping[_Name, _Name | tuple[_Name, ...]] | None = None
    convert: Mapping[_Name, OwnStep] | None = None
    tokenizer: _Name | None = None
    map: OwnStep | None = None
    pad: Mapping[_Name, PadOptions] | None = None
    cache: UserPath | None = None

    @property
    def members(self) -> dict[str, tuple[str, ...]]:
        """Return the extensions of each field, in lower case, with `:PART` where they name a
        part."""
        given = _FIELDS if self.fields is None else self.fields
        listed_ones = {name: (x,) if isinstance(x, str) else x for name, x in given.items()}
        return {name: tuple(map(_lower, x)) for name, x in listed_ones.items()}

    @property
    def _images(self) -> set[str]:
        """Return the names of the fields that are images."""
        of_images = ((name, x) for name, given in self.members.items() for x in given)
        return {name for name, x in of_images if kind_in(split_extension(x)[0]) in IMAGES}

    @property
    def _texts(self) -> set[str]:
        """Return the names of the fields that may be texts, and that no function converts."""
        of_texts = ((name, x) for name, given in self.members.items() for x in given)
        kinds = (*TEXTS, "json")
        texts = {name for name, x in of_texts if kind_in(split_extension(x)[0]) in kinds}
        return texts - set(self.convert or {})

    @property
    def has_images(self) -> bool:
        return bool(self._images)

    def faults(self) -> list[Fault]:
        """Return the faults of options that contradict each other."""
        faults = super().faults()
        images = self._images
        for name, extensions in self.members.items():
            for extension in extensions:
                kind = kind_in(split_extension(extension)[0])
                rule, remedy = _why_not(kind, split_extension(extension)[1])
                if rule:
                    faults.append(Fault(f"data.fields.{name}", extension, rule, remedy))
        for name in self.convert or {}:
            rule = "" if name in self.members else "is no field of the data"
            rule = "is of an image" if name in images else rule
            if rule:
                remedy = "use data.transform" if name in images else "leave it out"
                faults.append(Fault(f"data.convert.{name}", "", rule, remedy))
        for name in ("transform", "evaluation_transform", "mean", "std"):
            if getattr(self, name) is not None and not images:
                rule, remedy = "has no effect: no field of data.fields is an image", "leave it out"
                faults.append(Fault(f"data.{name}", "", rule, remedy))
        if self.tokenizer is not None and not self._texts:
            rule = "has no effect: no field of data.fields is a text without data.convert"
            faults.append(Fault(TOKENIZER_KEY, self.tokenizer, rule, "leave it out"))
        return faults


def _lower(extension: str) -> str:
    name, part = split_extension(extension)
    return f"{name.lower()}:{part}" if part else name.lower()


def _why_not(kind: str, part: str) -> tuple[str, str]:
    """Return why a member of `kind` cannot be read, and a remedy; two '' where it can be read."""
    if kind in PICKLES:
        return "is a pickle, which runs what is in it", "save arrays as npy, or images as png"
    if kind not in KINDS:
        return f"is of no kind that is read here ({', '.join(KINDS)})", "write one of them"
    if part and kind not in ("json", "npz"):
        return "names a part, which json and npz alone have", f"use {kind}"
    return "", ""


def open_webdataset(options: WebdatasetOptions) -> Dataset:
    """Return the samples of the shards, in the order of the shards and of their members.

    Raises ConfigError for options that contradict each other, for shards that cannot be indexed,
    for a sample that lacks a member of a field, and for a member whose content does not match its
    extension.
    """
    faults = options.faults()
    if faults:
        raise ConfigError(faults)
    patterns = (options.path,) if isinstance(options.path, str) else options.path
    files = [file for pattern in patterns for file in shard_files(pattern)]
    cache = cache_folder(options.cache, "shards")
    shards = ShardReader(files, [indexed(file, cache) for file in files])
    fields = _fields(options, shards)
    convert = {
        name: own_function(f"data.convert.{name}", step, _NUMBERS_OF_ONE)
        for name, step in (options.convert or {}).items()
    }
    encode, vocabulary = None, 0
    if options.tokenizer is not None:
        encode, vocabulary = text_encoder(tokenizer_folder(options.tokenizer))
    mapped = None
    if options.map is not None:
        mapped = own_function("data.map", options.map, _FIELDS_OF_ONE)
    pads, longest = pads_of(options.pad)
    training, evaluated = (
        Samples(
            target="webdataset",
            make=_maker(shards, fields, convert, encode, mapped, image_reader(options, evaluates)),
            names=None,
            collate=None,
            pads=pads,
            longest=longest,
            alike=_ALIKE,
        )
        for evaluates in (False, True)
    )
    first = np.arange(min(2, shards.num_samples))
    batch = training.read(first, first)
    refuse_unknown_pads(pads, batch)
    bounds = {} if mapped else _bounds(options, fields, batch, vocabulary)
    made = tuple(
        InputField(name, array.shape[1:], array.dtype.name, *bounds.get(name, (0, 0)))
        for name, array in batch.items()
        if not name.endswith(LENGTHS)
    )
    training.fields = evaluated.fields = made
    held_back = hold_back(shards.num_samples, options.evaluation_fraction)
    if options.evaluation_fraction:
        evaluated.read(first, first)

    def read_field(field: InputField, rows: slice) -> NDArray[Any]:
        numbers = fields[field.name].numbers if field.name in fields else None
        if numbers is not None and field.name not in convert and mapped is None:
            return numbers[rows]
        chosen = np.arange(rows.start, rows.stop)
        read: NDArray[Any] = training.read(chosen, chosen)[field.name]
        return read

    note = Note("data.path", f"{shards.num_samples:,} samples", f"in {len(files):,} shards")
    return RowDataset(
        *(made, held_back, training.read, read_field, (note,), options.workers),
        longest=longest,
        read_held_back=evaluated.read,
    )


def _fields(options: WebdatasetOptions, shards: ShardReader) -> dict[str, ShardField]:
    """Return the fields by name. Raises ConfigError with the faults of all fields."""
    fields: dict[str, ShardField] = {}
    faults: list[Fault] = []
    for name, extensions in options.members.items():
        try:
            fields[name] = ShardField(name, extensions, shards)
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)
    return fields


def _bounds(
    options: WebdatasetOptions, fields: Mapping[str, ShardField], batch: Batch, vocabulary: int
) -> dict[str, tuple[int, int]]:
    """Return the exclusive upper bound and the lower bound of the whole numbers of fields, where
    they are known.

    batch: samples, of which a field of token numbers has integers.
    vocabulary: the largest token number plus one.
    """
    bounds = {}
    for name in fields.keys() - set(options.convert or {}):
        numbers = fields[name].numbers
        if numbers is not None:
            bounds[name] = (max(0, int(numbers.max()) + 1), min(0, int(numbers.min())))
        elif options.tokenizer is not None and fields[name].is_text:
            filled = int((options.pad or {})[name].value) if name in (options.pad or {}) else 0
            bounds[name] = (max(vocabulary, filled + 1), min(0, filled))
    return {name: given for name, given in bounds.items() if batch[name].dtype.kind == "i"}


@dataclass(frozen=True, eq=False)
class _Read:
    """Samples by number, each a dict of its fields."""

    shards: ShardReader
    fields: Mapping[str, ShardField]
    convert: Mapping[str, Callable[[Any], Any]]
    encode: Encoder | None
    mapped: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None
    images: ImageReader

    def __len__(self) -> int:
        return int(self.shards.num_samples)

    def __getitem__(self, number: int) -> dict[str, Any]:
        sample: Mapping[str, Any]
        sample = {name: self._value(number, field) for name, field in self.fields.items()}
        if self.mapped is None:
            return dict(sample)
        try:
            return dict(self.mapped(sample))
        except Exception as error:
            rule = f"raised {said(error)} for {self.shards.named(number)}"
            raise ConfigError([Fault("data.map", "", rule, "correct it")]) from error

    def _value(self, number: int, field: ShardField) -> Any:
        """Return a field of a sample. Raises ConfigError where it cannot be read or converted."""
        if field.numbers is not None:
            return self._converted(number, field, field.numbers[number])
        extension, part = field.member(number)
        content = self.shards.read(number, extension)
        kind = kind_in(extension)
        if kind in IMAGES:
            return self.images.read(content, lambda: self._what(number, field))
        try:
            value = decoder_of(kind, part)(content)
        except Exception as error:
            rule = f"holds {self._what(number, field)}, which cannot be read ({said(error)})"
            raise ConfigError([Fault("data.path", "", rule, "write it again")]) from error
        return self._converted(number, field, value)

    def _converted(self, number: int, field: ShardField, value: Any) -> Any:
        """Return a value as numbers, converted by the user's function if there is one. Raises
        ConfigError."""
        name = field.name
        if name in self.convert:
            try:
                return self.convert[name](value)
            except Exception as error:
                rule = f"raised {said(error)} for {self._what(number, field)}"
                raise ConfigError(
                    [Fault(f"data.convert.{name}", "", rule, "correct it")]
                ) from error
        if isinstance(value, str) and self.encode is not None:
            return self.encode(value)
        if isinstance(value, str | Mapping) and self.mapped is None:
            rule = f"is a {type(value).__name__} and no numbers in {self._what(number, field)}"
            remedy = f"use 'data.convert={{{name}: {{_target_: my_data.numbers}}}}'"
            if isinstance(value, str):
                remedy = f"use data.tokenizer=DIR, or {remedy.removeprefix('use ')}"
            if isinstance(value, Mapping):
                remedy = f"name a key, as 'data.fields={{{name}: json:KEY}}', or {remedy}"
            extension, _ = field.member(number)
            raise ConfigError([Fault(f"data.fields.{name}", extension, rule, remedy)])
        return value

    def _what(self, number: int, field: ShardField) -> str:
        """Return the name of a sample's member, for messages."""
        return f"{self.shards.named(number)}, .{field.member(number)[0]}"


def _maker(*given: Any) -> Callable[[], _Read]:
    return lambda: _Read(*given)
