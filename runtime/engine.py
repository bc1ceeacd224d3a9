"""The engine of one TaskGraph on one rank: gradients reduced over its copies, then the update.

ZeRO 0 is torch's DistributedDataParallel and optimizer, ZeRO 1 to 3 a DeepSpeed engine
(docs/adr/003). Both average gradients over their copies, so a loss is scaled by the number of
copies first; `backward` hides that. Where a step has several backwards, gradients are summed over
the copies once, after the last (`runtime/reduction.py`). The global gradient norm spans the
engines of a job, so an update is a matter of all of a rank's engines at once: `update`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from whale_train.runtime.lamb import Lamb, Shards
from whale_train.runtime.norms import total_norm
from whale_train.runtime.reduction import Reduction, SharedGradients
from whale_train.strategies.memory import REDUCE_BUCKET_ELEMENTS


@dataclass(frozen=True)
class Copies:
    """Whom an engine shares its parameters with, and what this rank counts of them.

    `group` joins the ranks that hold the same shards (None: this one alone), `shard_group` those
    that hold the other shards of the same copy. `sharded` are the parameters of which this rank
    has a shard; the others are whole on every member of the shard group. `shared` are parameters
    other TaskGraphs hold as well: the group of all their holders, by parameter; `counted_elsewhere`
    those of them that another TaskGraph counts.
    """

    group: dist.ProcessGroup | None
    shard_group: dist.ProcessGroup | None = None
    sharded: frozenset[nn.Parameter] = frozenset()
    shared: Mapping[nn.Parameter, dist.ProcessGroup] = field(default_factory=dict)
    counted_elsewhere: frozenset[nn.Parameter] = frozenset()

    @property
    def size(self) -> int:
        return self.group.size() if self.group is not None else 1

    @property
    def is_first(self) -> bool:
        return self.group is None or self.group.rank() == 0

    @property
    def shards(self) -> int:
        return self.shard_group.size() if self.shard_group is not None else 1

    @property
    def index(self) -> int:
        return self.shard_group.rank() if self.shard_group is not None else 0

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this shard, and not another member's copy, is counted."""
        if parameter in self.counted_elsewhere:
            return False
        return parameter in self.sharded or self.index == 0


