"""The linear layers of a model, whose forward is a product with a weight, plus a bias."""

from torch import nn


def linear_layers(model: nn.Module) -> dict[str, tuple[nn.Module, ...]]:
    """Return the linear layers of `model` that hold a weight, by the first path of the weight. A
    weight that another module holds as well is left out.

    These are torch's `nn.Linear` and the `Conv1D` of transformers, whose weight is [in, out].
    Subclasses, and layers with a forward of their own, may compute anything.
    """
    first: dict[int, str] = {}
    holders: dict[int, dict[int, nn.Module]] = {}
    for path, tensor in model.named_parameters(remove_duplicate=False):
        holder = model.get_submodule(path.rpartition(".")[0])
        first.setdefault(id(tensor), path)
        holders.setdefault(id(tensor), {})[id(holder)] = holder
    return {
        first[key]: tuple(modules.values())
        for key, modules in holders.items()
        if first[key].endswith("weight") and all(map(_is_linear, modules.values()))
    }


def is_transposed(layer: nn.Module) -> bool:
    """Return True if the weight of a linear layer is [in, out], False if it is [out, in]."""
    return type(layer) is not nn.Linear


def _is_linear(module: nn.Module) -> bool:
    kind = type(module)
    is_conv1d = (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
    return (kind is nn.Linear or is_conv1d) and "forward" not in vars(module)
