"""`data=arrays`: the user's own arrays from one .npz file, read where they lie.

`numpy.savez` stores its arrays uncompressed, so they are mapped into memory at their place in the
archive and a rank reads only the samples it takes. Those of `numpy.savez_compressed` have to be
unpacked, once, into each rank's memory.
"""

import os
import zipfile
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from whale_train.data.dataset import Batch, Dataset, Indices, RowDataset, hold_back
from whale_train.data.paths import UserPath, missing_path, path_error
from whale_train.errors import ConfigError, Fault
from whale_train.strategies.graph.operation_graph import InputField

# What is handed to the model for each dtype in the file. Torch's defaults for numbers and indices
# are float32 and int64, NumPy's float64 and (on some platforms) int32.
_HANDED_OVER = {
    name: {"float64": "float32", "int32": "int64"}.get(name, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64"),
    )
}
_LOCAL_HEADER_BYTES = 30  # of a zip member, before its name and extra field (APPNOTE.TXT, 4.3.7)
_CHUNK_BYTES = 1 << 26


class ArraysOptions(BaseModel):
    """`path`: an .npz file of arrays named like the model's forward arguments."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["arrays"] = "arrays"
    path: UserPath
    shuffle: bool = True
    evaluation_fraction: float = Field(0.0, ge=0, lt=1)


def open_arrays(options: ArraysOptions) -> Dataset:
    """Return a dataset of one field an array, in the file's order; the first axis is the sample.

    Dtypes are kept, except that float64 becomes float32 and int32 becomes int64. The upper bound
    of an integer field is its largest value + 1, for which the array is read through once.

    Raises ConfigError with all the file's faults: no such file, not an .npz, no arrays, unequal
    first axes, no samples, objects or other values that are not numbers.
    """
    path = options.path
    if not os.path.exists(path):
        raise missing_path(path)
    remedy = "write one with numpy.savez(path, name=array, ...)"
    if os.path.isdir(path):
        raise path_error(path, "is a folder, not an .npz file", remedy)
    try:
        with zipfile.ZipFile(path) as archive:
            members = [_read_member(path, archive, info) for info in archive.infolist()]
    except zipfile.BadZipFile as error:
        raise path_error(path, "is not an .npz file", remedy) from error
    except _NotAnArrayError as error:
        raise path_error(path, f"is not an .npz file: {error}", remedy) from error
    except OSError as error:
        raise path_error(
            path, f"cannot be read ({error.strerror})", "make it readable, or name another file"
        ) from error
    faults = _faults(path, members)
    if faults:
        raise ConfigError(faults)
    arrays = {member.name: member.array for member in members if member.array is not None}
    fields = tuple(_field(name, array) for name, array in arrays.items())
    dtypes = {field.name: field.dtype for field in fields}

    def read_rows(rows: Indices) -> Batch:
        return {name: array[rows].astype(dtypes[name]) for name, array in arrays.items()}

    num_rows = len(next(iter(arrays.values())))
    return RowDataset(fields, hold_back(num_rows, options.evaluation_fraction), read_rows)


class _NotAnArrayError(Exception):
    """A member of the archive that is not an array."""


@dataclass(frozen=True, eq=False)
class _Member:
    """An array of the file; `array` is None where it holds nothing that could be handed over."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    array: NDArray[Any] | None


def _read_member(path: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    with archive.open(info) as file:
        try:
            version = npy_format.read_magic(file)
            read_header = (
                npy_format.read_array_header_1_0
                if version == (1, 0)
                else npy_format.read_array_header_2_0
            )
            shape, fortran_order, dtype = read_header(file)
        except ValueError as error:
            raise _NotAnArrayError(f"its member {info.filename} is not an array") from error
        header_bytes = file.tell()
    name = info.filename.removesuffix(".npy")
    if dtype.name not in _HANDED_OVER or 0 in shape or not shape:
        return _Member(name, shape, dtype, None)
    order: Literal["F", "C"] = "F" if fortran_order else "C"
    if info.compress_type != zipfile.ZIP_STORED:
        with archive.open(info) as file:
            return _Member(name, shape, dtype, npy_format.read_array(file, allow_pickle=False))
    start = _content_offset(path, info) + header_bytes
    mapped = np.memmap(path, dtype, mode="r", offset=start, shape=shape, order=order)
    return _Member(name, shape, dtype, mapped)


def _content_offset(path: str, info: zipfile.ZipInfo) -> int:
    """Return where a stored member's bytes begin. The local header has its own name and extra
    field, whose lengths (two bytes each, little-endian) are its last four bytes."""
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        header = file.read(_LOCAL_HEADER_BYTES)
    name_bytes = int.from_bytes(header[26:28], "little")
    extra_bytes = int.from_bytes(header[28:30], "little")
    return info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes


def _faults(path: str, members: list[_Member]) -> list[Fault]:
    if not members:
        rule = "holds no arrays"
        return [Fault("data.path", path, rule, "write one array per forward argument")]
    faults = []
    for member in members:
        if member.dtype.hasobject:
            rule = f"holds Python objects in array {member.name}, which are never unpickled"
            remedy = "save numbers: sequences padded to one length, for instance"
            faults.append(Fault("data.path", path, rule, remedy))
        elif member.dtype.name not in _HANDED_OVER:
            rule = f"has array {member.name} of dtype {member.dtype.name}"
            remedy = f"save it as one of: {', '.join(_HANDED_OVER)}"
            faults.append(Fault("data.path", path, rule, remedy))
        elif not member.shape:
            rule = f"has array {member.name} without a first axis to be the sample"
            remedy = "save one entry per sample"
            faults.append(Fault("data.path", path, rule, remedy))
        elif 0 in member.shape:
            rule = f"has the empty array {member.name} of shape {list(member.shape)}"
            remedy = "save at least one sample"
            faults.append(Fault("data.path", path, rule, remedy))
    lengths = {member.name: member.shape[0] for member in members if member.shape}
    if len(set(lengths.values())) > 1:
        listing = ", ".join(f"{name} {length}" for name, length in lengths.items())
        rule = f"has arrays with different first axes ({listing})"
        remedy = "the first axis is the sample: give every array the same number"
        faults.append(Fault("data.path", path, rule, remedy))
    return faults


def _field(name: str, array: NDArray[Any]) -> InputField:
    bound = 0
    if array.dtype.kind in "iu":
        step = max(1, _CHUNK_BYTES * len(array) // array.nbytes)
        bound = max(int(array[i : i + step].max()) for i in range(0, len(array), step)) + 1
    return InputField(name, array.shape[1:], _HANDED_OVER[array.dtype.name], max(0, bound))
