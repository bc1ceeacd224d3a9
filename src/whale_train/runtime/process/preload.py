"""Import once, in the process that forks ranks, what every rank would import for itself.

This file owns what libraries import lazily. Nothing here starts a thread or another process.
"""

import importlib
import os
from contextlib import suppress

from whale_train.imports import importing
from whale_train.runtime.cpu.threads import set_num_threads
from whale_train.runtime.process.uncompiled import uncompiled

# What `torch.optim`, `deepspeed.initialize`, `backward` and `step` import lazily. Found by
# comparing sys.modules before and after them under ZeRO 0 to 3. A version that lacks one needs it
# not.
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
    # CUDA must be initialised in no process that forks: with this, asking whether there is a
    # GPU (DeepSpeed does when imported) does not. See torch.cuda.is_available.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Large CPU tensors in huge pages, where the kernel leaves that to programs: a gradient of
    # 100 MB, new every step, otherwise takes longer to be mapped than to be computed.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # An OpenMP pool made before the fork would be broken after it; one thread has none.
    set_num_threads(1)
    _import(OF_TORCH)


def preload_deepspeed() -> None:
    """Import DeepSpeed, for ranks with ZeRO. `preload_torch` comes first."""
    _import(OF_DEEPSPEED)


def _import(names: tuple[str, ...]) -> None:
    """Import modules, without those that do not exist."""
    with importing(), uncompiled():
        for name in names:
            with suppress(ModuleNotFoundError):
                importlib.import_module(name)
