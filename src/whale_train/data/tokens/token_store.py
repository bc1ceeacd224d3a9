"""The tokens of a corpus in a folder: written once, then read in any order.

Files are read with `pread` and not mapped (`stored_array.py` says why).

    tokens.bin     token numbers of all documents, one after another, uint16 or uint32
    ends.bin       the index after each document's last token, int64
    targets.bin    1 for tokens that a loss counts (the answers of chats), uint8; absent: all count
    store.json     sizes and special tokens; written last
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whale_train.data.tokens.stored_array import StoredArray, read_at

Tokens = NDArray[np.int64]
_DESCRIPTION = "store.json"


@dataclass(frozen=True)
class Special:
    """Special tokens of a tokenizer; None for a token that it does not have.

    eos: end of a text.
    pad: padding.
    mask: replaces a token that a masked language model predicts.
    ids: numbers of all special tokens.
    """

    eos: int | None = None
    pad: int | None = None
    mask: int | None = None
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class StoreDescription:
    """Sizes of a store.

    dtype: dtype of tokens on the disk.
    num_tokens: number of tokens.
    num_documents: number of documents.
    vocabulary: the tokenizer's largest token number plus one.
    skipped: number of documents without text, which are left out.
    special: the tokenizer's special tokens.
    """

    dtype: str
    num_tokens: int
    num_documents: int
    vocabulary: int
    skipped: int
    special: Special


class TokenStore:
    """Reader of a store. It works in processes forked after it was opened."""

    def __init__(self, folder: Path) -> None:
        """Open the store in `folder`. Raises OSError, ValueError, KeyError or TypeError where the
        folder does not hold a store."""
        content = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
        special = Special(**{**content["special"], "ids": tuple(content["special"]["ids"])})
        self.description = StoreDescription(**{**content, "special": special})
        self.folder = folder
        self._dtype = np.dtype(self.description.dtype)
        self._tokens = os.open(folder / "tokens.bin", os.O_RDONLY | os.O_CLOEXEC)
        self.ends = StoredArray(folder / "ends.bin", (self.description.num_documents,))
        has_targets = (folder / "targets.bin").exists()
        self._targets = os.open(folder / "targets.bin", os.O_RDONLY) if has_targets else None

    @property
    def has_targets(self) -> bool:
        """Return whether the loss counts some tokens only."""
        return self._targets is not None

    def tokens(self, start: int, stop: int) -> Tokens:
        """Return tokens `start` to `stop` - 1 of the whole corpus, int64 `[stop - start]`."""
        size = self._dtype.itemsize
        read = read_at(self._tokens, start * size, (stop - start) * size)
        return np.frombuffer(read, self._dtype).astype(np.int64)

    def targets(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return for tokens `start` to `stop` - 1 whether the loss counts them, bool `[stop -
        start]`."""
        if self._targets is None:
            return np.ones(stop - start, np.bool_)
        return np.frombuffer(read_at(self._targets, start, stop - start), np.bool_)


class StoreWriter:
    """Writer of a store into a folder that does not exist yet."""

    def __init__(self, folder: Path, vocabulary: int, special: Special) -> None:
        folder.mkdir(parents=True)
        self.folder, self._vocabulary, self._special = folder, vocabulary, special
        largest = max((vocabulary - 1, *special.ids))
        self._dtype = np.dtype(np.uint16 if largest < 2**16 else np.uint32)
        self._tokens = open(folder / "tokens.bin", "wb")  # noqa: SIM115 closed by `close`
        self._ends = open(folder / "ends.bin", "wb")  # noqa: SIM115
        self._targets: Any = None
        self._num_tokens = self._num_documents = 0

    def add(self, documents: Sequence[Any], targets: Sequence[Any] | None, ends: bool) -> None:
        """Add the tokens of `documents`, which are sequences of numbers.

        targets: for each document, whether the loss counts each token; None counts all.
        ends: False where the last document continues in the next call.
        """
        lengths = np.array([len(document) for document in documents], np.int64)
        all_tokens = np.concatenate([np.asarray(x, self._dtype) for x in documents])
        self._tokens.write(all_tokens.tobytes())
        if targets is not None:
            if self._targets is None:
                self._targets = open(self.folder / "targets.bin", "wb")  # noqa: SIM115
            self._targets.write(
                np.concatenate([np.asarray(x, np.bool_) for x in targets]).tobytes()
            )
        stops = self._num_tokens + np.cumsum(lengths)
        self._num_tokens = int(stops[-1])
        stops = stops if ends else stops[:-1]
        self._ends.write(stops.tobytes())
        self._num_documents += len(stops)

    def close(self, skipped: int) -> None:
        """Flush all files to the disk, and write the description that completes the store.

        skipped: number of documents without text, which were left out.
        """
        for file in (self._tokens, self._ends, self._targets):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
                file.close()
        numbers = (self._num_tokens, self._num_documents, self._vocabulary, skipped)
        described = StoreDescription(self._dtype.name, *numbers, self._special)
        text = json.dumps(asdict(described), indent=1) + "\n"
        (self.folder / _DESCRIPTION).write_text(text, encoding="utf-8")
