"""Share one layer's weights among all equal layers, until the layers are delinked.

Pseudo-to-Real (M6-10T, Lin et al. 2021, arXiv 2110.03888) first trains a deep model with the
weights of one layer, which ALBERT does throughout (Lan et al. 2020, arXiv 1909.11942).
"""

from collections.abc import Iterator

from torch import nn

from whale_train.errors import ConfigError, Fault

_Kind = tuple[tuple[str, type, tuple[tuple[str, tuple[int, ...], str, bool], ...]], ...]


def shared_places(model: nn.Module) -> dict[str, str]:
    """Return the parameters to share: the path in a later layer, and the path in the first layer
    like it.

    Layers of a list (`nn.ModuleList`, `nn.Sequential`) are compared. They are alike if they consist
    of the same classes, with parameters of the same names, shapes and dtypes, trained or frozen in
    the same way. A list inside a list whose layers are shared is left out.
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
    """Give equal layers of a list the parameters of the first of them.

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
    """Return the classes and parameter shapes of a layer, which are equal for layers that are
    alike."""
    return tuple(
        (path, type(module), tuple(_shapes(module))) for path, module in layer.named_modules()
    )


def _shapes(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...], str, bool]]:
    """Yield name, shape, dtype and requires_grad of a module's own parameters."""
    for name, parameter in module.named_parameters(recurse=False):
        yield name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad
