"""`data=arrays`: the user's own arrays from one .npz file, mapped into memory where possible.

`numpy.savez` stores arrays uncompressed, so they are mapped into memory at their place in the
archive, and a rank reads only the samples it takes. Arrays of `numpy.savez_compressed` are unpacked
once into each rank's memory.
"""

import math
import os
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, Literal

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from whale_train.data.dataset import Batch, Dataset, EvaluationSets, Indices, RowDataset, hold_back
from whale_train.data.paths import (
    UserPath,
    missing_path,
    path_error,
    refuse_special,
    unreadable,
)
from whale_train.errors import ConfigError, Fault, RequestError, listed, nearest
from whale_train.machine.limits import memory_bytes
from whale_train.quantities import in_bytes
from whale_train.strategies.graph.operation_graph import InputField

# The dtype that the model gets for each dtype in the file. Torch's defaults for numbers and indices
# are float32 and int64, NumPy's float64 and (on some platforms) int32.
HANDED_OVER = {
    name: {"float64": "float32", "int32": "int64"}.get(name, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64"),
    )
}
# The local header of a zip member, before its name and extra field (APPNOTE.TXT, 4.3.7).
_LOCAL_HEADER_BYTES = 30
_CHUNK_BYTES = 1 << 26
_PIECE_BYTES = 1 << 18
_MOST_CHECKED = 1 << 28  # bytes of a mapped array: its checksum needs a read of the whole array
_MOST_DEFLATED = 1032  # bytes that one deflated byte can encode (RFC 1951: 258 in two bits)
_WHOLE = "write the file again, or copy it whole"
_REMEDY = "write one with numpy.savez(path, name=array, ...)"


class ArraysOptions(BaseModel):
    """Options of `data=arrays`.

    path: an .npz file of arrays.
    columns: array of each forward argument; None takes every array under its own name.
    shuffle: whether epochs are permuted.
    evaluation_fraction: fraction of the samples that is held back.
    evaluation: evaluation sets by name, each this data with other options; None has none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["arrays"] = "arrays"
    path: UserPath
    columns: Mapping[str, str] | None = None
    shuffle: bool = True
    evaluation_fraction: float = Field(0.0, ge=0, lt=1)
    evaluation: EvaluationSets | None = None


def open_arrays(options: ArraysOptions) -> Dataset:
    """Return a dataset with one field for each array; the first axis is the sample, in the file's
    order.

    Dtypes are kept, except that float64 becomes float32 and int32 becomes int64. The upper bound of
    an integer field is its largest value + 1, for which the array is read once.

    Raises ConfigError with all the file's faults: no such file, not an .npz or a damaged one, no
    arrays or several of one name, unequal first axes, no samples, objects or other values that are
    not numbers. No memory is allocated on the word of a header alone. Checksums are compared for
    unpacked arrays, and for mapped ones up to 256 MiB: larger ones would have to be read
    completely.
    """
    path = options.path
    if not os.path.exists(path):
        raise missing_path(path)
    try:
        refuse_special(path)
        if os.path.isdir(path):
            raise path_error(path, "is a folder, not an .npz file", _REMEDY)
        members = _read_members(path)
    except OSError as error:
        raise unreadable(error, path) from error
    faults = _faults(path, members)
    if faults:
        raise ConfigError(faults)
    arrays = {member.name: member.array for member in members if member.array is not None}
    if options.columns is not None:
        faults = [
            Fault(
                f"data.columns.{name}",
                column,
                f"is not an array of {path}",
                nearest(column, arrays),
            )
            for name, column in options.columns.items()
            if column not in arrays
        ]
        if faults:
            raise ConfigError(faults)
        arrays = {name: arrays[column] for name, column in options.columns.items()}
    fields = tuple(_field(name, array) for name, array in arrays.items())
    dtypes = {field.name: field.dtype for field in fields}

    def read_rows(rows: Indices, draws: Indices) -> Batch:
        return {name: array[rows].astype(dtypes[name]) for name, array in arrays.items()}

    def read_field(field: InputField, rows: slice) -> NDArray[Any]:
        return arrays[field.name][rows].astype(field.dtype)

    held_back = hold_back(len(next(iter(arrays.values()))), options.evaluation_fraction)
    return RowDataset(fields, held_back, read_rows, read_field)


@dataclass(frozen=True, eq=False)
class _Member:
    """Array of the file.

    name: name of the array, without the suffix .npy.
    shape: shape of the array.
    dtype: dtype in the file.
    array: the values; None for an array that the model cannot be given.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    array: NDArray[Any] | None