class Engine(Protocol):
    """What the training loop needs of an engine. `counts_norm` says whether this rank adds this
    engine's squared norm to the job's: a copied parameter is counted by one copy. `on_gradients`
    is called in every update, when the gradients are reduced and not yet clipped or used.
    `loss_scale` is what the gradients of the step were multiplied by (fp16)."""

    copies: int
    counts_norm: bool
    module: nn.Module
    on_gradients: Callable[[], None] | None
    loss_scale: float

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Accumulate gradients, given those of `outputs`; over the copies they are summed, by the
        time of the update. What it leaves in inputs' `.grad` may be scaled: see
        `input_gradient`."""

    def input_gradient(self, value: Tensor) -> Tensor | None:
        """The gradient `backward` left in an input of this engine (None: it left none)."""

    def accumulating(self) -> AbstractContextManager[Any]:
        """Around a forward and its backward that others of the step will follow: reduce later
        what can be."""

    def finish_backward(self) -> None:
        """The last backward of a step is done: begin what it left to reduce."""

    def set_learning_rate(self, lr: float) -> None: ...

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Every trained parameter with its gradient, summed over the copies, the loss scale taken
        out; for `on_gradients`. Of what copies partition, one copy gets the whole and the others
        None; all must ask."""

    def values(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """The same of their values as the optimizer has them, outside of an update."""


class TorchEngine:
    """Copies kept whole. `overlap`: a step has one backward, under which gradients are reduced by
    DistributedDataParallel; otherwise they are once all backwards are done. `precision` is that
    of every forward (autocast)."""

    loss_scale = 1.0

    def __init__(
        self,
        module: nn.Module,
        copies: Copies,
        optimizer: "MakeOptimizer",
        precision: str,
        device: torch.device,
        *,
        may_skip_parameters: bool,
        overlap: bool = True,
    ) -> None:
        self.module = module
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.copies = copies.size
        self.counts_norm = copies.is_first
        self.on_gradients: Callable[[], None] | None = None
        self._run: nn.Module = module
        self._counted = [p for p in self.parameters if copies.counts(p)]
        self._reduction: Reduction | None = None
        if not overlap:
            self._reduction = Reduction(
                [p for p in self.parameters if p not in copies.shared],
                copies.group,
                copies.shared,
                copies.shards,
            )
        elif self.copies > 1 and self.parameters:
            assert not copies.shared
            self._run = DistributedDataParallel(
                module,
                process_group=copies.group,
                device_ids=[device] if device.type == "cuda" else None,
                bucket_cap_mb=REDUCE_BUCKET_ELEMENTS * 4 / 2**20,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,  # BatchNorm's agree already, being global
                find_unused_parameters=may_skip_parameters,
                init_sync=False,  # the same seed made them everywhere
            )
        self._scale = self.copies if self._run is not module else 1  # what averaging undoes
        self.optimizer = optimizer(self.parameters, copies) if self.parameters else None
        self._precision, self._device = precision, device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _autocast(self._precision, self._device):
            return self._run(*args, **kwargs)

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        if self._scale > 1:
            gradients = [gradient * self._scale for gradient in gradients]
        torch.autograd.backward(outputs, gradients)

    def input_gradient(self, value: Tensor) -> Tensor | None:
        if value.grad is None or self._scale == 1:
            return value.grad
        return value.grad / self._scale

    def accumulating(self) -> AbstractContextManager[Any]:
        run = self._run
        return run.no_sync() if isinstance(run, DistributedDataParallel) else nullcontext()

    def finish_backward(self) -> None:
        if self._reduction is not None:
            self._reduction.begin()

    def set_learning_rate(self, lr: float) -> None:
        _set_learning_rate(self.optimizer, lr)

    def squared_norm(self) -> Tensor:
        """Of the gradients this rank counts among the shards of a copy, as a scalar in fp32."""
        self._settle()
        gradients = [p.grad for p in self._counted if p.grad is not None]
        if not gradients:
            return torch.zeros((), device=self._device)
        return total_norm(gradients).float() ** 2

    def step(self, norm: Tensor | None, clip: float, skips: bool = False) -> None:
        """Update, clipping by `norm`, the global one without the loss scale; or forget the
        gradients, where the step `skips`."""
        self._settle()
        if self.optimizer is None:
            return
        if self.on_gradients is not None:
            self.on_gradients()
        if not skips:
            self._scale_gradients(norm, clip)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _scale_gradients(self, norm: Tensor | None, clip: float) -> None:
        """Take the loss scale out and clip, in one pass."""
        if self.loss_scale == 1.0:
            if clip and norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, clip, norm)
            return
        factor = torch.full((), 1 / self.loss_scale, device=self._device)
        if clip and norm is not None:
            factor *= (clip / (norm + _CLIP_EPS)).clamp(max=1.0)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_mul_(gradients, factor)

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                yield parameter, torch.zeros_like(parameter)
            else:
                yield parameter, _without_scale(gradient, self.loss_scale)

    def values(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        for parameter in self.parameters:
            yield parameter, parameter.detach()

    def _settle(self) -> None:
        if self._reduction is not None:
            self._reduction.wait()


class DeepSpeedEngine:
    """Copies that partition what they have in common: ZeRO 1 to 3, offload. `precision` bf16 is
    DeepSpeed's own, fp16 autocast over its fp32 (docs/adr/007)."""

    loss_scale = 1.0

    def __init__(
        self,
        module: nn.Module,
        copies: Copies,
        config: dict[str, Any],
        device: torch.device,
        precision: str,
    ) -> None:
        deepspeed = import_deepspeed()
        self.copies = copies.size
        self.counts_norm = copies.is_first and copies.index == 0
        self.on_gradients: Callable[[], None] | None = None
        self._is_first_copy = copies.is_first
        # DeepSpeed will average what is then the same on all copies.
        self._shared = SharedGradients(copies.shared, copies.shards * copies.size)
        for parameter in module.parameters():
            # What DeepSpeed's own norm goes by.
            parameter.tensor_model_parallel = parameter in copies.sharded  # type: ignore[attr-defined]
            parameter.ds_pipe_replicated = parameter in copies.counted_elsewhere  # type: ignore[attr-defined]
        self._trained = [p for p in module.parameters() if p.requires_grad]
        if precision == "fp16":
            _run_within(module, _autocast(precision, device))
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=module,
            model_parameters=self._trained,
            config=config,
            dist_init_required=False,
            mpu=_Topology(copies) if copies.shard_group is not None else None,
        )
        self.module = self._engine.module
        self._half = torch.bfloat16 if config["bf16"]["enabled"] else None
        self._device = device
        self._stage = config["zero_optimization"]["stage"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = tuple(self._cast(x) for x in args)
        return self._engine(*args, **{key: self._cast(x) for key, x in kwargs.items()})

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        # Only a scalar through the engine's own backward is right at every stage: an
        # `output.backward(gradient)` is refused at 0, crashes at 2, and is silently wrong at 2
        # with offload.
        scalars = [(_wide(x) * g).sum() for x, g in zip(outputs, gradients, strict=True)]
        self._engine.backward(sum(scalars[1:], scalars[0]) * self.copies)

    def input_gradient(self, value: Tensor) -> Tensor | None:
        return None if value.grad is None else value.grad / self.copies

    def accumulating(self) -> AbstractContextManager[Any]:
        return nullcontext()  # ZeRO 1 reduces in the step, 2 and 3 partition every gradient

    def finish_backward(self) -> None:
        self._shared.sum()

    def set_learning_rate(self, lr: float) -> None:
        _set_learning_rate(self._optimizer, lr)

    def step(self, global_norm: Callable[[Tensor], Tensor] | None) -> None:
        """Reduce and update, clipping by what `global_norm` makes of this engine's own squared
        norm. DeepSpeed knows the norm only inside its step, and only its own engine's, so its
        norm function is wrapped for the time of the step. It skips a step whose norm is not
        finite, and takes the loss scale out with the clipping."""
        if global_norm is None:
            assert self.on_gradients is None, "gradients are seen where their norm is measured"
            self._engine.step()
            return
        name = "_get_norm_groups" if self._stage == 3 else "scaled_global_norm"
        own = getattr(self._optimizer, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.on_gradients is not None:
                self.on_gradients()
            found = own(*args, **kwargs)
            parts = found if isinstance(found, list) else [found]
            norms = torch.stack(
                [torch.as_tensor(x, dtype=torch.float32, device=self._device) for x in parts]
            )
            norms = torch.where(norms < 0, torch.inf, norms)  # -1 is not finite
            norm = global_norm((norms**2).sum()).sqrt()
            return [norm] if isinstance(found, list) else norm

        setattr(self._optimizer, name, wrapped)
        self._optimizer.loss_scale = self.loss_scale
        try:
            self._engine.step()
        finally:
            self._optimizer.loss_scale = 1.0  # or its backward would multiply by it
            delattr(self._optimizer, name)

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        # Not safe_get_full_grad: under ZeRO 1 that is this copy's own, before the reduction.
        for parameter in self._trained:
            if self._stage == 3:
                whole = self._optimizer.get_fp32_grad_for_param(parameter)
            else:
                whole = parameter.get_full_hp_grad()  # type: ignore[attr-defined]
            found = _without_scale(whole, self.loss_scale) if self._is_first_copy else None
            yield parameter, found

    def values(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        for parameter in self._trained:
            if self._stage < 3 and parameter.dtype == torch.float32:
                yield parameter, parameter.detach()  # every copy has it
            else:
                whole = import_deepspeed().utils.safe_get_full_fp32_param(parameter)
                yield parameter, whole if self._is_first_copy else None

    def _cast(self, value: Any) -> Any:
        if self._half is not None and isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self._half)
        return value


class _Topology:
    """The groups of an engine, as DeepSpeed asks for them (Megatron's `mpu`)."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._copies.group

    def get_data_parallel_world_size(self) -> int:
        return self._copies.size

    def get_data_parallel_rank(self) -> int:
        return self._copies.group.rank() if self._copies.group is not None else 0

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._copies.shard_group

    def get_model_parallel_world_size(self) -> int:
        return self._copies.shards

    def get_model_parallel_rank(self) -> int:
        return self._copies.index

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank


def update(
    engines: Sequence[Engine],
    clip: float,
    measure: bool,
    sum_over_job: Callable[[Tensor], Tensor] | None,
    loss_scale: float | None = None,
) -> Tensor | None:
    """One optimizer step of all of a rank's engines; the global L2 norm of the gradients before
    clipping (None unless `measure` or `clip` or a loss scale asks for it).

    With a `loss_scale`, by which the gradients were multiplied, a step whose gradients are not
    finite is skipped; the norm is the same number on every rank, so they all do. Norms are
    without it.

    `sum_over_job` adds a scalar over all ranks whose engines hold different parameters; None where
    every rank's engines hold, among their copies, all there are.
    """

    def counts(engine: Engine) -> bool:
        return sum_over_job is None or engine.counts_norm

    plain = [engine for engine in engines if isinstance(engine, TorchEngine)]
    partitioned = [engine for engine in engines if isinstance(engine, DeepSpeedEngine)]
    assert len(plain) + len(partitioned) == len(engines)
    assert len(partitioned) <= 1, "each DeepSpeed step wants the whole norm before the next"
    for engine in engines:
        engine.loss_scale = loss_scale or 1.0
    if not (measure or clip or loss_scale):
        for engine in partitioned:
            engine.step(None)
        for plain_engine in plain:
            plain_engine.step(None, 0.0)
        return None
    counted = [engine.squared_norm() for engine in plain if counts(engine)]
    squared = torch.stack(counted).sum() if counted else None
    total: list[Tensor] = []

    def global_squared(own: Tensor | None, is_counted: bool) -> Tensor:
        parts = [x for x in (squared, own if is_counted else None) if x is not None]
        anything = own if own is not None else squared
        mine = torch.stack(parts).sum() if parts else torch.zeros_like(_given(anything, engines))
        total.append(mine if sum_over_job is None else sum_over_job(mine))
        return total[0]

    for engine in partitioned:
        engine.step(lambda own, e=engine: global_squared(own, counts(e)))  # type: ignore[misc]
    if not partitioned:
        global_squared(None, False)
    norm = total[0].sqrt() / (loss_scale or 1.0)
    skips = loss_scale is not None and not bool(norm.isfinite())
    for plain_engine in plain:
        plain_engine.step(norm, clip, skips)
    return norm


_CLIP_EPS = 1e-6  # that of torch's own clipping, and of DeepSpeed's


def _without_scale(gradient: Tensor, loss_scale: float) -> Tensor:
    return gradient if loss_scale == 1.0 else gradient / loss_scale


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _run_within(module: nn.Module, context: AbstractContextManager[Any]) -> None:
    """Run its forwards in `context`, from inside: DeepSpeed turns off an autocast around it."""

    def enter(*_: object) -> None:
        context.__enter__()

    def leave(*_: object) -> None:
        context.__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def _autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """What a forward runs in."""
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in halves:
        return nullcontext()
    return torch.autocast(device.type, dtype=halves[precision])


def _given(value: Tensor | None, engines: Iterable[Engine]) -> Tensor:
    if value is not None:
        return value
    device = next((p.device for e in engines for p in e.module.parameters()), torch.device("cpu"))
    return torch.zeros((), device=device)


def _set_learning_rate(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups if optimizer is not None else ():
        group["lr"] = lr


class MakeOptimizer(Protocol):
    def __call__(self, parameters: list[nn.Parameter], copies: Copies | None = None) -> Optimizer:
        """The optimizer of `parameters`, of which this rank has what `copies` says."""


def make_optimizer(name: str, options: dict[str, Any]) -> MakeOptimizer:
    """torch's optimizer of that name, or LAMB, as the plan's config would have it."""
    kinds: dict[str, Callable[..., Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }

    def make(parameters: list[nn.Parameter], copies: Copies | None = None) -> Optimizer:
        if name == "lamb":
            return Lamb(parameters, **options, shards=_shards(parameters, copies))
        return kinds[name](parameters, **options)

    return make


def _shards(parameters: list[nn.Parameter], copies: Copies | None) -> Shards | None:
    """Those of `parameters` this rank has a shard of (None: all are whole)."""
    if copies is None or copies.shard_group is None:
        return None
    group = copies.shard_group

    def add_up(vector: Tensor) -> Tensor:
        dist.all_reduce(vector, group=group)
        return vector

    return Shards([p for p in parameters if p in copies.sharded], add_up)


def import_deepspeed() -> Any:
    """DeepSpeed, without the shared-memory all-reduce it would compile (20 s of g++) and
    initialise at its first process group, whose only use is inference."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
