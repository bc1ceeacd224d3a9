"""Load the weights of a folder as tensors that are read on demand.

transformers loads them into a model, because it knows which weights were renamed, joined or split
since a folder was written. Within `deferred` it gets tensors without memory, so that joining is
recorded too, and done when its result is needed.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from whale_train.checkpoints.safetensors_files import BrokenCheckpoint, read_json
from whale_train.errors import ConfigError, Fault
from whale_train.models.weights.saved_configs import KEY

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Errors that safetensors and torch raise for an impossible header, beside their own types.
_OF_DAMAGED = (
    *(OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError),
    *(OverflowError, MemoryError),
)
# transformers reads in its own threads, where operations on a tensor are not recorded.
_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"


def open_folder(
    made: Any, config: Any, folder: Path, *, any_shape: bool = False
) -> tuple[nn.Module, Mapping[str, Any]]:
    """Return a model with the weights in `folder`, and `from_pretrained`'s loading info.

    made: the model's class, of transformers.
    config: the model's config.
    any_shape: whether weights of another shape than the model's are left out.

    Weights are in fp32. The loading info has the missing and unexpected names of weights. Raises
    ConfigError for a folder without weights in safetensors and for damaged files, and the errors of
    transformers.
    """
    weights = {name: stored(*where) for name, where in _tensors_in(folder)}
    with _quiet_transformers():
        model, said = made.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=torch.float32,
            ignore_mismatched_sizes=any_shape,
            output_loading_info=True,
        )
    return model, said


@torch.library.custom_op("whale_train::stored", mutates_args=())
def stored(path: str, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the tensor `name` of a safetensors file in `dtype`, in memory of its own."""
    return mapped(path, name).to(dtype, copy=True)


@stored.register_fake
def _(path: str, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def mapped(path: str, name: str) -> Tensor:
    """Return the tensor `name` of a safetensors file in the file's dtype, mapped into memory.

    Parts that are not read take no memory.
    """
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _tensors_in(folder: Path) -> Iterator[tuple[str, tuple[str, str, list[int], torch.dtype]]]:
    """Yield (name, arguments of `stored`) of every tensor of a folder.

    Floating-point tensors are requested in fp32. Raises ConfigError for damaged files.
    """
    from safetensors import SafetensorError, safe_open

    for path in _files_of(folder):
        try:
            with _disable_current_modes(), safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, *_OF_DAMAGED) as error:
            raise _damaged(folder, f"{path} cannot be read as safetensors ({error})") from None
        for name, tensor in tensors.items():
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            yield name, (str(path), name, list(tensor.shape), dtype)


def _files_of(folder: Path) -> list[Path]:
    """Return the safetensors files in `folder` from which transformers reads weights.

    Raises ConfigError for a folder without any, and for a damaged index.
    """
    if (folder / _WEIGHTS).exists():
        return [folder / _WEIGHTS]
    if (folder / _INDEX).exists():
        try:
            where = read_json(folder / _INDEX)["weight_map"]
            return [folder / name for name in sorted(set(where.values()))]
        except BrokenCheckpoint as error:
            raise _damaged(folder, str(error)) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(folder, f"{folder / _INDEX} cannot be read ({error})") from None
    remedy = "write them so, with save_pretrained: files of pickles may run code"
    raise ConfigError([Fault(KEY, str(folder), "has no weights in safetensors", remedy)])


def _damaged(folder: Path, why: str) -> ConfigError:
    return ConfigError([Fault(KEY, str(folder), f"is damaged: {why}", "copy it again")])


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Disable transformers' reader threads, progress bars and report of names inside of the
    context.

    The plan has that report.
    """
    from transformers.utils import logging

    threads, bars = os.environ.get(_NO_THREADS), logging.is_progress_bar_enabled()
    verbosity = logging.get_verbosity()
    os.environ[_NO_THREADS] = "1"
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        if threads is None:
            del os.environ[_NO_THREADS]
        else:
            os.environ[_NO_THREADS] = threads
        if bars:
            logging.enable_progress_bar()
        logging.set_verbosity(verbosity)
