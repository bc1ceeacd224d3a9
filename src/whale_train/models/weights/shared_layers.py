"""Sharing of one layer's weights in all places, before a model's layers part.

Pseudo-to-Real (M6-10T, Lin et al. 2021, arXiv 2110.03888) trains a deep model with the weights of
one layer first, as ALBERT does for good (Lan et al. 2020, arXiv 1909.11942).
"""

from collections.abc import Iterator

from torch import nn

from whale_train.errors import ConfigError, Fault

_Kind = tuple[tuple[str, type, tuple[tuple[str, tuple[int, ...], str, bool], ...]], ...]


def shared_places(model: nn.Module) -> dict[str, str]:
    """Return the paths of the parameters to share: of a later layer's, the path of the first's.

    A layer shares the parameters of the first layer of its list that is like it. Lists
    (`nn.ModuleList`, `nn.Sequential`) count that lie in no other whose layers are shared. Layers
    are alike that are built of the same classes, with parameters of the same shapes and dtypes,
    trained or frozen the same way.
    """
    first_paths: dict[str, str] = {}
    lists: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in lists)
        if inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        first: dict[_Kind, str] = {}
        before = len(first_paths)
        for name, layer in module.named_children():
            here = f"{path}.{name}" if path else name
            like = first.setdefault(_kind(layer), here)
            if like != here:
                for parameter, _ in layer.named_parameters(remove_duplicate=False):
                    first_paths[f"{here}.{parameter}"] = f"{like}.{parameter}"
        if len(first_paths) > before:
            lists.append(path)
    return first_paths


def share_layers(model: nn.Module) -> None:
    """Make layers of a list that are alike hold the parameters of the first of them.

    Raises ConfigError where no two layers of a list are alike.
    """
    places = shared_places(model)
    if not places:
        rule = f"finds no two layers that are alike in a list of {type(model).__name__}"
        raise ConfigError([Fault("model.share_layers", "true", rule, "leave it out")])
    for path, first in places.items():
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, model.get_parameter(first))


def _kind(layer: nn.Module) -> _Kind:
    return tuple(
        (path, type(module), tuple(_shapes(module))) for path, module in layer.named_modules()
    )


def _shapes(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...], str, bool]]:
    for name, parameter in module.named_parameters(recurse=False):
        yield name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad
