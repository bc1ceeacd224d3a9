"""Normalise over the batch of a whole process group, however unevenly the group shares the batch.

In the forward, each rank's count, mean and variance are gathered once and combined by Chan, Golub
and LeVeque's formula ("Updating formulae and a pairwise algorithm for computing sample variances",
1979), which needs no sum of raw squares. In the backward, two sums per channel are all-reduced
once. Statistics and gradients are those that one process would compute on the whole batch.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from whale_train.errors import ConfigError, Fault
from whale_train.models.export.export import model_path
from whale_train.runtime.comms.forward_agreement import ForwardAgreement
from whale_train.runtime.comms.layout_collectives import all_gather_stack


def global_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    group: dist.ProcessGroup,
) -> Tensor:
    """Return `functional.batch_norm` of this rank's part `x` [N, C, ...] of the batch; N may be 0.

    With `training` the statistics are taken over the group's whole batch, and the running
    statistics are updated in place (the variance unbiased, by the whole count). Every member must
    call it, and run its backward. Raises RuntimeError when a batch of several members has one value
    per channel (a device-side assertion on CUDA); one member alone raises torch's ValueError.
    """
    if not training or group.size() == 1:
        return functional.batch_norm(
            x, running_mean, running_var, weight, bias, training, momentum, eps
        )
    mean, var, count = _whole_statistics(x.detach(), group)
    torch._assert_async(count > 1, "batch norm needs more than one value per channel to train")
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = var * (count / (count - 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    dtype = _statistics_dtype(x)
    mean, var = mean.to(dtype), var.to(dtype)
    weight = None if weight is None else weight.to(dtype)  # the fused kernels need one dtype
    bias = None if bias is None else bias.to(dtype)
    arguments = (x, weight, bias, mean, var, count, eps, group)
    result: Tensor = _Normalise.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _whole_statistics(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean [C], biased variance [C] and count (a scalar) of the whole batch, in fp64."""
    channels = x.shape[1]
    moments = x.new_zeros(2 * channels + 1, dtype=torch.float64)
    if x.numel():
        # With fp32 running statistics, the kernel computes the statistics of 16-bit values in fp32.
        # Momentum 0 discards the running statistics.
        scratch = x.new_zeros(2, channels, dtype=_statistics_dtype(x))
        mean, var = torch.batch_norm_update_stats(x, scratch[0], scratch[1], 0.0)
        moments[:channels], moments[channels:-1] = mean, var
        moments[-1] = x.numel() // channels
    gathered = all_gather_stack(moments, group)
    means, variances = gathered[:, :channels], gathered[:, channels:-1]
    counts = gathered[:, -1:]
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    var = (counts * (variances + (means - mean).square())).sum(0) / count
    return mean, var, count


class _Normalise(torch.autograd.Function):
    """The function (x - mean) / sqrt(var + eps) * weight + bias.

    The backward takes into account that mean and var depend on every x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        eps: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var, count)
        ctx.eps, ctx.group = eps, group
        return functional.batch_norm(x, mean, var, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var, count = ctx.saved_tensors
        grad = grads[0]
        sums = mean.new_zeros(2, len(mean))  # of grad * normalised x, and of grad, per channel
        if x.numel():
            # The backward of evaluation is a fused kernel that computes exactly these two sums.
            _, sums[0], sums[1] = torch.ops.aten.native_batch_norm_backward(
                grad, x, weight, mean, var, None, None, False, ctx.eps, [False, True, True]
            )
        x_grad = None
        if ctx.needs_input_grad[0]:
            total = sums.clone()
            dist.all_reduce(total, group=ctx.group)
            average, inverse = total / count.to(total.dtype), (var + ctx.eps).rsqrt()
            scale = inverse if weight is None else inverse * weight
            slope = -scale * inverse * average[0]
            shift = -scale * average[1] - slope * mean
            shape = (1, -1, *[1] * (x.dim() - 2))
            by_x = torch.addcmul(shift.view(shape), x, slope.view(shape))
            x_grad = by_x.addcmul_(grad, scale.view(shape)).to(x.dtype)
        weight_grad = sums[0] if ctx.needs_input_grad[1] else None
        bias_grad = sums[1] if ctx.needs_input_grad[2] else None
        return x_grad, weight_grad, bias_grad, None, None, None, None, None


class GlobalBatchNorm(nn.Module):
    """A batch norm of torch that normalises over the group's whole batch in training.

    It takes over everything of the original: the same parameters and buffers under the same names,
    hooks and settings. In evaluation it uses the running statistics. Where no running statistics
    are tracked, it uses the statistics of the group's whole batch, as in training.
    """

    _version = 2  # of torch's batch norms: a state dict has `num_batches_tracked`

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    momentum: float | None
    eps: float

    def __init__(
        self,
        original: _BatchNorm,
        group: dist.ProcessGroup,
        path: str = "",
        agreement: ForwardAgreement | None = None,
    ) -> None:
        """Take over the parameters, buffers, hooks and settings of `original`, the module at
        `path`.

        With an `agreement`, every forward that communicates first checks that all ranks run it.
        """
        super().__init__()
        self.__dict__.update(original.__dict__)
        self.group = group
        self._path, self._agreement = path, agreement

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised values of `x` [N, C, ...], this rank's part of the batch."""
        by_batch = self.training or self.running_mean is None
        if by_batch and self._agreement is not None:
            self._agreement.at(f"the batch norm {self._path}")
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the mean over all batches so far
                factor = 1.0 / float(self.num_batches_tracked)
        return global_batch_norm(
            x,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            by_batch,
            factor,
            self.eps,
            self.group,
        )

    def extra_repr(self) -> str:
        return f"eps={self.eps}, momentum={self.momentum}, ranks={self.group.size()}"


_SWAPPED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def synchronise_batch_norm(
    module: nn.Module, group: dist.ProcessGroup, agreement: ForwardAgreement | None = None
) -> list[str]:
    """Replace every batch norm inside `module` by a `GlobalBatchNorm`, and return their paths.

    Pass an `agreement` where forwards may reach different batch norms on different ranks. Raises
    ConfigError for a batch norm that cannot be replaced: a subclass whose forward does more, or
    `module` itself.
    """
    twins: dict[nn.Module, GlobalBatchNorm] = {}
    places, faults = [], []
    for path, submodule in module.named_modules(remove_duplicate=False):
        if not isinstance(submodule, _SWAPPED):
            continue
        is_plain = (
            type(submodule) is nn.SyncBatchNorm or type(submodule).forward is _BatchNorm.forward
        )
        if path and is_plain:
            twins.setdefault(
                submodule, GlobalBatchNorm(submodule, group, model_path(path), agreement)
            )
            places.append((path, submodule))
        else:
            kind = type(submodule).__qualname__
            rule = f"asks for statistics of the global batch in {path or 'the model'}, and {kind} "
            rule += "has a forward of its own" if path else "is the whole model"
            remedy = "use model.sync_batchnorm=false (statistics of each replica's own batch)"
            faults.append(Fault("model.sync_batchnorm", "true", rule, remedy))
    if faults:
        raise ConfigError(faults)
    for path, submodule in places:
        parent, _, name = path.rpartition(".")
        module.get_submodule(parent)._modules[name] = twins[submodule]
    return [path for path, _ in places]
