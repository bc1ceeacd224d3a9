"""Compare a folder of weights with a model of transformers, by name and shape, without reading a
weight.

transformers compares the names, since it knows the names that were changed or joined after a folder
was written. It compares fake tensors with the shapes in the files, which take no memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from whale_train.errors import ConfigError, Fault, listed
from whale_train.models.build import load_class, training_config
from whale_train.models.options import ModelOptions
from whale_train.models.weights.deferred import deferred
from whale_train.models.weights.saved_configs import KEY, folder_of
from whale_train.models.weights.stored import open_folder
from whale_train.strategies.plan.plan import Decision


@dataclass(frozen=True)
class LoadedNames:
    """The differences between the names of weights in a folder and in a model.

    missing: names in the model alone.
    unused: names in the folder alone.
    other_shapes: names with another shape in the folder than in the model.
    of_base: the missing names that belong to the base model, not to a head.
    """

    missing: tuple[str, ...]
    unused: tuple[str, ...]
    other_shapes: tuple[str, ...]
    of_base: tuple[str, ...]

    def faults(self, folder: str, class_name: str) -> list[Fault]:
        """Return the faults of a folder with the weights of another model, under which parameters
        of the base model would start at random."""
        remedy = f"use the weights of a {class_name}, or the model that these are of"
        rules = (("has no", self.of_base), ("has another shape of", self.other_shapes))
        return [Fault(KEY, folder, f"{rule} {listed(x)}", remedy) for rule, x in rules if x]

    def decisions(self) -> list[Decision]:
        """Return notes for the plan on weights that start at random or are not used."""
        decisions = []
        if self.missing:
            reason = f"the folder has no {listed(self.missing)}"
            decisions.append(Decision(KEY, "some weights begin at random", "", reason))
        if self.unused:
            reason = f"the model has no {listed(self.unused)}"
            decisions.append(Decision(KEY, "some weights are not used", "", reason))
        return decisions


def compare_names(options: ModelOptions) -> LoadedNames:
    """Compare the names of weights in the folder `options.pretrained` with the model's names.

    Raises ConfigError for a folder without safetensors files, for weights that transformers cannot
    load, and for a model class that cannot be imported.
    """
    assert options.pretrained is not None
    model_class: Any = load_class(options)
    config = training_config(model_class.config_class, options.config, options.pretrained)
    folder = folder_of(options.pretrained)
    loading: Mapping[str, Any] = {}

    def build() -> nn.Module:
        nonlocal loading
        model, loading = open_folder(model_class, config, folder, any_shape=True)
        return model

    try:
        model: Any = deferred(build, seed=0)
    except ConfigError:
        raise
    except Exception as error:  # for names and shapes that transformers cannot join
        why = " ".join(f"{type(error).__name__}: {error}".split())
        rule, remedy = f"cannot be loaded ({why})", "use weights that from_pretrained opens"
        raise ConfigError([Fault(KEY, options.pretrained, rule, remedy)]) from error
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    missing = tuple(sorted(loading["missing_keys"]))
    return LoadedNames(
        missing,
        tuple(sorted(loading["unexpected_keys"])),
        tuple(sorted(name for name, *_ in loading["mismatched_keys"])),
        tuple(name for name in missing if name.startswith(prefix)),
    )
