"""Make linear layers of an unchanged model round the factors of their products to 8 bits."""

from collections.abc import Callable, Container
from functools import wraps
from typing import Any

from torch import Tensor, nn

from whale_train.models.linear_layers import is_transposed, linear_layers
from whale_train.runtime.kernels.scaled_products import scaled_linear


def scale_linear_layers(model: nn.Module, weights: Container[str]) -> None:
    """Make the linear layers of `model` that hold `weights`, by path, round the factors of their
    products to 8 bits under autocast. Where the model's own code disables autocast, they compute
    what they did."""
    for path, layer in linear_layers(model).items():
        if path in weights:
            layer.forward = _scaled(layer)


def _scaled(layer: Any) -> Callable[..., Tensor]:
    """Return the function that replaces the forward of a linear layer."""
    transposed = is_transposed(layer)

    @wraps(layer.forward)
    def forward(x: Tensor) -> Tensor:
        return scaled_linear(x, layer.weight, layer.bias, transposed)

    return forward
