"""Keep the state of a program that calls us, and keep its state from what we compute.

A model is measured in the caller's process. Its default dtype or device, a mode it is in, or its
generators would else be in the plan, and ours in its results.
"""

import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch


@contextmanager
def caller_kept() -> Iterator[None]:
    """Give what runs in the context torch's defaults, and put back the caller's state after it.

    Kept are warnings filters, the level below which logging is off, torch's default dtype, device,
    modes and precision of fp32, and the generators of Python, NumPy and torch.
    """
    disabled = logging.root.manager.disable
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.callback(logging.disable, disabled)
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            stack.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        else:  # they are seeded when first used, by the seed that torch was given last
            stack.callback(lambda: torch.cuda.manual_seed_all(torch.initial_seed()))
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        for owner, name, value in _fp32_settings():  # put back in the other order
            stack.callback(setattr, owner, name, value)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _fp32_settings() -> Iterator[tuple[Any, str, Any]]:
    """Yield the settings of torch that say how fp32 is computed: owner, name and value.

    `allow_tf32` cannot be read once the settings of single operations say something else, and
    writes those where it is written.
    """
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    for owner in (matmul, cudnn.conv, cudnn.rnn):
        yield owner, "fp32_precision", owner.fp32_precision
    for owner in (matmul, cudnn):
        with suppress(RuntimeError):
            yield owner, "allow_tf32", owner.allow_tf32


@contextmanager
def ranks_environment() -> Iterator[None]:
    """Have processes started in the context import what the caller can, and find its programs.

    A script's own folder is on its path for modules, and not on that of another program. ninja is
    beside the caller's Python, where pip put it.
    """
    modules = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    programs = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "PATH")}
    _set({"PYTHONPATH": modules, "PATH": os.pathsep.join(programs)})
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    """Set variables of the environment, and remove those that are None."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
