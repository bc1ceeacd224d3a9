"""Stand in for the engines that need storage: DistributedDataParallel, and DeepSpeed's ZeRO.

Stand-ins allocate the tensors that the engines allocate, at the same moments, and call the same
collectives. Module, autocast, optimizer and gradients are the rank's own.
`strategies/memory/engine_memory.py` describes ZeRO's memory, with its sources.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from whale_train.optimizers.together import Together
from whale_train.runtime.base.autocast import NARROW, in_precision
from whale_train.runtime.base.copies import Copies
from whale_train.runtime.engines.base import ParameterState, set_learning_rate
from whale_train.runtime.engines.ddp import StreamedEngine
from whale_train.runtime.engines.grad_reduce import Reduction, in_buckets
from whale_train.runtime.engines.uneven.flat_unit import FlatUnit
from whale_train.runtime.optim.optimizers import MakeOptimizer, skipping, state_of
from whale_train.runtime.rehearse.recorded_group import RecordedGroup


class Buckets(nn.Module):
    """A stand-in for DistributedDataParallel.

    Gradients are views of persistent buckets. Each bucket is all-reduced when it is full.
    """

    def __init__(self, module: nn.Module, copies: Copies) -> None:
        super().__init__()
        self.module = module
        self._group, self._dtype, self._levels = copies.group, copies.reduce_dtype, copies.levels
        self._syncs = True
        self.buckets: list[Tensor] = []
        trained = [p for p in module.parameters() if p.requires_grad]
        for parameters in in_buckets(reversed(trained), copies.bucket_elements):
            bucket = torch.empty(
                sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device="meta"
            )
            self.buckets.append(bucket)
            views = torch.split(bucket, [p.numel() for p in parameters])
            absent = set(parameters)
            for parameter, view in zip(parameters, views, strict=True):
                _when_made(parameter, self._hook(bucket, view, absent))

    def _hook(self, bucket: Tensor, view: Tensor, absent: set[nn.Parameter]) -> Callable[..., None]:
        """Return a hook for the gradient whose place in `bucket` is `view`.

        `absent` are the parameters of the bucket that have no gradient yet.
        """
        all_parameters = set(absent)

        def hook(parameter: nn.Parameter) -> None:
            parameter.grad = view.view_as(parameter)
            if not self._syncs:
                return
            absent.discard(parameter)
            if not absent:
                sent = bucket.to(self._dtype)
                if self._levels is None:
                    dist.all_reduce(sent, group=self._group, async_op=True)
                else:
                    self._levels.begin(sent)
                absent.update(all_parameters)

        return hook

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Skip all-reduces inside the context, which encloses all but the last backward of a
        step."""
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class ZeroEngine:
    """A stand-in for DeepSpeed's engine of ZeRO 1 to 3, perhaps with offload.

    `forget` is called with each tensor that is whole here but partitioned in DeepSpeed, so that its
    memory does not count.
    """

    loss_scale: Tensor | None = None
    reduction = None
    partitions = True

    def __init__(
        self,
        module: nn.Module,
        copies: Copies,
        config: dict[str, Any],
        optimizer: MakeOptimizer,
        device: torch.device,
        precision: str,
        forget: Callable[[Tensor], None],
    ) -> None:
        assert copies.group is not None
        self.module, self.holders, self.copies = module, copies, copies.size
        self.counts_norm = copies.is_first and copies.index == 0
        self.on_gradients: Callable[[], None] | None = None
        zero = config["zero_optimization"]
        self._stage = zero["stage"]
        self._sent = NARROW.get(config["communication_data_type"], torch.float32)
        self._offloads = "offload_optimizer" in zero
        self._prefetches = zero.get("stage3_prefetch_bucket_size", 0)
        self._overlaps = zero["overlap_comm"]
        self._second: Tensor | None = None
        self.scale = copies.size
        self._group, self._device, self._precision = copies.group, device, precision
        self._shared = Reduction((), None, copies.shared, copies.shards * copies.size)
        self._trained = [p for p in module.parameters() if p.requires_grad]
        narrow = NARROW.get(precision)
        for parameter in copies.narrow.intersection(self._trained):
            parameter.grad_dtype = torch.float32
            assert narrow is not None
            parameter.data = parameter.data.to(narrow)
        total = sum(p.numel() for p in self._trained)
        self._part = -(-total // self.copies)
        self._bucket = min(total, config["zero_optimization"]["reduce_bucket_size"])
        self.held: list[Tensor] = []  # tensors besides gradients and the optimizer's state
        self._partition = torch.empty(0 if self._offloads else self._part, device=device)
        self._optimizer: Any = None
        if self._trained:
            flat = nn.Parameter(self._partition)
            self._optimizer = optimizer([flat])
            state_of(self._optimizer, flat)
            if isinstance(self._optimizer, Together):
                self._optimizer.make_states([flat])
        self._gradients: list[Tensor] = []
        self._filled = 0
        self._gathered: dict[nn.Module, list[Tensor]] = {}
        self._prefetched: list[Tensor] = []
        if self._stage == 3:
            self.held.append(torch.empty(self._bucket, device=device))  # it is never freed
            # All parts of gradients lie in one buffer, which is never freed either.
            if not self._offloads:
                self._gradients.append(torch.empty(self._part, device=device))
            self._gather_when_called(forget, kept_here="offload_param" not in zero)
        if self._stage > 1:
            for parameter in self._trained:
                _when_made(parameter, self._reduce)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with in_precision(self._precision, self._device):
            return self.module(*args, **kwargs)

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Accumulate gradients times the number of copies, over which DeepSpeed averages.

        `gradients` are the gradients of `outputs`, of the same shapes.
        """
        wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in outputs]
        scalars = [(x * g).sum() for x, g in zip(wide, gradients, strict=True)]
        torch.autograd.backward(sum(scalars[1:], scalars[0]) * self.copies)

    def input_gradient(self, value: Tensor) -> Tensor | None:
        return None if value.grad is None else value.grad / self.copies

    def accumulating(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def finish_backward(self) -> None:
        self._shared.finish()
        self._prefetched = []

    def set_learning_rate(self, lr: float) -> None:
        set_learning_rate(self._optimizer, lr)

    def step(self, global_norm: Callable[[Tensor], Tensor] | None, skips: bool = False) -> None:
        """Reduce the remaining gradients, update this rank's part, and gather the parameters.

        `global_norm` maps the squared norm of this engine's gradients to the squared norm over all
        engines (None: not measured). With `skips`, the update changes nothing where the global norm
        is not finite.
        """
        self._shared.wait()
        if self._stage == 1:
            self._filled = sum(p.numel() for p in self._trained if p.grad is not None)
        while self._filled:
            self._send_bucket()
        part = torch.empty(0 if self._offloads else self._part, device=self._device)
        own = torch.zeros((), device=self._device)
        dist.all_reduce(own, group=self._group)
        found_inf = None
        if global_norm is not None:
            norm = global_norm(own).sqrt()
            found_inf = (~norm.isfinite()).float() if skips else None
        if self._optimizer is not None:
            (flat,) = self._optimizer.param_groups[0]["params"]
            flat.grad = part
            with skipping(self._optimizer, None if self._offloads else found_inf):
                if not self._offloads:
                    self._optimizer.step()
            flat.grad = None
        for parameter in self._trained:
            parameter.grad = None
        if self._stage < 3:
            self._gradients = []
        self._second = None
        del part
        if self._stage < 3:  # gathered into the parameters themselves
            remaining = sum(p.numel() for p in self._trained)
            while remaining > 0:
                self._ask("all-gather", min(remaining, self._bucket))
                remaining -= min(remaining, self._bucket)

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        yield from ((p, None) for p in self._trained)

    def values(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        yield from ((p, None) for p in self._trained)

    def states(self) -> Iterator[ParameterState]:
        yield from ()

    def make_states(self, parameters: Collection[nn.Parameter]) -> None:
        pass

    def constant(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        return tensor, None

    def computed_with(self) -> Iterator[nn.Parameter]:
        yield from ()

    def read_states(self) -> None:
        pass

    @property
    def optimizer_tensors(self) -> list[Tensor]:
        """Return the tensors of the optimizer's state for this rank's part."""
        if self._optimizer is None:
            return []
        states = self._optimizer.state.values()
        return [x for state in states for x in state.values() if isinstance(x, Tensor)]

    @property
    def partition_tensors(self) -> list[Tensor]:
        """Return this rank's fp32 part of the parameters, and other tensors that are held
        throughout."""
        return [self._partition, *self.held]

    @property
    def gathered_tensors(self) -> list[Tensor]:
        """Return the currently gathered parameters, and the prefetch buffers."""
        return [*self._prefetched, *(x for tensors in self._gathered.values() for x in tensors)]

    @property
    def gradient_tensors(self) -> list[Tensor]:
        """Return the parts of gradients that are held until the update."""
        return self._gradients

    def _reduce(self, parameter: nn.Parameter) -> None:
        """Replace a new gradient by this rank's part, and count its elements into the current
        bucket.

        A full bucket is reduced.
        """
        assert parameter.grad is not None
        count = parameter.grad.numel()
        parameter.grad = None
        if not self._offloads and self._stage < 3:
            part = torch.empty(-(-count // self.copies), device=self._device)
            self._gradients.append(part)
        self._filled += count
        if self._second is None and self._overlaps and self._stage == 2:
            # The second bucket fills while the first is reduced.
            self._second = torch.empty(self._bucket, device=self._device)
        if self._filled >= self._bucket:
            self._send_bucket()

    def _send_bucket(self) -> None:
        """Allocate a bucket of gradients and reduce-scatter it, so that each copy keeps its
        part."""
        bucket = torch.empty(min(self._filled, self._bucket), device=self._device)
        reduced = torch.empty_like(bucket)
        self._ask("reduce-scatter", reduced.numel(), self._sent)
        self._filled -= bucket.numel()

    def _ask(self, kind: str, elements: int, dtype: torch.dtype = torch.float32) -> None:
        """Record a collective of `elements` elements among the copies. The memory of its operands
        is not counted."""
        assert isinstance(self._group, RecordedGroup)
        self._group.ask(kind, [torch.empty(1, dtype=dtype, device="meta").expand(elements)])

    def _gather_when_called(self, forget: Callable[[Tensor], None], *, kept_here: bool) -> None:
        """Gather the parameters of a module from its call to its end, and again in its backward.

        Gathered parameters are not counted at other times. With `kept_here` (parameters are not
        offloaded), this rank's part of each is held throughout.
        """
        for parameter in self.module.parameters():
            forget(parameter.data)
            part = -(-parameter.numel() // self.copies)
            if kept_here:
                self.held.append(torch.empty(part, dtype=parameter.dtype, device=self._device))
        for module in self.module.modules():
            own = list(module.parameters(recurse=False))
            if not own:
                continue

            def gather(module: nn.Module, *_: Any, own: list[nn.Parameter] = own) -> None:
                if self._prefetches and not self._prefetched:  # flat; weights are copied out
                    total = sum(p.numel() for p in self._trained)
                    part = min(self._prefetches, total) / max(total, 1)
                    size = int(part * sum(p.nbytes for p in self._trained))
                    self._prefetched = [
                        torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)
                    ]
                if module not in self._gathered:
                    self._gathered[module] = [
                        torch.empty(p.numel(), dtype=p.dtype, device=self._device) for p in own
                    ]
                    for full in self._gathered[module]:
                        self._ask("all-gather", full.numel(), full.dtype)

            def release(module: nn.Module, *_: Any) -> None:
                self._gathered.pop(module, None)

            module.register_forward_pre_hook(gather)
            module.register_forward_hook(release)
            module.register_full_backward_pre_hook(gather)
            module.register_full_backward_hook(release)


class GatheredUnits:
    """The weights that an UnevenEngine has gathered: tensors without storage stand for their
    memory, since the units themselves keep their size here.

    tensors: one for each gathered unit.
    """

    def __init__(self, forget: Callable[[Tensor], None]) -> None:
        self._forget = forget
        self.tensors: dict[FlatUnit, Tensor] = {}

    def __call__(self, unit: FlatUnit, is_gathered: bool) -> None:
        self._forget(unit.flat)
        self.tensors.pop(unit, None)
        if is_gathered:
            self.tensors[unit] = torch.empty_like(unit.flat)


class HostEngine(StreamedEngine):
    """A stand-in for the engine of weights on the host; its update needs no device memory."""

    def step(self, norm: Tensor | None, clip: float, found_inf: Tensor | None = None) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def states(self) -> Iterator[ParameterState]:
        yield from ()


def _when_made(parameter: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> None:
    """Call `hook` each time a gradient has been added to `parameter`."""
    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
