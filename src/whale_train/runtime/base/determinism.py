"""Make a process compute the same bits for the same inputs, whatever else runs beside it."""

import os
from typing import Any

import torch


def compute_alike(threads: int | None) -> None:
    """Fix all that would let two ranks, or two runs, compute other bits from equal inputs.

    threads: number of threads of operations on the CPU, by which sums are divided; None: 1. The
        share of a host's cores, the default of other runs, changes with the number of ranks.

    Operations on GPUs get their deterministic kernels where there are some. Where there are none,
    torch warns (the plan says which operations these are).
    """
    torch.set_num_threads(threads or 1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when a GPU is first used
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False  # nothing reads such memory
