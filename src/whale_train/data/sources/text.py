"""`data=text`: bytes of any files, cut into sequences, for causal and masked language models.

A token is a byte, so that any text in any encoding works and no vocabulary is needed.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from whale_train.data.dataset import Batch, Dataset, EvaluationSets, Indices, RowDataset, hold_back
from whale_train.data.paths import UserPath, missing_path, refuse_special, unreadable
from whale_train.data.random_bits import random_bits, stream_key
from whale_train.data.tokens.corpus_files import COMPRESSED, suffix_of
from whale_train.errors import ConfigError, Fault
from whale_train.strategies.graph.operation_graph import InputField

MASK_TOKEN = 256
# The share of positions to predict: Devlin et al., "BERT", NAACL 2019, section 3.1. All of them
# are masked; BERT's 80/10/10 mixture is not followed.
MASKED_SHARE = 0.15
# The label that torch's cross_entropy leaves out by default.
IGNORED_LABEL = -100

_STANDARD_LIBRARY_BYTES = 8_000_000
_NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class TextOptions(BaseModel):
    """Options of `data=text`.

    path: a file; a folder, for every file below it that is not hidden, by name, without following
        links to folders; or None for the source of this Python's standard library without its
        tests.
    sequence_length: bytes of a sample.
    objective: what is predicted: the next bytes (causal) or masked ones.
    max_bytes: the most bytes of the corpus; None is 8 MB of the standard library, and all of a
        path.
    shuffle: whether epochs are permuted.
    evaluation_fraction: fraction of the samples that is held back.
    evaluation: evaluation sets by name, each this data with other options; None has none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["text"] = "text"
    path: UserPath | None = None
    sequence_length: int = Field(64, ge=2)
    objective: Literal["causal", "masked"] = "causal"
    max_bytes: int | None = Field(None, ge=2)
    shuffle: bool = True
    evaluation_fraction: float = Field(0.1, ge=0, lt=1)
    evaluation: EvaluationSets | None = None


def open_text(options: TextOptions) -> Dataset:
    """Return the dataset of consecutive windows of `sequence_length` bytes.

    Files are joined by a newline. A last, shorter window is left out.

    The fields are `input_ids` and `labels`, int64 `[sequence_length]`. Causal: the labels are the
    inputs, as Hugging Face models expect, which shift them. Masked: each position is replaced by
    token 256 with probability 0.15, and its byte is the label; elsewhere the label is -100. The
    masked positions depend only on their place in the corpus.

    Raises ConfigError when there is nothing to read, or less than one sequence.
    """
    corpus = _corpus(options)
    length = options.sequence_length
    num_windows = len(corpus) // length
    if not num_windows:
        raise ConfigError([_too_short(options, len(corpus))])
    windows = corpus[: num_windows * length].reshape(num_windows, length)
    masked = options.objective == "masked"

    def read_rows(rows: Indices, draws: Indices) -> Batch:
        tokens = windows[rows].astype(np.int64)
        return _masked(tokens, rows) if masked else {"input_ids": tokens, "labels": tokens.copy()}

    fields = (
        InputField("input_ids", (length,), "int64", MASK_TOKEN + 1 if masked else 256),
        InputField("labels", (length,), "int64", 256),
    )
    return RowDataset(fields, hold_back(num_windows, options.evaluation_fraction), read_rows)


def _masked(tokens: NDArray[np.int64], rows: Indices) -> Batch:
    """Return `tokens`, int64 `[n, length]`, as a batch with masked positions.

    `rows`, int64 `[n]`, are the numbers of the windows, which determine the positions.
    """
    length = tokens.shape[1]
    counters = rows[:, None] * length + np.arange(length)
    chosen = random_bits(stream_key("mask", 0), counters) < np.uint64(int(MASKED_SHARE * 2**64))
    return {
        "input_ids": np.where(chosen, MASK_TOKEN, tokens),
        "labels": np.where(chosen, tokens, IGNORED_LABEL),
    }


def _corpus(options: TextOptions) -> NDArray[np.uint8]:
    """Return the bytes of the corpus, uint8 `[bytes]`.

    Raises ConfigError for a path that cannot be read.
    """
    path = Path(options.path or sysconfig.get_paths()["stdlib"])
    try:
        if options.path is None:
            limit = options.max_bytes or _STANDARD_LIBRARY_BYTES
            return _joined(_below(path, source_only=True), limit)
        if not os.path.exists(path):
            raise missing_path(options.path)
        refuse_special(options.path)
        if suffix_of(options.path) not in ("", ".txt") or options.path.endswith(COMPRESSED):
            raise ConfigError([_not_text(options.path)])
        if path.is_dir():
            return _joined(_below(path, source_only=False), options.max_bytes)
        size = path.stat().st_size
        if not size:  # an empty file cannot be mapped
            return np.empty(0, np.uint8)
        return np.memmap(path, np.uint8, mode="r", shape=(min(size, options.max_bytes or size),))
    except OSError as error:
        raise unreadable(error, str(path)) from error


def _not_text(path: str) -> Fault:
    """Return the fault of a file in a format that contains texts among other bytes."""
    rule = "would be trained on as it lies there, with all that is around its texts"
    remedy = f"use data=text_files data.path={path} data.tokenizer=DIR, or a .txt file"
    return Fault("data.path", path, rule, remedy)


def _below(folder: Path, source_only: bool) -> Iterator[Path]:
    """Yield the files below a folder: the files of each folder by name, then its folders by
    name."""

    def fail(error: OSError) -> None:
        raise error

    skipped = _NOT_SOURCE if source_only else set()
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(n for n in folders if n not in skipped and not n.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            wanted = path.suffix == ".py" if source_only else not name.startswith(".")
            if wanted and path.is_file():
                yield path


def _joined(files: Iterator[Path], limit: int | None) -> NDArray[np.uint8]:
    """Return the bytes of `files` with a newline between files, uint8, at most `limit` of them.

    Files that are not needed are not opened.
    """
    chosen, total = [], 0
    for path in files:
        size = path.stat().st_size
        chosen.append((path, size))
        total += size + 1
        if limit is not None and total > limit:
            break
    total = max(0, total - 1)
    corpus = np.full(total if limit is None else min(total, limit), ord("\n"), np.uint8)
    start = 0
    for path, size in chosen:
        with open(path, "rb") as file:
            file.readinto(corpus[start : start + size].data)
        start += size + 1
    return corpus


def _too_short(options: TextOptions, num_bytes: int) -> Fault:
    if options.max_bytes is not None and options.max_bytes < options.sequence_length:
        return Fault(
            "data.max_bytes",
            str(options.max_bytes),
            f"is less than one sequence of data.sequence_length={options.sequence_length} bytes",
            f"use at least {options.sequence_length}",
        )
    if options.path is None and not num_bytes:
        return Fault(
            "data.path",
            "null",
            "stands for the source of Python's standard library, which is not on this machine",
            "name a file or folder of text",
        )
    return Fault(
        "data.path",
        options.path or "null",
        f"holds {num_bytes} bytes, less than one sequence of "
        f"data.sequence_length={options.sequence_length}",
        f"use data.sequence_length={num_bytes} or less, or more text"
        if num_bytes >= 2
        else "name a file or folder of text",
    )