def _read_members(path: str) -> list[_Member]:
    """Return the arrays of the archive at `path`.

    Raises ConfigError for a file that is not an archive or is damaged, and OSError.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            return [_read_member(path, archive, info) for info in members]
    except (OSError, RequestError):
        raise
    except Exception as error:  # zipfile raises a dozen kinds of errors for damaged archives
        if not zipfile.is_zipfile(path):
            raise path_error(path, "is not an .npz file", _REMEDY) from error
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise path_error(path, f"is damaged ({said})", _WHOLE) from error


def _read_member(path: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    """Return an array of the archive, mapped or unpacked.

    Raises ConfigError, and whatever zipfile and its decompressors raise.
    """
    with archive.open(info) as file:
        try:
            shape, fortran_order, dtype = _read_header(file)
        except zipfile.BadZipFile:
            raise
        except Exception as error:  # a header is an expression of Python, and numpy evaluates it
            rule = f"is not an .npz file: its member {info.filename} is not an array"
            raise path_error(path, rule, _REMEDY) from error
        header_bytes = file.tell()
        name = info.filename.removesuffix(".npy")
        if dtype.name not in HANDED_OVER or 0 in shape or not shape:
            return _Member(name, shape, dtype, None)
        num_bytes = dtype.itemsize * math.prod(shape)
        if header_bytes + num_bytes != info.file_size:
            rule = f"is damaged: array {name} of shape {list(shape)} has {num_bytes} bytes, and "
            rule += f"its member {info.file_size - header_bytes}"
            raise path_error(path, rule, _WHOLE)
        if info.compress_type != zipfile.ZIP_STORED:
            return _Member(
                name, shape, dtype, _unpacked(path, file, info, shape, dtype, fortran_order)
            )
    start = _content_offset(path, info) + header_bytes
    if start + num_bytes > os.path.getsize(path):
        rule = f"is damaged: array {name} goes on beyond the end of the file"
        raise path_error(path, rule, _WHOLE)
    if num_bytes <= _MOST_CHECKED:
        with archive.open(info) as file:
            while file.read(_PIECE_BYTES):  # raises BadZipFile at the end, where a byte is another
                pass
    order: Literal["F", "C"] = "F" if fortran_order else "C"
    mapped = np.memmap(path, dtype, mode="r", offset=start, shape=shape, order=order)
    return _Member(name, shape, dtype, mapped)


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape, whether the order is Fortran's, and the dtype in an array's header.

    Raises numpy's errors, and ValueError for a shape that no array has.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of headers by Python 2, and damaged ones
        version = npy_format.read_magic(file)
        read_header = (
            npy_format.read_array_header_1_0
            if version == (1, 0)
            else npy_format.read_array_header_2_0
        )
        shape, fortran_order, dtype = read_header(file)
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        raise ValueError(f"no shape: {shape}")
    return shape, fortran_order, dtype


def _unpacked(
    path: str,
    file: IO[bytes],
    info: zipfile.ZipInfo,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    fortran_order: bool,
) -> NDArray[Any]:
    """Return the array that is compressed in the rest of `file`.

    The size follows from the array's header and the archive's directory. Raises ConfigError, before
    memory is allocated, where the size is impossible or larger than memory; EOFError where the
    member ends early; and zipfile's errors.
    """
    deflated = info.compress_type == zipfile.ZIP_DEFLATED
    if deflated and info.file_size > _MOST_DEFLATED * (info.compress_size + 1):
        rule = f"is damaged: {info.compress_size} bytes of member {info.filename} are not "
        rule += f"{info.file_size} bytes compressed"
        raise path_error(path, rule, _WHOLE)
    num_bytes = dtype.itemsize * math.prod(shape)
    if num_bytes > memory_bytes():
        rule = f"has {in_bytes(num_bytes)} in the compressed member {info.filename}, more than "
        rule += "this machine's memory, in which it is unpacked"
        raise path_error(path, rule, "save it uncompressed, with numpy.savez, to be mapped")
    flat = np.empty(num_bytes, np.uint8)
    for start in range(0, num_bytes, _CHUNK_BYTES):
        stop = min(start + _CHUNK_BYTES, num_bytes)
        content = file.read(stop - start)
        if len(content) < stop - start:
            raise EOFError("the member ends early")
        flat[start:stop] = np.frombuffer(content, np.uint8)
    file.read(1)  # zipfile compares checksums when it reads the end
    return np.ndarray(shape, dtype, flat.data, order="F" if fortran_order else "C")


def _content_offset(path: str, info: zipfile.ZipInfo) -> int:
    """Return the offset in the file, in bytes, at which a stored member's content begins.

    The local header has its own name and extra field, whose lengths (two bytes each, little-endian)
    are its last four bytes.
    """
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        header = file.read(_LOCAL_HEADER_BYTES)
    name_bytes = int.from_bytes(header[26:28], "little")
    extra_bytes = int.from_bytes(header[28:30], "little")
    return info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes


def _faults(path: str, members: list[_Member]) -> list[Fault]:
    """Return all faults of the arrays of the file."""
    names = [member.name for member in members]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        rule = f"has several arrays {listed(twice)}"
        return [Fault("data.path", path, rule, "give each a name of its own")]
    if not members:
        rule = "holds no arrays"
        return [Fault("data.path", path, rule, "write one array per forward argument")]
    faults = []
    for member in members:
        if member.dtype.hasobject:
            rule = f"holds Python objects in array {member.name}, which are never unpickled"
            remedy = "save numbers: sequences padded to one length, for instance"
            faults.append(Fault("data.path", path, rule, remedy))
        elif member.dtype.name not in HANDED_OVER:
            rule = f"has array {member.name} of dtype {member.dtype.name}"
            remedy = f"save it as one of: {', '.join(HANDED_OVER)}"
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
    """Return the field of an array, with the bounds of its integers."""
    bound = smallest = 0
    if array.dtype.kind in "iu":
        step = max(1, _CHUNK_BYTES * len(array) // array.nbytes)
        chunks = range(0, len(array), step)
        extremes = [
            (int(part.min()), int(part.max())) for part in (array[i : i + step] for i in chunks)
        ]
        smallest, bound = min(low for low, _ in extremes), max(high for _, high in extremes) + 1
    dtype = HANDED_OVER[array.dtype.name]
    return InputField(name, array.shape[1:], dtype, max(0, bound), min(0, smallest))
