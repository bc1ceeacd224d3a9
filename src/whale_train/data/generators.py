"""Seed the global random number generators, and restore their states."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


def seed_generators(draw: int) -> None:
    """Seed Python's, NumPy's and torch's global generators with the draw of a sample."""
    random.seed(draw)
    np.random.seed(draw % 2**32)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(draw % 2**63)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the states of the global generators at the end of the context."""
    states = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")
    torch_state = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch is not None and torch_state is not None:
            torch.set_rng_state(torch_state)
