"""Import modules once, in the process that forks the ranks, instead of in every rank.

This file owns the list of modules that libraries import lazily. Nothing here starts a thread or
another process.
"""

import importlib
import os
from contextlib import suppress

from whale_train.imports import importing
from whale_train.runtime.cpu.threads import set_num_threads
from whale_train.runtime.process.uncompiled import uncompiled

# The modules that `torch.optim`, `deepspeed.initialize`, `backward` and `step` import lazily. They
# were found by comparing sys.modules before and after each call, under ZeRO 0 to 3. A version that
# lacks a module does not need it.
OF_TORCH = ("torch", "torch._dynamo", "torch._subclasses.schema_check_mode")
OF_DEEPSPEED = (
    "deepspeed",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.utils.pin_memory",
)


def preload() -> None:
    """Import torch and DeepSpeed."""
    preload_torch()
    preload_deepspeed()


def preload_torch() -> None:
    """Import torch, leaving the process free to fork."""
    # No process that forks may initialise CUDA. With this variable, a test for a GPU, which
    # DeepSpeed makes when imported, does not initialise it. See torch.cuda.is_available.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Large CPU tensors use huge pages, where the kernel leaves that to programs. A gradient of 100
    # MB, new every step, would otherwise take longer to map than to compute.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # An OpenMP pool made before the fork would be broken after it; with one thread there is no
    # pool.
    set_num_threads(1)
    _import(OF_TORCH)


def preload_deepspeed() -> None:
    """Import DeepSpeed, for ranks with ZeRO. Call `preload_torch` first."""
    _import(OF_DEEPSPEED)


def _import(names: tuple[str, ...]) -> None:
    """Import modules, ignoring those that do not exist."""
    with importing(), uncompiled():
        for name in names:
            with suppress(ModuleNotFoundError):
                importlib.import_module(name)
