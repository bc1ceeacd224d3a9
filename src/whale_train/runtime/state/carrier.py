"""Copy files between rank 0's run directory and the run directories of hosts that do not share it.

Files go through a CPU process group of rank 0 and the ranks of those hosts, in rank order. Nothing
else uses the group, so a thread may use it during the steps.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from whale_train.checkpoints.checkpoint_files import MANIFEST, FileRecord, Manifest
from whale_train.checkpoints.url_path import Place, UrlPath
from whale_train.disk import writing
from whale_train.machine.hosts import Host
from whale_train.runtime.state.parts import SavedPart, gathered, hand_over

FETCHED = ".fetched"  # folder of copied checkpoints, in the run directory of a host
_PIECE_BYTES = 2**24  # sent at a time


class Carrier:
    """Copies files from and to `rank`, one of the `ranks` ranks of a job.

    `hosts` are the job's hosts, or () where all ranks share a file system. A wait for another rank
    ends after `timeout_s` seconds. All ranks must make a Carrier together.
    """

    def __init__(
        self, run_dir: Path, hosts: Sequence[Host], rank: int, ranks: int, timeout_s: float
    ) -> None:
        self._run_dir, self._rank, self._ranks, self._timeout_s = run_dir, rank, ranks, timeout_s
        self._apart = [host for host in hosts if not host.shares]
        self._strangers = sorted(rank for host in self._apart for rank in host.ranks)
        self._group = None
        if self._strangers:
            timeout = timedelta(seconds=timeout_s)
            self._group = dist.new_group(
                [0, *self._strangers], timeout, "gloo", group_desc="files between hosts"
            )

    @property
    def is_apart(self) -> bool:
        """Return True if this rank's host has a run directory of its own."""
        return self._rank in self._strangers

    def hand_over(self, folder: Path, part: SavedPart) -> None:
        """Report this rank's part of `folder` to rank 0.

        The files are moved to rank 0 if it does not share this rank's file system.
        """
        if not self.is_apart:
            hand_over(folder, part)
            return
        dist.send_object_list([part.to_json()], 0, self._group)
        for file in part.files:
            self._send_file(folder / file.path, file.bytes, 0)
            (folder / file.path).unlink()
        for path in (*{(folder / file.path).parent for file in part.files}, folder):
            with suppress(OSError):  # not empty: other ranks of the host have files in it
                path.rmdir()

    def gathered(self, folder: Path, own: SavedPart) -> list[FileRecord]:
        """Return the records of all ranks' files, once all files are in `folder`. Only rank 0 calls
        it.

        Rank 0's part `own` comes first. Raises OSError where a file is missing.
        """
        for rank in self._strangers:
            hand_over(folder, self._received(folder, rank))
        return gathered(folder, own, self._ranks, self._timeout_s)

    def gather(self, folder: Path, own: SavedPart) -> list[FileRecord]:
        """Report the part `own` of each rank to rank 0; return the records of all files on rank 0.

        The list is empty on the other ranks. A collective. Raises OSError where a part did not
        arrive.
        """
        if self._rank == 0:
            return self.gathered(folder, own)
        self.hand_over(folder, own)
        return []

    def fetched(self, checkpoint: Place) -> Place:
        """Return the folder from which this rank reads the `checkpoint` that rank 0 resumes from.

        It is `checkpoint`, or a copy on this rank's host if some rank of the host cannot read
        `checkpoint`. Every host reads a store by itself. A collective. Raises OSError if the copy
        cannot be written.
        """
        if isinstance(checkpoint, UrlPath):
            return checkpoint
        if self._group is None or not (self._rank == 0 or self.is_apart):
            return checkpoint
        text = [(checkpoint / MANIFEST).read_text(encoding="utf-8") if self._rank == 0 else ""]
        dist.broadcast_object_list(text, src=0, group=self._group)
        sees: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(sees, _text_of(checkpoint / MANIFEST) == text[0], self._group)
        saw = dict(zip([0, *self._strangers], sees, strict=True))
        copy = self._run_dir / FETCHED / checkpoint.name
        for host in self._apart:
            if all(saw[rank] for rank in host.ranks):
                continue
            first = min(host.ranks)
            if self._rank == 0:
                for file in Manifest.read(checkpoint).files:
                    self._send_file(checkpoint / file.path, file.bytes, first)
            elif self._rank == first:
                shutil.rmtree(copy, ignore_errors=True)
                copy.mkdir(parents=True)
                (copy / MANIFEST).write_text(text[0], encoding="utf-8")
                for file in Manifest.read(copy).files:
                    if failed := self._receive_file(copy / file.path, file.bytes, 0):
                        raise OSError(f"{copy / file.path} could not be written: {failed}")
            if self._rank in host.ranks:
                checkpoint = copy
        dist.barrier(self._group)  # until the first rank of the host has made the copy
        return checkpoint

    def forget(self) -> None:
        """Remove fetched copies, after all ranks have read them. A collective."""
        if self._group is not None and (self._rank == 0 or self.is_apart):
            dist.barrier(self._group)
            shutil.rmtree(self._run_dir / FETCHED, ignore_errors=True)

    def _received(self, folder: Path, rank: int) -> SavedPart:
        """Return the part of `rank`, whose files are then in `folder`; a failure is the part's
        error."""
        try:
            messages: list[Any] = [None]
            dist.recv_object_list(messages, rank, self._group)
            part = SavedPart.from_json(messages[0])
            errors = [self._receive_file(folder / x.path, x.bytes, rank) for x in part.files]
        except RuntimeError as error:  # the sending rank has ended
            return SavedPart(rank, error=f"its files did not arrive ({str(error).splitlines()[0]})")
        failed = next(filter(None, errors), "")
        return SavedPart(rank, error=failed) if failed else part

    def _send_file(self, path: Path, size: int, target: int) -> None:
        """Send `size` bytes of the file `path` to rank `target`."""
        with path.open("rb") as file:
            for piece in _pieces(size):
                file.readinto(_bytes_of(piece))
                dist.send(piece, target, self._group)

    def _receive_file(self, path: Path, size: int, source: int) -> str:
        """Write the bytes that rank `source` sends to `path`; return the reason of a failure, or
        ''.

        All bytes are received even if they cannot be written.
        """
        failed = ""
        file = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("wb", buffering=0)
        except OSError as error:
            failed = error.strerror or str(error)
        for piece in _pieces(size):
            dist.recv(piece, source, self._group)
            if file is None or failed:
                continue
            try:
                view = _bytes_of(piece)
                with writing(path, size):
                    while view:
                        view = view[file.write(view) :]
            except OSError as error:  # a full disk
                failed = error.strerror or str(error)
        if file is not None:
            with suppress(OSError):
                file.close()
        return failed


def _pieces(size: int) -> Iterator[torch.Tensor]:
    """Yield an uninitialised uint8 buffer for each piece of at most `_PIECE_BYTES` of `size`
    bytes."""
    for start in range(0, size, _PIECE_BYTES):
        yield torch.empty(min(_PIECE_BYTES, size - start), dtype=torch.uint8)


def _bytes_of(piece: torch.Tensor) -> "memoryview[int]":
    view: memoryview[int] = piece.numpy().data
    return view


def _text_of(path: Path) -> str:
    """Return the text of a file, or '' where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
