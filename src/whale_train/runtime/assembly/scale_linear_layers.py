"""Make linear layers of an unchanged model round the factors of their products to 8 bits."""

from collections.abc import Container
from types import MethodType
from typing import Any

from torch import Tensor, nn

from whale_train.models.linear_layers import is_transposed, linear_layers
from whale_train.runtime.kernels.scaled_products import scaled_linear


def scale_linear_layers(model: nn.Module, weights: Container[str]) -> None:
    """Make the linear layers of `model` that hold `weights`, by path, round the factors of their
    products to 8 bits under autocast. Where the model's own code disables autocast, they compute
    what they did."""
    for path, layers in linear_layers(model).items():
        if path in weights:
            for layer in layers:
                # A method of the layer: a deep copy of the model has methods of its own layers.
                scaled = _scaled_conv1d if is_transposed(layer) else _scaled
                layer.forward = MethodType(scaled, layer)


def _scaled(layer: Any, input: Tensor) -> Tensor:
    """Stand in for the forward of `nn.Linear`, with its argument's name."""
    return scaled_linear(input, layer.weight, layer.bias, transposed=False)


def _scaled_conv1d(layer: Any, x: Tensor) -> Tensor:
    """Stand in for the forward of the `Conv1D` of transformers, with its argument's name."""
    return scaled_linear(x, layer.weight, layer.bias, transposed=True)


# A method is pickled by its name: a layer that is loaded elsewhere has the forward of its class.
_scaled.__name__ = _scaled_conv1d.__name__ = "forward"
