"""Copy checkpoints and trained weights into a store, and remove old ones from it.

    URL/
        run.json              the run that wrote the checkpoints
        step_N/               a checkpoint as on the disk, its manifest written last
        best.json             the best checkpoint, as in the run directory
        model/                the trained weights
        request.json, summary.json    of the run, written after the weights

A folder without a manifest is no checkpoint. To replace or remove a checkpoint, its manifest is
removed first.
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

HELD = ".held"  # beside the checkpoints: links to the files of the checkpoint that is being copied
_OF_RUN = ("request.json", "summary.json")


def hold(checkpoint: Path) -> Path | None:
    """Return a folder of hard links to a checkpoint's files, so that the run may remove the
    checkpoint while it is copied. `release` removes the folder.

    Returns `checkpoint` itself on a file system without links, and None where the checkpoint is
    missing or is being removed.
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
    """Remove a folder that `hold` returned, unless it is the checkpoint itself."""
    if held.parent.name == HELD:
        shutil.rmtree(held, ignore_errors=True)
        with suppress(OSError):  # it does not exist, or has files of a run that was killed
            held.parent.rmdir()


def copy_checkpoint(source: Path, target: UrlPath, copied: Callable[[int], None]) -> int:
    """Copy a complete checkpoint to a folder of a store, and return the bytes of its files.

    copied: called after every file with its bytes.

    Nothing is copied where the store already has the same manifest. Raises StoreError, and
    FileNotFoundError where a file of the checkpoint was removed meanwhile.
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
    """Return the bytes of a file, or None where the file does not exist."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def remove_checkpoint(target: UrlPath) -> None:
    """Remove a checkpoint of a store, its manifest first. Raises StoreError."""
    (target / MANIFEST).remove()
    target.remove()


def copy_best(folder: Path, to: UrlPath) -> None:
    """Copy the `best.json` of `folder` to a store that has the best checkpoint. Raises
    StoreError."""
    best = best_step(folder)
    if best is not None and (to / f"step_{best}" / MANIFEST).is_file():
        (to / BEST).put(folder / BEST)


def prune(to: UrlPath, keep: int | None) -> list[int]:
    """Remove all but the best and the newest `keep` checkpoints of a store, and folders without a
    manifest.

    keep: number of complete checkpoints that stay besides the best; None keeps all.

    Returns the steps of the remaining checkpoints, ascending. Raises StoreError.
    """
    complete = []
    for checkpoint in checkpoints_in(to):
        if (checkpoint / MANIFEST).is_file():
            complete.append(checkpoint)
        else:
            checkpoint.remove()
    if keep is not None:
        best = f"step_{best_step(to)}"
        for old in [x for x in complete if x.name != best][keep:]:
            remove_checkpoint(old)
            complete.remove(old)
    return sorted(int(x.name.removeprefix("step_")) for x in complete)


def remove_after(to: UrlPath, step: int) -> None:
    """Remove the checkpoints of steps after `step` from a store, and folders without a manifest.
    Raises StoreError.

    step: the step of the checkpoint that a run resumes from.
    """
    for checkpoint in checkpoints_in(to):
        is_later = int(checkpoint.name.removeprefix("step_")) > step
        if is_later or not (checkpoint / MANIFEST).is_file():
            remove_checkpoint(checkpoint)


def copy_model(run_dir: Path, to: UrlPath, copied: Callable[[int], None]) -> int:
    """Copy the trained weights of a run into a store, and return their bytes.

    copied: called after every file with its bytes.

    The run's request and summary are removed first and copied last, so that a store with a summary
    has complete weights. Raises StoreError.
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
