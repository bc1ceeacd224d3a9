"""Import many modules at once without garbage collection, which only costs time there."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Suspend garbage collection while modules are imported inside of the context.

    Imported objects live as long as the process, so that collections free nothing. They are a sixth
    of the import time of torch, its compiler and DeepSpeed. On exit all objects are frozen, so that
    later collections skip them too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
