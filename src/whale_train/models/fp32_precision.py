"""The precision in which torch computes fp32 in this process.

It is the same where a model is measured, exported and trained, for its forward may ask.
"""

import warnings

import torch


def compute_fp32(in_tf32: bool) -> None:
    """Have GPUs compute products, convolutions and recurrences of fp32 in TF32, or none of them.

    torch's default is TF32 for all but products. The setting is `allow_tf32`: torch refuses to read
    it, and to enter `cudnn.flags`, once the settings per operation (`fp32_precision`) say something
    else, while these follow `allow_tf32`. A model may use either.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings", UserWarning)
        torch.backends.cuda.matmul.allow_tf32 = in_tf32
        torch.backends.cudnn.allow_tf32 = in_tf32
