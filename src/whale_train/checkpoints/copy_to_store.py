"""Copy checkpoints and trained weights into a store, and remove old ones there.

    URL/
        run.json              the run whose checkpoints these are
        step_N/               a checkpoint as on the disk, its manifest written last
        best.json             beside them, as in the folder of checkpoints
        model/                the trained weights
        request.json, summary.json    of the run, written after the weights

A folder without a manifest is no checkpoint. Whatever replaces or removes a checkpoint removes its
manifest first.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from whale_train.checkpoints.checkpoint_files import (
    BEST,
    MANIFEST,
    MODEL,
    Manifest,
    best_step,
    checkpoints_in,
)
from whale_train.checkpoints.safetensors_files import BrokenCheckpoint
from whale_train.checkpoints.url_path import StoreError, UrlPath

HELD = ".held"  # beside the checkpoints: links to the files of the one that is copied
_OF_RUN = ("request.json", "summary.json")


def hold(checkpoint: Path) -> Path | None:
    """Return a folder that has a checkpoint's files for as long as it is copied, though the run
    may remove the checkpoint meanwhile. `release` removes it.

    It has links to the files; on a file system without links it is the checkpoint itself. Returns
    None where the checkpoint is not there, or is being removed.
    """
    held = checkpoint.parent / HELD / checkpoint.name
    shutil.rmtree(held, ignore_errors=True)
    try:
        for file in Manifest.read(checkpoint).files:
            _link(checkpoint / file.path, held / file.path)
        _link(checkpoint / MANIFEST, held / MANIFEST)
    except (BrokenCheckpoint, FileNotFoundError):
        release(held)
        return None
    except OSError:
        release(held)
        return checkpoint
    return held


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.link(source, target)


def release(held: Path) -> None:
    """Remove a folder of `hold`, which is no checkpoint."""
    if held.parent.name == HELD:
        shutil.rmtree(held, ignore_errors=True)
        with suppress(OSError):  # not made, or with files of a run that was killed
            held.parent.rmdir()


def copy_checkpoint(source: Path, target: UrlPath, copied: Callable[[int], None]) -> int:
    """Copy a whole checkpoint to a folder of a store, and return the bytes of its files.

    copied: is called with the bytes of every file that is there.

    Nothing is copied where the store has the same manifest already. Raises StoreError, and
    FileNotFoundError where a file of the checkpoint is not there any more.
    """
    text = (source / MANIFEST).read_bytes()
    manifest = Manifest.read(source)
    if _content(target / MANIFEST) == text:
        return manifest.bytes
    remove_checkpoint(target)
    for file in manifest.files:
        (target / file.path).put(source / file.path)
        copied(file.bytes)
    sizes = target.sizes()
    for file in manifest.files:
        if sizes.get(file.path) != file.bytes:
            said = f"has {sizes.get(file.path, 0):,} of {file.bytes:,} bytes, once it is written"
            raise StoreError(f"{target / file.path}: {said}")
    (target / MANIFEST).write_bytes(text)
    return manifest.bytes


def _content(path: UrlPath) -> bytes | None:
    """Return the bytes of a file, or None where there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def remove_checkpoint(target: UrlPath) -> None:
    """Remove a checkpoint of a store, its manifest first. Raises StoreError."""
    (target / MANIFEST).remove()
    target.remove()


def copy_best(folder: Path, to: UrlPath) -> None:
    """Copy the file that says which checkpoint of `folder` is the best, where the store has that
    checkpoint. Raises StoreError."""
    best = best_step(folder)
    if best is not None and (to / f"step_{best}" / MANIFEST).is_file():
        (to / BEST).put(folder / BEST)


def prune(to: UrlPath, keep: int | None) -> list[int]:
    """Remove all but the newest `keep` whole checkpoints of a store, and the best. Folders without
    a manifest count for nothing, and are removed.

    keep: None keeps all that are whole.

    Returns the steps of those that stay. Raises StoreError.
    """
    whole = []
    for checkpoint in checkpoints_in(to):
        if (checkpoint / MANIFEST).is_file():
            whole.append(checkpoint)
        else:
            checkpoint.remove()
    if keep is not None:
        best = f"step_{best_step(to)}"
        for old in [x for x in whole if x.name != best][keep:]:
            remove_checkpoint(old)
            whole.remove(old)
    return sorted(int(x.name.removeprefix("step_")) for x in whole)


def remove_after(to: UrlPath, step: int) -> None:
    """Remove the checkpoints of a store that are of later steps than the one that a run goes on
    from, and those without a manifest. Raises StoreError."""
    for checkpoint in checkpoints_in(to):
        is_later = int(checkpoint.name.removeprefix("step_")) > step
        if is_later or not (checkpoint / MANIFEST).is_file():
            remove_checkpoint(checkpoint)


def copy_model(run_dir: Path, to: UrlPath, copied: Callable[[int], None]) -> int:
    """Copy the trained weights of a run into a store, and return their bytes.

    The run's request and summary follow: they are removed first, so that a summary is there only
    beside whole weights. Raises StoreError.
    """
    for name in reversed(_OF_RUN):
        (to / name).remove()
    (to / MODEL).remove()
    size = 0
    for path in sorted(x for x in (run_dir / MODEL).rglob("*") if x.is_file()):
        (to / MODEL / path.relative_to(run_dir / MODEL).as_posix()).put(path)
        copied(path.stat().st_size)
        size += path.stat().st_size
    for name in _OF_RUN:
        if (run_dir / name).exists():
            (to / name).put(run_dir / name)
    return size
