"""Import many modules at once, without what only takes time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import modules inside of the context without garbage collections.

    What an import makes stays as long as the process does, so that collections find nothing: they
    are a sixth of the time that torch, its compiler and DeepSpeed take. Later collections do not
    look through it either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
