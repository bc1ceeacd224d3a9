"""DeepSpeed's accelerator: what it takes all tensors to be on."""

import torch


def use_accelerator(device: torch.device) -> None:
    """Have DeepSpeed work on a device of this kind. It takes what it finds on the host (0.19.8):
    GPUs, also where CPU processes stand for other ones beside them."""
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if get_accelerator().device_name() == device.type:
        return
    if device.type == "cpu":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator as Accelerator
    else:
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator as Accelerator
    set_accelerator(Accelerator())
