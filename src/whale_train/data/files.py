"""A folder of parquet, json or csv files as one Arrow table, or an error that names the bad file.

`datasets` and its readers raise errors of many kinds, which seldom name the file. After such an
error, the files are read one by one.
"""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whale_train.data.paths import path_error, refuse_special
from whale_train.errors import RequestError, listed

READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
_REMEDY = "name a folder that save_to_disk wrote, or one of parquet, json or csv files alone"
_WHOLE = "write the file again, or copy it whole"


def files_in(folder: Path) -> tuple[str, list[str]]:
    """Return the reader of a folder's files, and the paths of the files, sorted.

    Raises ConfigError where there are no files, where the files are of several kinds, and where one
    is not a regular file.
    """
    files = sorted(file for file in folder.glob("*") if file.suffix in READERS)
    readers = sorted({READERS[file.suffix] for file in files})
    if len(readers) != 1:
        rule = f"holds {' and '.join(readers)} files" if readers else "is not a dataset"
        raise path_error(str(folder), rule, _REMEDY)
    for file in files:
        refuse_special(str(file))
        if file.is_dir():
            raise path_error(str(file), "is a folder, not a file", _REMEDY)
    return readers[0], [str(file) for file in files]


def read_files(reader: str, files: Sequence[str]) -> Any:
    """Return the rows of `files`, one file after another, as a `datasets.Dataset`.

    Raises ConfigError naming the file that cannot be read, is empty, or has other columns than the
    first. Raises OSError where the system cannot read the files.
    """
    import datasets

    def load(paths: Sequence[str]) -> Any:
        return datasets.load_dataset(reader, data_files=list(paths), split="train")

    with _quiet():
        try:
            return load(files)
        except (RequestError, OSError):
            raise
        except Exception as error:
            problem = error
        first = None
        for file in files:
            if not os.path.getsize(file):
                raise path_error(file, "is empty", "write the file again, or take it away")
            try:
                table = load([file])
            except Exception as error:
                rule = f"cannot be read as {reader} ({_said(error)})"
                raise path_error(file, rule, _WHOLE) from error
            first = table if first is None else first
            _refuse_other_columns(file, table, files[0], first)
        rule = f"cannot be read as {reader} files ({_said(problem)})"
        raise path_error(str(Path(files[0]).parent), rule, _WHOLE) from problem


def read_saved(path: str) -> Any:
    """Return the `Dataset` or `DatasetDict` that `save_to_disk` wrote to the folder `path`.

    Raises ConfigError where the folder is damaged.
    """
    import datasets

    with _quiet():
        try:
            return datasets.load_from_disk(path)
        except Exception as error:
            rule = f"is not what save_to_disk wrote ({_said(error)})"
            raise path_error(path, rule, "save it again, or copy the folder whole") from error


def place_of(row: int, reader: str, files: Sequence[str]) -> tuple[str, int]:
    """Return the file that holds row `row` of all files together, and the row's number in the file.

    Both row numbers count from 0.
    """
    with _quiet():
        import datasets

        for file in files[:-1]:
            count = len(datasets.load_dataset(reader, data_files=[file], split="train"))
            if row < count:
                return file, row
            row -= count
    return files[-1], row


def _refuse_other_columns(file: str, table: Any, first_file: str, first: Any) -> None:
    """Raise ConfigError where the columns of `file` have other names or types than the first
    file's."""
    names, wanted = set(table.column_names), set(first.column_names)
    if names != wanted:
        differences = [f"has {x}" for x in sorted(names - wanted)]
        differences += [f"lacks {x}" for x in sorted(wanted - names)]
        rule = f"has other columns than {first_file}: it {listed(differences)}"
        raise path_error(file, rule, "give all files the same columns, or name one of them")
    for name in sorted(names):
        kind, other = table.features[name], first.features[name]
        if kind != other:
            rule = f"has another kind of column {name} than {first_file} ({_kind(kind)}, there "
            rule += f"{_kind(other)})"
            raise path_error(file, rule, "give the column one kind in all files")


def _kind(feature: Any) -> str:
    return str(getattr(feature, "dtype", None) or feature)


def _said(error: BaseException) -> str:
    """Return the innermost cause of an error as one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    if isinstance(error, StopIteration) or "corresponds to no data" in text:
        return "it has no rows"
    return f"{type(error).__name__}: {text[:_MOST]}"


_MOST = 300  # characters of another library's message


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the log of `datasets`, and its progress bars where the output is not a terminal."""
    import datasets

    hides = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    if hides:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        logging.disable(disabled)
        if hides:
            datasets.enable_progress_bars()
