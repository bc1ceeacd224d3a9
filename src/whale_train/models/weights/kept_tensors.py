"""Select the tensors of the user's model that a checkpoint stores, and name them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from whale_train.models.export.export import model_path
from whale_train.models.loss_module import LossModule
from whale_train.models.nf4 import quantised_layers
from whale_train.models.options import ModelOptions


def kept_tensors(module: LossModule) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of the user's model by path, without
    repetitions.

    A checkpoint stores them under `model/`.
    """
    passing = {
        id(buffer)
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name in part._non_persistent_buffers_set
    }
    named = (*module.named_parameters(), *module.named_buffers())
    return {model_path(name): tensor for name, tensor in named if id(tensor) not in passing}


def other_names(model: Any) -> dict[str, str]:
    """Return the names under which transformers saves tied tensors, by the first path of each
    tensor in the model."""
    tied = getattr(model, "all_tied_weights_keys", None)
    return dict(tied) if isinstance(tied, Mapping) else {}


def saved_names(module: LossModule, options: ModelOptions) -> frozenset[str]:
    """Return the paths of the tensors of the user's model that a checkpoint stores.

    These are all parameters and persistent buffers, except for the frozen weights of a folder to
    which adapters are added, and for those that are kept in 4 bits, which are drawn again where no
    folder has them. `module` has no weights in 4 bits yet.
    """
    tensors = kept_tensors(module)
    if options.quantize is not None:
        layers = quantised_layers(module.model)
        tensors = {
            path: x for path, x in tensors.items() if path.removesuffix(".weight") not in layers
        }
    if not options.adds_to_a_folder:
        return frozenset(tensors)
    return frozenset(
        path for path, x in tensors.items() if x.requires_grad or not isinstance(x, nn.Parameter)
    )
