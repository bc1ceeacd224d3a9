"""The SHA-256 of a model's parameters, by which two runs compare their bits."""

from collections.abc import Sequence
from hashlib import sha256

import torch

from whale_train.runtime.engines.base import Engine
from whale_train.runtime.state.held import paths_of


def parameters_sha256(engines: Sequence[Engine]) -> str:
    """Return the SHA-256 of all trained parameters, as 64 hexadecimal digits.

    It is that of the bytes of every parameter, in the order of their paths in the model. The
    engines must hold whole parameters. A GPU is waited for.
    """
    values = {
        paths_of(engine)[id(parameter)]: value
        for engine in engines
        for parameter, value in engine.values()
        if value is not None
    }
    digest = sha256()
    for path in sorted(values):
        flat = values[path].detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
