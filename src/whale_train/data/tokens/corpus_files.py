"""Find the files of a corpus, and read their documents one after another.

A document is a row of a jsonl, parquet or arrow file, or a whole text file. The reader knows its
place, so that a message can name a bad row.
"""

import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from glob import glob, has_magic
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

from whale_train.data.paths import missing_path, refuse_special, unreadable
from whale_train.errors import ConfigError, Fault, nearest

SUFFIXES = (".txt", ".jsonl", ".json", ".parquet", ".arrow")
COMPRESSED = ".gz"  # after .txt, .jsonl or .json
_KINDS = f"{', '.join(SUFFIXES)}; text and json with {COMPRESSED} too"
_PIECE_BYTES = 1 << 20  # about the size of a piece of a text file; pieces end at line ends
_ROWS = 1024  # rows of a parquet or arrow file that are read at once
_WHOLE = "write the file again, or copy it whole"

Document = dict[str, Any]  # values by field; the text of a text file is its field `text`


def corpus_files(path: str, key: str) -> list[str]:
    """Return the files that `path` names, sorted: a file, the files below a folder, or the matches
    of a pattern.

    Raises ConfigError, with the config's `key`, where there are none, or where one is of an unknown
    kind.
    """
    try:
        if has_magic(path) and not os.path.exists(path):
            files = sorted(x for x in glob(path, recursive=True) if os.path.isfile(x))
        elif os.path.isdir(path):
            below = Path(path).rglob("*")
            files = sorted(str(x) for x in below if x.is_file() and suffix_of(str(x)))
        elif not os.path.exists(path):
            raise missing_path(path)
        else:
            files = [path]
        for file in files:
            refuse_special(file)
    except OSError as error:
        raise unreadable(error, path) from error
    if not files:
        rule = f"names no file ({', '.join(SUFFIXES)}, or these with {COMPRESSED})"
        raise ConfigError(
            [Fault(key, path, rule, "name a file, a folder or a pattern, as *.jsonl")]
        )
    strange = next((file for file in files if not suffix_of(file)), None)
    if strange is not None:
        rule = (
            f"is of no kind that is read here ({', '.join(SUFFIXES)}, or these with {COMPRESSED})"
        )
        remedy = "rename it after what it holds, or name other files"
        raise ConfigError([Fault(key, strange, rule, remedy)])
    return files


def suffix_of(file: str) -> str:
    """Return the suffix that tells a file's format, in lower case and without a compression's
    suffix; '' for a file of another format."""
    name = os.path.basename(file).lower()
    is_compressed = name.endswith(COMPRESSED)
    suffix = os.path.splitext(name.removesuffix(COMPRESSED))[1]
    if suffix not in SUFFIXES or (is_compressed and suffix in (".parquet", ".arrow")):
        return ""
    return suffix


class BadRow(Exception):
    """A row cannot be used.

    place: the file and the row's number in the file, as a reader would look for it.
    rule: the rule that does not hold.
    remedy: the nearest thing that would hold.
    """

    def __init__(self, place: str, rule: str, remedy: str) -> None:
        super().__init__(f"{place} {rule}")
        self.place, self.rule, self.remedy = place, rule, remedy


def read_documents(file: str, fields: Sequence[str]) -> Iterator[tuple[Document, int, bool]]:
    """Yield the documents of a file: the values of `fields`, the bytes of the file read so far, and
    whether the document is complete.

    A text file is one document, which comes in pieces that end at line ends. Bytes are counted on
    the disk, before decompression. Raises BadRow for a row without one of the fields, and OSError.
    """
    kind = suffix_of(file)
    if kind == ".txt":
        yield from _pieces_of_text(file)
    elif kind in (".jsonl", ".json"):
        yield from _rows_of_json(file, fields)
    else:
        yield from _rows_of_arrow(file, fields, kind)


