"""Select the accelerator, the type of device on which DeepSpeed expects all tensors."""

import torch


def use_accelerator(device: torch.device) -> None:
    """Make DeepSpeed work on devices of the type of `device`.

    DeepSpeed 0.19.8 would otherwise select the type that it detects on the host: GPUs, even in a
    CPU process that stands for another GPU.
    """
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if get_accelerator().device_name() != device.type:
        if device.type == "cpu":
            from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator as Accelerator
        else:
            from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator as Accelerator
        set_accelerator(Accelerator())
    if device.type == "cuda":
        # DeepSpeed would look for an index in `CUDA_VISIBLE_DEVICES`, which has the GPU's UUID.
        get_accelerator().available_memory = _free_bytes


def _free_bytes(device_index: int | None = None) -> int:
    """Return the free memory of a GPU in bytes; None is the current GPU."""
    free, _ = torch.cuda.mem_get_info(device_index)
    return free
