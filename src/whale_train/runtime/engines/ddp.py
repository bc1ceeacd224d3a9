"""The engine of copies that hold whole parameters: torch's DistributedDataParallel and
optimizers."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from whale_train.optimizers.together import Together
from whale_train.runtime.base.autocast import in_precision
from whale_train.runtime.base.copies import Copies, LevelledSum
from whale_train.runtime.engines.base import (
    CLIP_EPS,
    ParameterState,
    set_learning_rate,
    without_scale,
)
from whale_train.runtime.engines.grad_reduce import GradientSums, Reduction
from whale_train.runtime.kernels.streamed_weights import StreamedWeights
from whale_train.runtime.optim.cpu_norms import total_norm
from whale_train.runtime.optim.optimizers import MakeOptimizer, skipping, state_of


class TorchEngine:
    """The engine of copies that hold whole parameters.

    optimizer: makes the optimizer of parameters.
    precision: the precision of every forward; autocast if it has 16 bits.
    may_skip_parameters: whether a forward may leave out parameters (`find_unused_parameters`).
    overlap: whether a step has one backward, under which DistributedDataParallel reduces gradients;
        otherwise `reduction` sums each gradient when it is final.
    excess: the factor by which gradients are too large, where another engine runs these parameters;
        1 if this engine runs them.
    sums: sums gradients instead of the two; None: one of them does.
    buckets: makes the substitute for DistributedDataParallel of a rehearsal; None: no substitute.
    """

    loss_scale: Tensor | None = None
    partitions = False

    def __init__(
        self,
        module: nn.Module,
        copies: Copies,
        optimizer: MakeOptimizer,
        precision: str,
        device: torch.device,
        *,
        may_skip_parameters: bool,
        overlap: bool = True,
        excess: int = 1,
        sums: GradientSums | None = None,
        buckets: Callable[[nn.Module, Copies], nn.Module] | None = None,
    ) -> None:
        self.module = module
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.holders = copies
        self.copies = copies.size
        self.counts_norm = copies.is_first
        self.on_gradients: Callable[[], None] | None = None
        self._run: nn.Module = module
        self._counted = [p for p in self.parameters if copies.counts(p)]
        self.reduction: GradientSums | None = sums
        if sums is None and not overlap:
            self.reduction = Reduction(
                [p for p in self.parameters if p not in copies.shared],
                copies.group,
                copies.shared,
                copies.shards,
                copies.reduce_dtype,
                copies.levels,
                copies.bucket_elements,
            )
        elif sums is None and self.copies > 1 and self.parameters:
            assert not copies.shared
            if buckets is None:
                self._run = _data_parallel(module, copies, device, precision, may_skip_parameters)
            else:
                self._run = buckets(module, copies)
        # This factor undoes averaging. fp16 always has it, so that gradients are computed at the
        # magnitude they would have on one device.
        averages = _averages(copies, precision)
        self._scale = self.copies if self._run is not module and averages else 1
        self.optimizer = optimizer(self.parameters, copies) if self.parameters else None
        self._precision, self._device = precision, device
        self._excess, self._is_excessive = excess, False

    @property
    def scale(self) -> int:
        """Return the factor that undoes averaging: the number of copies, or 1 where gradients are
        summed."""
        return self._scale

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with in_precision(self._precision, self._device):
            return self._run(*args, **kwargs)

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Accumulate gradients in `.grad`; until they are averaged, they are `scale` times too
        large."""
        if self._scale > 1:
            gradients = [gradient * self._scale for gradient in gradients]
        torch.autograd.backward(outputs, gradients)

    def input_gradient(self, value: Tensor) -> Tensor | None:
        """Return the gradient that `backward` left in `value`, divided by `scale`, or None if there
        is no gradient."""
        if value.grad is None or self._scale == 1:
            return value.grad
        return value.grad / self._scale

    @property
    def buckets(self) -> Sequence[Tensor]:
        """Return the gradient buckets of the substitute for DistributedDataParallel, or () where
        the engine has no substitute."""
        return getattr(self._run, "buckets", ())

    def accumulating(self) -> AbstractContextManager[Any]:
        """Return a context without reductions (DistributedDataParallel's `no_sync`), or a null
        context for a module without `no_sync`."""
        no_sync: Callable[[], AbstractContextManager[Any]]
        no_sync = getattr(self._run, "no_sync", nullcontext)
        return no_sync()

    def finish_backward(self) -> None:
        """Send the gradients that `reduction` has not sent yet."""
        self._is_excessive = self._excess > 1
        if self.reduction is not None:
            self.reduction.finish()

    def set_learning_rate(self, lr: float) -> None:
        set_learning_rate(self.optimizer, lr)

    def squared_norm(self) -> Tensor:
        """Return the squared norm, an fp32 scalar, of the gradients that this rank counts among the
        shards of a copy."""
        self._settle()
        gradients = [p.grad for p in self._counted if p.grad is not None]
        if not gradients:
            return torch.zeros((), device=self._device)
        return (total_norm(gradients).float() ** 2).to(self._device)

    def step(self, norm: Tensor | None, clip: float, found_inf: Tensor | None = None) -> None:
        """Clip the gradients and update the parameters, then drop the gradients.

        norm: the norm over all engines, without the loss scale; None: do not clip.
        clip: the norm to clip to; 0: do not clip.
        found_inf: a scalar; where it is 1, only drop the gradients.
        """
        self._settle()
        if self.optimizer is None:
            return
        if self.on_gradients is not None:
            self.on_gradients()
        with skipping(self.optimizer, found_inf) as steps:
            if steps:
                self._scale_gradients(norm, clip)
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _scale_gradients(self, norm: Tensor | None, clip: float) -> None:
        """Divide the gradients by the loss scale and clip them, in one pass."""
        if self.loss_scale is None:
            if clip and norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, clip, norm)
            return
        factor = self.loss_scale.reciprocal()
        if clip and norm is not None:
            factor *= (clip / (norm + CLIP_EPS)).clamp(max=1.0)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield every trained parameter with its summed gradient, without the loss scale.

        A parameter without a gradient has zeros.
        """
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                yield parameter, torch.zeros_like(parameter)
            else:
                yield parameter, without_scale(gradient, self.loss_scale)

    def values(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield every trained parameter with its values."""
        for parameter in self.parameters:
            yield parameter, parameter.detach()

    def states(self) -> Iterator[ParameterState]:
        """Yield the whole local state of every trained parameter.

        The parameters to save are distributed over the copies by bytes.
        """
        savers = shared_out([p.nbytes for p in self.parameters], self.copies)
        own = self.holders.group.rank() if self.holders.group is not None else 0
        for parameter, saver in zip(self.parameters, savers, strict=True):
            assert self.optimizer is not None
            optimizer_state = state_of(self.optimizer, parameter)
            is_owner = saver == own and self.holders.counts(parameter)
            of_optimizer = (optimizer_state.moments, optimizer_state.entries, optimizer_state.apart)
            yield ParameterState(parameter, parameter.detach(), *of_optimizer, None, is_owner)

    def make_states(self, parameters: Collection[nn.Parameter]) -> None:
        """Create the state of `parameters` that does not exist yet."""
        if isinstance(self.optimizer, Together):
            self.optimizer.make_states(parameters)

    def constant(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        """Return `tensor` detached, whole on this rank, and None for the index of its first
        element."""
        return tensor.detach(), None

    def computed_with(self) -> Iterator[nn.Parameter]:
        """Yield nothing: the next forward reads the values that `states` has."""
        yield from ()

    def read_states(self) -> None:
        """Do nothing: the next forward reads the values that `states` has."""
        pass

    def _settle(self) -> None:
        """Wait for reductions in progress, and divide excessive gradients by `excess`."""
        if self.reduction is not None:
            self.reduction.wait()
        if self._is_excessive:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            torch._foreach_div_(gradients, self._excess)
            self._is_excessive = False


class StreamedEngine(TorchEngine):
    """The engine of the only copy of weights that are kept on the host.

    `streamed` copies a weight to the device where the weight is read.
    """

    def __init__(self, *args: Any, streamed: StreamedWeights, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._streamed = streamed

    def step(self, norm: Tensor | None, clip: float, found_inf: Tensor | None = None) -> None:
        """Update as TorchEngine does, after waiting for `norm` and `found_inf`.

        Later reads of the weights get the new values.
        """
        # The host branches on these, so they must have arrived: torch would not wait for them.
        norm, found_inf = (None if x is None else x.cpu() for x in (norm, found_inf))
        super().step(norm, clip, found_inf)
        self._streamed.changed()

    def read_states(self) -> None:
        """Make later reads of the weights return the values that were written to `states`."""
        self._streamed.changed()


def _data_parallel(
    module: nn.Module,
    copies: Copies,
    device: torch.device,
    precision: str,
    may_skip_parameters: bool,
) -> DistributedDataParallel:
    """Return `module` wrapped in DistributedDataParallel.

    A communication hook is registered where the plan sends gradients in another dtype than fp32,
    sums them inside hosts first, or sums them in a group of their own.
    """
    wrapped = DistributedDataParallel(
        module,
        process_group=copies.group,
        device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=copies.bucket_elements * 4 / 2**20,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,  # BatchNorm's statistics are global, so its buffers agree already
        find_unused_parameters=may_skip_parameters,
        init_sync=False,  # all copies initialise from the same seed
    )
    if copies.levels is not None:
        how = (copies.levels, copies.reduce_dtype, copies.size, _averages(copies, precision))
        wrapped.register_comm_hook(how, _sum_in_levels)
    elif copies.reduce_dtype != torch.float32:
        wrapped.register_comm_hook((copies.group, copies.reduce_dtype), _average)
    elif copies.sums is not None:
        wrapped.register_comm_hook((copies.sums, precision == "fp16"), _sum)
    return wrapped


def _averages(copies: Copies, precision: str) -> bool:
    """Return whether DistributedDataParallel averages gradients over `copies`, not sums them."""
    sums = copies.sums is not None or copies.levels is not None
    return not sums or precision == "fp16" or copies.reduce_dtype != torch.float32


def shared_out(sizes: Sequence[int], copies: int) -> list[int]:
    """Return, for each of `sizes`, the index of the copy that takes it: the copy with the smallest
    sum so far."""
    taken = [0] * copies
    savers = []
    for size in sizes:
        savers.append(taken.index(min(taken)))
        taken[savers[-1]] += size
    return savers


def _sum(
    how: tuple[dist.ProcessGroup, bool],
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # which torch's checks ask for
) -> Future[Tensor]:
    """Sum a gradient bucket of DistributedDataParallel over a group, within the backward that
    filled it.

    `how` is the group, and whether the sum is divided by the group's size.
    """
    group, averages = how
    gradients, done = bucket.buffer(), Future[Tensor]()
    dist.all_reduce(gradients, group=group)
    done.set_result(gradients.div_(group.size()) if averages else gradients)
    return done


def _sum_in_levels(
    how: tuple[LevelledSum, torch.dtype, int, bool],
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """Sum a gradient bucket of DistributedDataParallel, inside hosts first.

    `how` is the sum, the dtype to send, the number of copies, and whether the sum is divided by it.
    """
    levels, dtype, copies, averages = how
    gradients = bucket.buffer()
    sent = gradients.to(dtype)
    if averages:
        sent.div_(copies)
    summed = levels.begin(sent)
    if sent is gradients:
        return summed
    done: Future[Tensor] = summed.then(lambda future: gradients.copy_(future.value()))
    return done


def _average(
    how: tuple[dist.ProcessGroup, torch.dtype],
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """Average a gradient bucket of DistributedDataParallel over a group, sent in another dtype.

    `how` is the group and the dtype. torch's own hook, `bf16_compress_hook`, works with NCCL only.
    """
    group, dtype = how
    gradients = bucket.buffer()
    sent = gradients.to(dtype).div_(group.size())
    work = dist.all_reduce(sent, group=group, async_op=True)
    assert work is not None
    done: Future[Tensor] = work.get_future().then(lambda _: gradients.copy_(sent))
    return done
