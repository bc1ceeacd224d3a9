"""The linear layers of a model, whose forward is a product with a weight, plus a bias."""

from torch import nn


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of `model` by the path of their weight. A weight that several layers
    share has the path of the first, and stands for none if another module reads it as well.

    These are torch's `nn.Linear` and the `Conv1D` of transformers, whose weight is [in, out]; a
    subclass may compute anything.
    """
    first: dict[int, str] = {}
    readers: dict[int, list[nn.Module]] = {}
    for path, tensor in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(tensor), path)
        readers.setdefault(id(tensor), []).append(model.get_submodule(path.rpartition(".")[0]))
    layers = {}
    for key, modules in readers.items():
        (layer, *others), path = modules, first[key]
        if path.endswith("weight") and _is_linear(layer) and not others:
            layers[path] = layer
    return layers


def is_transposed(layer: nn.Module) -> bool:
    """Return True if the weight of a linear layer is [in, out], False if it is [out, in]."""
    return type(layer) is not nn.Linear


def _is_linear(module: nn.Module) -> bool:
    kind = type(module)
    is_conv1d = (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
    return kind is nn.Linear or is_conv1d
