"""What a folder of weights has of a model of transformers, by name and shape; no weight is read.

Names are compared by transformers itself, which knows what it renamed and joined since a folder was
written: it is given tensors of the shapes that the files say, which take no memory.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whale_train.checkpoint_files import BrokenCheckpoint, stored_blocks
from whale_train.errors import ConfigError, Fault, listed
from whale_train.models.build import load_class, training_config
from whale_train.models.hub import KEY, folder_of
from whale_train.models.options import ModelOptions
from whale_train.strategies.plan.plan import Decision

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class LoadedNames:
    """Names that the model has and the folder lacks (`missing`), names of the folder that the model
    has no use for (`unused`), and those of `other_shapes` in the two. `of_base` are the missing
    ones that are not of a head."""

    missing: tuple[str, ...]
    unused: tuple[str, ...]
    other_shapes: tuple[str, ...]
    of_base: tuple[str, ...]

    def faults(self, folder: str, class_name: str) -> list[Fault]:
        """Return what makes the folder another model's: trained from it would be random weights."""
        remedy = f"use the weights of a {class_name}, or the model that these are of"
        rules = (("has no", self.of_base), ("has another shape of", self.other_shapes))
        return [Fault(KEY, folder, f"{rule} {listed(x)}", remedy) for rule, x in rules if x]

    def decisions(self) -> list[Decision]:
        """Return what the user is to know of weights that are loaded."""
        found = []
        if self.missing:
            reason = f"the folder has no {listed(self.missing)}"
            found.append(Decision(KEY, "some weights begin at random", "", reason))
        if self.unused:
            reason = f"the model has no {listed(self.unused)}"
            found.append(Decision(KEY, "some weights are not used", "", reason))
        return found


def compare_names(options: ModelOptions) -> LoadedNames:
    """Return how the names in the folder `options.pretrained` and the model's agree. Raises
    ConfigError for a folder without weights in safetensors, and for what `load_class` refuses."""
    assert options.pretrained is not None
    made: Any = load_class(options)
    config = training_config(made.config_class, options.config, options.pretrained)
    shapes = dict(_shapes_in(folder_of(options.pretrained)))
    try:
        model, said = made.from_pretrained(
            None,
            config=config,
            state_dict=shapes,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # of names and shapes that it cannot join
        why = " ".join(f"{type(error).__name__}: {error}".split())
        rule, remedy = f"cannot be loaded ({why})", "use weights that from_pretrained opens"
        raise ConfigError([Fault(KEY, options.pretrained, rule, remedy)]) from error
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    missing = tuple(sorted(said["missing_keys"]))
    return LoadedNames(
        missing,
        tuple(sorted(said["unexpected_keys"])),
        tuple(sorted(name for name, *_ in said["mismatched_keys"])),
        tuple(name for name in missing if name.startswith(prefix)),
    )


def _shapes_in(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a folder of weights by name, all of one zero."""
    zero = torch.zeros(())
    try:
        for path in _files_of(folder):
            for name, stored in stored_blocks(path):
                yield name, zero.expand(stored.block.shape)
    except BrokenCheckpoint as error:
        fault = Fault(KEY, str(folder), f"is damaged: {error}", "copy it again")
        raise ConfigError([fault]) from None


def _files_of(folder: Path) -> list[Path]:
    """Return the files that transformers reads weights from. Raises ConfigError for none, and
    BrokenCheckpoint where the list of them is damaged."""
    if (folder / _WEIGHTS).exists():
        return [folder / _WEIGHTS]
    if (folder / _INDEX).exists():
        try:
            where = json.loads((folder / _INDEX).read_text())["weight_map"]
            return [folder / name for name in sorted(set(where.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BrokenCheckpoint(f"{folder / _INDEX} cannot be read ({error})") from None
    remedy = "write them so, with save_pretrained: files of pickles may run code"
    raise ConfigError([Fault(KEY, str(folder), "has no weights in safetensors", remedy)])
