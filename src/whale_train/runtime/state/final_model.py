"""Write a trained model as a folder of weights that other programs can open.

It has whole tensors under the names of the user's model, in files of at most 5 GB. For a model of
transformers `from_pretrained` opens the folder; for low-rank additions to one, peft's does. Tensors
are written one by one: no process has the whole model.
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
_KEPT = ("generation_config.json", "*processor_config.json")  # beside weights and config


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
    """Write the trained weights, each rank its own part, and return rank 0's folder of them.

    Other ranks get None. `tokenizer` is the folder of the data's tokenizer, which goes with the
    weights; None: that of `model.pretrained` does. Where a `checkpoint` was saved after the last
    step, its weights are read instead. Raises LaunchError where files cannot be written; no files
    are left then.
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
        if has_adapters(model):  # peft asks its modules what they hold, which ranks took from them
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
    """Return the folder of weights in `run_dir`, made from the blocks in the folder `saved`.

    `model`, built by `options`, is read for its names and its config alone. The files of the
    `tokenizer` are copied beside the weights, or those of `model.pretrained`. An existing folder is
    replaced. Raises OSError where files cannot be written.
    """
    made = run_dir / UNFINISHED_MODEL
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    try:
        if has_adapters(model):
            describe_adapters(model, options.pretrained, made)
            _write_adapters(saved, made, model)
        else:
            describe(model, options, made)
            join(saved, made, other_names(model))
        if tokenizer is None and options.pretrained is not None:
            tokenizer = folder_of(options.pretrained)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, made)
            if options.pretrained is None:
                align_special_tokens(made, options.config)
    except OSError:  # on a full disk there is no room to say so beside it
        shutil.rmtree(made, ignore_errors=True)
        raise
    target = run_dir / MODEL
    shutil.rmtree(target, ignore_errors=True)
    made.rename(target)
    return target


def join(parts: Place, folder: Path, renamed: Mapping[str, str]) -> None:
    """Write the tensors whose blocks are in `parts` as whole tensors into `folder`.

    `renamed` gives the new names of tensors that change theirs. Several files get an index, as in
    transformers.
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
    """Write the low-rank additions of `model`, whose blocks are in `parts`, into `folder`."""
    reader = TensorReader(parts)
    shapes = reader.shapes()
    names = adapter_names(model, shapes)
    described = {name: shapes[path] for path, name in names.items()}
    write_tensors(folder, ADAPTERS, described, (tensor for _, tensor in reader.whole(names)))


def describe(model: Any, options: ModelOptions, folder: Path) -> None:
    """Write the files that `from_pretrained` needs beside the weights of a transformers model.

    Such files of the pretrained folder are copied. Other models get none.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    if options.is_hugging_face:  # as it was before training turned the cache off
        config = given_config(type(model).config_class, options.config, options.pretrained)
    # As save_pretrained does: which class reads it.
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
