"""Separate the state of a calling program from the state in which we plan and start ranks.

A model is measured in the caller's process. Without this separation, the caller's default dtype,
device, modes and random generators would affect the plan, and ours would affect the caller.
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
    """Set torch's defaults within the context, and restore the caller's state after it.

    The state consists of warning filters, the level at which logging is disabled, torch's default
    dtype, device, modes and precision of fp32, and the random generators of Python, NumPy and
    torch.
    """
    disabled = logging.root.manager.disable
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.callback(logging.disable, disabled)
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            stack.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        else:  # CUDA's generators are seeded at their first use, by torch's latest seed
            stack.callback(lambda: torch.cuda.manual_seed_all(torch.initial_seed()))
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        for owner, name, value in _fp32_settings():  # restored in reverse order
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
    """Yield the owner, name and value of each setting that determines how torch computes fp32.

    Writing `allow_tf32` also writes the settings of single operations. Reading it fails where those
    settings differ, in which case it is not yielded.
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
    """Give processes that are started within the context the caller's path for modules, and the
    programs beside the caller's Python.

    A script's own folder is on the script's path for modules, but not on another program's. pip
    installs ninja beside Python.
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
    """Set environment variables; a value of None removes the variable."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
