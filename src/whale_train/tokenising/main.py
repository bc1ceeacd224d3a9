"""Tokenise a corpus into a store, in a process of its own.

    python -m whale_train.tokenising.main --parent PID

A `StoreRequest` comes through standard input as JSON, with the folder of the store and a file for
the number of bytes done. The exit status is 0, or 1 with a fault as JSON on standard output.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from whale_train.data.tokens.corpus_files import BadRow, read_documents
from whale_train.data.tokens.make_store import StoreRequest
from whale_train.data.tokens.token_store import StoreWriter
from whale_train.errors import ConfigError, Fault
from whale_train.machine.parents import end_with_parent
from whale_train.own_code import said
from whale_train.tokenising.tokenizer import KEY, Tokenizer

_BATCH_CHARACTERS = 4_000_000  # characters of texts that are tokenised together
_BATCH_DOCUMENTS = 8192


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of this module, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m whale_train.tokenising.main")
    parser.add_argument("--parent", type=int, required=True, help="end with this process")
    end_with_parent(parser.parse_args(arguments).parent, signal.SIGTERM)
    order = json.loads(sys.stdin.read())
    store, progress = Path(order.pop("store")), Path(order.pop("progress"))
    request = StoreRequest(
        tuple(order["files"]), tuple(order["fields"]), order["tokenizer"], order["key"]
    )
    try:
        make(request, store, progress)
    except BadRow as row:
        return _report(Fault(request.key, row.place, row.rule, row.remedy))
    except ConfigError as error:
        return _report(error.faults[0])
    except OSError as error:
        said = error.strerror or str(error)
        key = "data.cache" if str(store) in str(error.filename) else request.key
        return _report(Fault(key, str(error.filename or store), said, "make room, or correct it"))
    return 0


def _report(fault: Fault) -> int:
    """Write a fault to standard output, and return the exit status 1."""
    sys.stdout.write(json.dumps(asdict(fault)))
    return 1


def make(request: StoreRequest, store: Path, progress: Path) -> None:
    """Write the store of `request` into the folder `store`, and the number of bytes done into
    `progress`.

    Raises BadRow, ConfigError and OSError.
    """
    tokenizer = Tokenizer(request.tokenizer)
    writer = StoreWriter(store, tokenizer.vocabulary, tokenizer.special)
    skipped = 0
    batches = _batches(request)
    with ThreadPoolExecutor(1) as pool:  # rows are read, and tokens written, beside the tokenizer
        pending: list[tuple[_Batch, Any]] = []
        for batch in batches:
            pending.append((batch, pool.submit(_encoded, tokenizer, batch)))
            skipped += batch.skipped
            if len(pending) == 2:
                _write(writer, *pending.pop(0), progress)
        for batch, future in pending:
            _write(writer, batch, future, progress)
    writer.close(skipped)


@dataclass
class _Batch:
    """Documents that are tokenised together.

    documents: texts, or lists of messages.
    places: the place of each document, for messages about chats.
    done: bytes of the corpus that have been read up to the end of the batch.
    begins: False where the first document continues one of the batch before.
    ends: False where the last document continues in the next batch.
    skipped: number of documents without text, which are left out.
    """

    documents: list[Any]
    places: list[str]
    done: int = 0
    begins: bool = True
    ends: bool = True
    skipped: int = 0

    @property
    def is_chat(self) -> bool:
        return bool(self.documents) and not isinstance(self.documents[0], str)


def _batches(request: StoreRequest) -> Iterator[_Batch]:
    """Yield the documents of all files in batches."""
    batch, characters, before = _Batch([], []), 0, 0
    first: object = None  # the first of all values
    for file in request.files:
        for row, (document, read, ends) in enumerate(read_documents(file, request.fields)):
            for field in request.fields:
                value, place = document[field], f"{file}, row {row} (from 0 on),"
                if isinstance(value, str) and not value and ends and len(request.fields) == 1:
                    batch.skipped += 1
                    continue
                first = value if first is None else first
                _refuse_other_values(first, value, field, place)
                batch.documents.append(value)
                batch.places.append(place)
                characters += len(value) if isinstance(value, str) else 1000
            batch.done, batch.ends = before + read, ends
            if (
                characters > _BATCH_CHARACTERS
                or len(batch.documents) >= _BATCH_DOCUMENTS
                or not ends
            ):
                yield batch
                batch, characters = _Batch([], [], begins=ends), 0
        before += os.path.getsize(file)
    if batch.documents or batch.skipped:
        yield batch


def _refuse_other_values(first: object, value: object, field: str, place: str) -> None:
    """Raise BadRow for a value that is neither a text nor a chat, or of the other kind than the
    first."""
    is_chat = isinstance(value, list) and all(
        isinstance(x, dict) and {"role", "content"} <= x.keys() for x in value
    )
    if not isinstance(value, str) and not (is_chat and value):
        rule = f"has no text in {field} (a {type(value).__name__})"
        remedy = "write a text there, or a list of messages {role: ..., content: ...}"
        raise BadRow(place, rule, remedy)
    if isinstance(first, str) != isinstance(value, str):
        kinds = ("chat", "text") if isinstance(first, str) else ("text", "chat")
        rule = f"has a {kinds[0]} in {field}, and the first row has a {kinds[1]}"
        remedy = "keep texts and chats in files of their own, each in data.sources"
        raise BadRow(place, rule, remedy)


def _encoded(tokenizer: Tokenizer, batch: _Batch) -> tuple[list[Any], list[Any] | None]:
    """Return the token numbers of a batch's documents, and for chats a mask of the tokens that
    count as targets."""
    if not batch.is_chat:
        try:
            encoded = tokenizer.encoded(batch.documents)
        except Exception as error:
            raise _not_encoded(tokenizer, batch) or error from error
        last = len(encoded) - 1
        documents = [
            tokenizer.document(x, batch.begins or i > 0, batch.ends or i < last)
            for i, x in enumerate(encoded)
        ]
        return documents, None
    numbers, counts = [], []
    for messages, place in zip(batch.documents, batch.places, strict=True):
        try:
            of_chat, counted = tokenizer.chat(messages)
        except Exception as error:  # a template may raise anything
            rule = f"cannot be written as a chat ({error})"
            raise BadRow(place, rule, "use a tokenizer with a template for it") from error
        numbers.append(of_chat)
        counts.append(counted)
    return numbers, counts


def _not_encoded(tokenizer: Tokenizer, batch: _Batch) -> BadRow | None:
    """Return the error of the first text in a batch that cannot be tokenised, or None."""
    for text, place in zip(batch.documents, batch.places, strict=True):
        broken = next((x for x in text if "\ud800" <= x <= "\udfff"), "")
        if broken:
            rule = f"has half of a letter of UTF-16 ({ord(broken):#06x}), which is no text"
            return BadRow(place, rule, "write the row again, or leave it out")
        try:
            tokenizer.encoded([text])
        except Exception as error:
            rule = f"cannot be tokenised ({said(error)})"
            return BadRow(place, rule, f"use a {KEY} that has all of its words, or correct the row")
    return None


def _write(writer: StoreWriter, batch: _Batch, future: Any, progress: Path) -> None:
    """Add the documents of a batch to the store, and write the bytes done."""
    documents, targets = future.result()
    if documents:
        writer.add(documents, targets, batch.ends)
    progress.write_text(str(batch.done), encoding="ascii")


if __name__ == "__main__":
    sys.exit(main())
