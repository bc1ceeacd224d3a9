"""Return the layout of a store's samples, and cache beside the store what takes long to compute."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np

from whale_train.data.tokens.packing import (
    Layout,
    PackMode,
    best_fit,
    concatenated,
    one_by_one,
    packed,
)
from whale_train.data.tokens.stored_array import Int64Rows, Int64s, StoredArray
from whale_train.data.tokens.token_store import TokenStore


def layout_of(store: TokenStore, mode: PackMode | Literal["none"], length: int) -> Layout:
    """Return the layout of samples of `length` tokens."""
    if mode == "concat":
        return concatenated(store.ends, length)
    if mode == "none":
        return one_by_one(store.ends, length)
    saved_arrays = _kept(store, length)
    return packed(*(saved_arrays if saved_arrays is not None else _made(store, length)))


def _paths(store: TokenStore, length: int) -> tuple[str, str]:
    name = str(store.folder / f"best_fit_{length}")
    return f"{name}.segments.npy", f"{name}.stops.npy"


def _kept(store: TokenStore, length: int) -> tuple[Int64Rows, Int64Rows] | None:
    """Return the arrays of an earlier packing, or None where the files are missing or damaged."""
    try:
        segments, stops = (StoredArray.of_npy(Path(path)) for path in _paths(store, length))
    except (OSError, ValueError):
        return None
    return segments, stops


def _made(store: TokenStore, length: int) -> tuple[Int64s, Int64s]:
    """Return the arrays of a new packing, and save them where the disk allows it."""
    arrays = best_fit(store.ends[:], length)
    with suppress(OSError):
        for path, array in zip(_paths(store, length), arrays, strict=True):
            made = f"{path}.{os.getpid()}"
            with open(made, "wb") as file:
                np.save(file, array)
            os.replace(made, path)
    return arrays
