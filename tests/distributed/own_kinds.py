"""A model and an image step as users write them, and the samples that files are made of."""

import random

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

SAMPLES, CLASSES, SIZE = 14, 3, 4


class Pixels(nn.Module):
    """Logits of small images."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * SIZE * SIZE, 12)
        self.second = nn.Linear(12, CLASSES)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.second(torch.tanh(self.first(pixel_values.flatten(1))))
        return logits


class Rolled:
    """Rolls an image to the side, by chance."""

    def __call__(self, image: Image.Image) -> NDArray[np.uint8]:
        return np.roll(np.asarray(image), random.randrange(SIZE), 1).transpose(2, 0, 1)


def pixels(number: int) -> NDArray[np.uint8]:
    """Return the image of a sample, `[SIZE, SIZE, 3]`."""
    return np.random.default_rng(number).integers(0, 256, (SIZE, SIZE, 3), np.uint8)


def label(number: int) -> int:
    """Return the class of a sample; classes follow each other."""
    return number * CLASSES // SAMPLES
