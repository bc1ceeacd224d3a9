"""Write a trained model as a folder of weights that other programs can open.

The folder has whole tensors under the names of the user's model, in files of at most 5 GB. For a
transformers model `from_pretrained` opens the folder; for low-rank adapters of one, peft's does.
Tensors are written one by one: no process holds the whole model.
"""

import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from whale_train.checkpoints.checkpoint_files import MODEL, PARTS_OF_MODEL, UNFINISHED_MODEL
from whale_train.checkpoints.url_path import Place
from whale_train.data.tokens.tokenizer_files import copy_tokenizer
from whale_train.errors import LaunchError
from whale_train.models.adapters import WEIGHTS_FILE as ADAPTERS
from whale_train.models.adapters import adapter_names, describe_adapters, has_adapters
from whale_train.models.build import given_config
from whale_train.models.export.export import model_on_meta
from whale_train.models.options import ModelOptions
from whale_train.models.weights.kept_tensors import other_names
from whale_train.models.weights.saved_configs import folder_of
from whale_train.runtime.state.carrier import Carrier
from whale_train.runtime.state.held import RankState
from whale_train.runtime.state.parts import write_blocks, written
from whale_train.runtime.state.saver import owned
from whale_train.runtime.state.special_tokens import align_special_tokens
from whale_train.runtime.state.tensor_files import TensorReader, record_json, write_tensors

_FILE_BYTES = 5 * 10**9
_KEPT = ("generation_config.json", "*processor_config.json")  # copied beside weights and config


def write_final(
    run_dir: Path,
    state: RankState,
    model: nn.Module,
    options: ModelOptions,
    tokenizer: Path | None,
    checkpoint: Place | None,
    rank: int,
    carrier: Carrier,
) -> Path | None:
    """Write the trained weights, each rank its own part, and return their folder on rank 0.

    The result is None on other ranks. `tokenizer` is the folder of the data's tokenizer, which is
    saved with the weights; None saves the tokenizer of `model.pretrained`. Where a `checkpoint` was
    saved after the last step, its weights are read instead. Raises LaunchError where files cannot
    be written; no files are left then.
    """
    parts = run_dir / PARTS_OF_MODEL
    try:
        saved: Place
        if checkpoint is not None:
            saved = checkpoint / "model"
        else:
            saved = parts / "model"
            blocks = [x for x in owned(state.blocks()) if x.folder == "model"]
            own = written(parts, rank, lambda: write_blocks(parts, blocks, rank))
            carrier.gather(parts, own)
        if rank:
            return None
        if has_adapters(model):  # peft reads the tensors of its modules, which ranks took from them
            model = model_on_meta(options)
        return export_weights(saved, run_dir, model, options, tokenizer)
    except OSError as error:
        why = error.strerror or error
        raise LaunchError(f"the trained model could not be written: {why}") from error
    finally:
        if not rank:
            shutil.rmtree(parts, ignore_errors=True)


def export_weights(
    saved: Place,
    run_dir: Path,
    model: nn.Module,
    options: ModelOptions,
    tokenizer: Path | None = None,
) -> Path:
    """Write the folder of weights in `run_dir` from the blocks in the folder `saved`, and return
    it.

    `model`, built by `options`, is read for its names and its config only. The files of the
    `tokenizer`, or of `model.pretrained`'s tokenizer, are copied beside the weights. An existing
    folder is replaced. Raises OSError where files cannot be written.
    """
    unfinished = run_dir / UNFINISHED_MODEL
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        if has_adapters(model):
            describe_adapters(model, options.pretrained, unfinished)
            _write_adapters(saved, unfinished, model)
        else:
            describe(model, options, unfinished)
            join(saved, unfinished, other_names(model))
        if tokenizer is None and options.pretrained is not None:
            tokenizer = folder_of(options.pretrained)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, unfinished)
            if options.pretrained is None:
                align_special_tokens(unfinished, options.config)
    except OSError:  # on a full disk this makes room to report the failure
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    target = run_dir / MODEL
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)
    return target


def join(parts: Place, folder: Path, renamed: Mapping[str, str]) -> None:
    """Write the tensors whose blocks are in `parts` as whole tensors into `folder`.

    `renamed` maps names to new names, for the tensors whose names change. If there are several
    files, an index is written, as in transformers.
    """
    reader = TensorReader(parts)
    shapes = reader.shapes()
    files: list[list[str]] = [[]]
    filled = 0
    for name, (dtype, shape) in shapes.items():
        size = prod(shape) * dtype.itemsize
        if files[-1] and filled + size > _FILE_BYTES:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    where: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        one = len(files) == 1
        path = "model" if one else f"model-{number:05}-of-{len(files):05}"
        path += ".safetensors"
        new = {name: renamed.get(name, name) for name in names}
        described = {new[name]: shapes[name] for name in names}
        write_tensors(folder, path, described, (tensor for _, tensor in reader.whole(names)))
        where |= dict.fromkeys(new.values(), path)
    if len(files) > 1:
        total = sum(prod(shape) * dtype.itemsize for dtype, shape in shapes.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        record_json(folder, "model.safetensors.index.json", index)


def _write_adapters(parts: Place, folder: Path, model: nn.Module) -> None:
    """Write the low-rank adapters of `model`, whose blocks are in `parts`, into `folder`."""
    reader = TensorReader(parts)
    shapes = reader.shapes()
    names = adapter_names(model, shapes)
    described = {name: shapes[path] for path, name in names.items()}
    write_tensors(folder, ADAPTERS, described, (tensor for _, tensor in reader.whole(names)))


def describe(model: Any, options: ModelOptions, folder: Path) -> None:
    """Write the files that `from_pretrained` needs besides the weights of a transformers model.

    Such files of the pretrained folder are copied. For other models nothing is written.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    if options.is_hugging_face:  # training turned the model's cache off, so read the config again
        config = given_config(type(model).config_class, options.config, options.pretrained)
    # save_pretrained also records the class that reads the weights.
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():
        generation.save_pretrained(folder)
    if options.pretrained is None:
        return
    came_from = folder_of(options.pretrained)
    for path in (path for pattern in _KEPT for path in came_from.glob(pattern)):
        if path.is_file():
            shutil.copy(path, folder / path.name)
