"""Store the frozen weights of a rank's linear layers in 4 bits, one layer after another."""

import logging

import torch
from torch import nn

from whale_train.models.nf4 import Nf4Linear, quantised_layers
from whale_train.models.weights.deferred import fill


def quantise_weights(model: nn.Module, device: torch.device) -> None:
    """Replace the layers of `quantised_layers` by layers with the same weights in 4 bits on
    `device`.

    A weight is on the device in fp32 while its codes are made, and no longer.
    """
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of kernels for inference alone
    try:
        import bitsandbytes  # noqa: F401 - which registers the operations
    finally:
        logger.setLevel(level)
    for path, linear in quantised_layers(model).items():
        fill(linear.weight)
        layer = Nf4Linear(linear, linear.weight.data.to(device))
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer)