def _opened(file: str) -> tuple[IO[bytes], IO[bytes]]:
    """Return a stream of a file's content, decompressed, and the underlying file on the disk."""
    raw: BufferedReader = open(file, "rb")  # noqa: SIM115 closed by the caller
    if file.lower().endswith(COMPRESSED):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw)), raw
    return raw, raw


def _pieces_of_text(file: str) -> Iterator[tuple[Document, int, bool]]:
    stream, raw = _opened(file)
    with raw, stream:
        try:
            number, lines = 1, stream.readlines(_PIECE_BYTES)
            while lines:
                following = stream.readlines(_PIECE_BYTES)
                text = _decoded(b"".join(lines), f"{file}, lines {number} on,")
                yield {"text": text}, raw.tell(), not following
                number, lines = number + len(lines), following
        except (EOFError, gzip.BadGzipFile) as error:
            raise BadRow(file, f"cannot be unpacked ({error})", _WHOLE) from error


def _decoded(text: bytes, place: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        rule = f"is not UTF-8 (byte {error.object[error.start]:#04x})"
        raise BadRow(place, rule, "convert it, as with iconv -t utf-8") from error


def _rows_of_json(file: str, fields: Sequence[str]) -> Iterator[tuple[Document, int, bool]]:
    stream, raw = _opened(file)
    with raw, stream:
        try:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                place = f"{file}, line {number},"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    rule = f"is not JSON ({error})"
                    raise BadRow(place, rule, "write one object a line") from error
                yield _chosen(row, fields, place), raw.tell(), True
        except (EOFError, gzip.BadGzipFile) as error:
            raise BadRow(file, f"cannot be unpacked ({error})", _WHOLE) from error


def _chosen(row: object, fields: Sequence[str], place: str) -> Document:
    """Return the values of `fields` in a row. Raises BadRow where one is missing or null."""
    if not isinstance(row, Mapping):
        raise BadRow(place, "is no JSON object", 'write rows such as {"text": "..."}')
    for field in fields:
        if row.get(field) is None:
            rule = f"has no field {field}" if field not in row else f"has null for {field}"
            remedy = f"name another with data.field: {nearest(field, map(str, row))}"
            raise BadRow(place, rule, remedy if field not in row else "leave such rows out")
    return {field: row[field] for field in fields}


def _rows_of_arrow(
    file: str, fields: Sequence[str], kind: str
) -> Iterator[tuple[Document, int, bool]]:
    import pyarrow as pa

    size, number = os.path.getsize(file), 0
    try:
        for batch, part in _batches(file, fields, kind):
            for row in batch.to_pylist():
                place = f"{file}, row {number} (from 0 on),"
                yield _chosen(row, fields, place), int(size * part), True
                number += 1
    except pa.ArrowInvalid as error:
        said = " ".join(str(error).split())
        raise BadRow(file, f"cannot be read ({said[:300]})", _WHOLE) from error


def _batches(file: str, fields: Sequence[str], kind: str) -> Iterator[tuple[Any, float]]:
    """Yield the rows of a file in batches, each with the fraction of the file that has been
    read."""
    if kind == ".parquet":
        from pyarrow import parquet

        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            _refuse_missing(file, fields, names)
            rows, read = table.metadata.num_rows, 0
            for batch in table.iter_batches(_ROWS, columns=list(fields)):
                read += batch.num_rows
                yield batch, read / rows
        return
    from pyarrow import ipc, memory_map

    with memory_map(file) as source:
        try:
            reader: Any = ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        except Exception:  # the format of streams, which `datasets` writes
            source.seek(0)
            reader = batches = ipc.open_stream(source)
        _refuse_missing(file, fields, reader.schema.names)
        for batch in batches:
            for start in range(0, batch.num_rows, _ROWS):
                rows = batch.select(list(fields)).slice(start, _ROWS)
                yield rows, source.tell() / max(1, source.size())


def _refuse_missing(file: str, fields: Sequence[str], names: Sequence[str]) -> None:
    for field in fields:
        if field not in names:
            remedy = f"name another with data.field: {nearest(field, names)}"
            raise BadRow(file, f"has no column {field}", remedy)
