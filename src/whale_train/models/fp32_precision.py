"""Set the precision in which torch computes fp32 in this process.

It is the same where a model is measured, exported and trained, because a forward may ask for it.
"""

import warnings

import torch


def compute_fp32(in_tf32: bool) -> None:
    """Have GPUs compute fp32 products, convolutions and recurrences in TF32, or none of them.

    torch's default is TF32 for all but products. `allow_tf32` is set, and not the newer settings
    per operation (`fp32_precision`): once these differ, torch refuses to read `allow_tf32` and to
    enter `cudnn.flags`, while they follow `allow_tf32`. A model may use either.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings", UserWarning)
        torch.backends.cuda.matmul.allow_tf32 = in_tf32
        torch.backends.cudnn.allow_tf32 = in_tf32
