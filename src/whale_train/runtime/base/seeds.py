"""Seed the generators that models may draw from besides torch's."""

import random

import numpy as np


def seed_python(seed: int) -> None:
    """Seed the generators of Python and NumPy, equally on every host and rank.

    Constructors and forwards may draw from them besides torch's.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
