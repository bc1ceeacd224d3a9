"""Import libraries without torch's compiler, which a decorator in one of them would import."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_DISABLED = "TORCHDYNAMO_DISABLE"  # torch.compile reads it when a function is decorated


@contextmanager
def uncompiled() -> Iterator[None]:
    """Disable torch.compile for functions that are decorated inside the context.

    DeepSpeed decorates a step of Muon, which nothing here runs, when it is imported. torch then
    imports its compiler, which takes a second and reads its templates in the locale's encoding.
    """
    before = os.environ.get(_DISABLED)
    os.environ[_DISABLED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_DISABLED]
        else:
            os.environ[_DISABLED] = before
