"""DeepSpeed's accelerator: the type of device on which it expects all tensors."""

import torch


def use_accelerator(device: torch.device) -> None:
    """Make DeepSpeed work on devices of the type of `device`.

    By itself it takes the type that it finds on the host (0.19.8): GPUs, even where CPU processes
    stand for other GPUs beside them.
    """
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if get_accelerator().device_name() != device.type:
        if device.type == "cpu":
            from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator as Accelerator
        else:
            from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator as Accelerator
        set_accelerator(Accelerator())
    if device.type == "cuda":
        # It would look for an index in `CUDA_VISIBLE_DEVICES`, which has the UUID of a rank's GPU.
        get_accelerator().available_memory = _free_bytes


def _free_bytes(device_index: int | None = None) -> int:
    """Return the free bytes of a GPU (None: of the current one)."""
    free, _ = torch.cuda.mem_get_info(device_index)
    return free
