"""Decode the members of samples by their extension."""

import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from whale_train.data.shards.shard_index import NUMBERS
from whale_train.data.sources.image_steps import EXTENSIONS as IMAGES

PICKLES = ("pickle", "pkl", "pt", "pth", "pyd")
TEXTS = ("txt", "text")
KINDS = (*IMAGES, *NUMBERS, "json", *TEXTS, "npy", "npz")

Decoder = Callable[[bytes], Any]


def kind_in(extension: str) -> str:
    """Return the last part of an extension, which tells the format, as `png` of `mask.png`."""
    return extension.rpartition(".")[2]


def split_extension(extension: str) -> tuple[str, str]:
    """Return an extension without the part after its colon, and that part, or ''."""
    name, _, part = extension.partition(":")
    return name.removeprefix("."), part


def decoder_of(kind: str, part: str) -> Decoder:
    """Return the function that decodes members of a `kind` other than images.

    part: the key of a json object, or the array of an .npz; '' takes all.

    The decoder raises ValueError or KeyError for content that does not match.
    """
    if kind in NUMBERS:
        return int
    if kind == "json":
        return lambda content: _part(json.loads(content), part)
    if kind in TEXTS:
        return lambda content: content.decode("utf-8")
    if kind == "npy":
        return lambda content: np.load(io.BytesIO(content), allow_pickle=False)
    assert kind == "npz", kind
    return lambda content: _array(content, part)


def _part(content: Any, part: str) -> Any:
    if not part:
        return content
    if not isinstance(content, Mapping):
        raise ValueError(f"it is a {type(content).__name__}, without keys")
    if part not in content:
        raise ValueError(f"it has no key {part}, but {', '.join(map(str, content))}")
    return content[part]


def _array(content: bytes, part: str) -> Any:
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        if not part and len(arrays.files) == 1:
            return arrays[arrays.files[0]]
        if part not in arrays.files:
            asked = f"no array {part}" if part else f"{len(arrays.files)} arrays"
            raise ValueError(f"it has {asked}, of {', '.join(arrays.files)}; name one as npz:NAME")
        return arrays[part]
