"""The engine of one TaskGraph on one rank: gradients reduced over its copies, then the update.

ZeRO 0 is torch's DistributedDataParallel and optimizer, ZeRO 1 to 3 a DeepSpeed engine
(docs/adr/003). Both average gradients over their copies, so a loss is scaled by the number of
copies first; `backward` hides that. The global gradient norm spans the engines of a job, so an
update is a matter of all of a rank's engines at once: `update`.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from whale_train.strategies.memory import REDUCE_BUCKET_ELEMENTS


class Engine(Protocol):
    """What the training loop needs of an engine. `counts_norm` says whether this rank adds this
    engine's squared norm to the job's: a copied parameter is counted by one copy."""

    copies: int
    counts_norm: bool
    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of `loss`, summed over the copies. What it leaves in inputs'
        `.grad` is `copies` times too large: see `input_gradient`."""

    def input_gradient(self, value: Tensor) -> Tensor:
        """The gradient `backward` left in an input of this engine."""

    def set_learning_rate(self, lr: float) -> None: ...


class TorchEngine:
    """Copies kept whole. `forward_context` is entered around every forward (autocast)."""

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        optimizer: Callable[[list[nn.Parameter]], Optimizer],
        precision: str,
        device: torch.device,
        may_skip_parameters: bool,
    ) -> None:
        self.module = module
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.copies = group.size() if group is not None else 1
        self.counts_norm = group is None or group.rank() == 0
        self._run: nn.Module = module
        if self.copies > 1 and self.parameters:
            self._run = DistributedDataParallel(
                module,
                process_group=group,
                device_ids=[device] if device.type == "cuda" else None,
                bucket_cap_mb=REDUCE_BUCKET_ELEMENTS * 4 / 2**20,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,  # BatchNorm's agree already, being global
                find_unused_parameters=may_skip_parameters,
                init_sync=False,  # the same seed made them everywhere
            )
        self.optimizer = optimizer(self.parameters) if self.parameters else None
        self._precision, self._device = precision, device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._context():
            return self._run(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss * self.copies)

    def input_gradient(self, value: Tensor) -> Tensor:
        assert value.grad is not None
        return value.grad / self.copies if self.copies > 1 else value.grad

    def set_learning_rate(self, lr: float) -> None:
        _set_learning_rate(self.optimizer, lr)

    def squared_norm(self) -> Tensor:
        """Of the gradients held, as a scalar in fp32."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if not gradients:
            return torch.zeros((), device=self._device)
        return _total_norm(gradients).float() ** 2

    def step(self, norm: Tensor | None, clip: float) -> None:
        if self.optimizer is None:
            return
        if clip and norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _context(self) -> AbstractContextManager[Any]:
        if self._precision == "fp32":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=torch.bfloat16)


class DeepSpeedEngine:
    """Copies that partition what they have in common: ZeRO 1 to 3, offload."""

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        config: dict[str, Any],
        device: torch.device,
    ) -> None:
        deepspeed = import_deepspeed()
        self.copies = group.size()
        self.counts_norm = group.rank() == 0
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=module,
            model_parameters=[p for p in module.parameters() if p.requires_grad],
            config=config,
            dist_init_required=False,
        )
        self.module = self._engine.module
        self._half = torch.bfloat16 if config["bf16"]["enabled"] else None
        self._device = device
        self._stage = config["zero_optimization"]["stage"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = tuple(self._cast(x) for x in args)
        return self._engine(*args, **{key: self._cast(x) for key, x in kwargs.items()})

    def backward(self, loss: Tensor) -> None:
        # Only a scalar through the engine's own backward is right at every stage: an
        # `output.backward(gradient)` is refused at 0, crashes at 2, and is silently wrong at 2
        # with offload.
        self._engine.backward(loss * self.copies)

    def input_gradient(self, value: Tensor) -> Tensor:
        assert value.grad is not None
        return value.grad / self.copies

    def set_learning_rate(self, lr: float) -> None:
        _set_learning_rate(self._optimizer, lr)

    def step(self, global_norm: Callable[[Tensor], Tensor] | None) -> None:
        """Reduce and update, clipping by what `global_norm` makes of this engine's own squared
        norm. DeepSpeed knows the norm only inside its step, and only its own engine's, so its
        norm function is wrapped for the time of the step."""
        if global_norm is None:
            self._engine.step()
            return
        name = "_get_norm_groups" if self._stage == 3 else "scaled_global_norm"
        own = getattr(self._optimizer, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            found = own(*args, **kwargs)
            parts = found if isinstance(found, list) else [found]
            squares = [
                torch.as_tensor(x, dtype=torch.float32, device=self._device) ** 2 for x in parts
            ]
            norm = global_norm(torch.stack(squares).sum()).sqrt()
            return [norm] if isinstance(found, list) else norm

        setattr(self._optimizer, name, wrapped)
        try:
            self._engine.step()
        finally:
            delattr(self._optimizer, name)

    def _cast(self, value: Any) -> Any:
        if self._half is not None and isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self._half)
        return value


def update(
    engines: Sequence[Engine],
    clip: float,
    measure: bool,
    sum_over_job: Callable[[Tensor], Tensor] | None,
) -> Tensor | None:
    """One optimizer step of all of a rank's engines; the global L2 norm of the gradients before
    clipping (None unless `measure` or `clip` asks for it).

    `sum_over_job` adds a scalar over all ranks whose engines hold different parameters; None where
    every rank's engines hold, among their copies, all there are.
    """

    def counts(engine: Engine) -> bool:
        return sum_over_job is None or engine.counts_norm

    plain = [engine for engine in engines if isinstance(engine, TorchEngine)]
    partitioned = [engine for engine in engines if isinstance(engine, DeepSpeedEngine)]
    assert len(plain) + len(partitioned) == len(engines)
    assert len(partitioned) <= 1, "each DeepSpeed step wants the whole norm before the next"
    if not (measure or clip):
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
    norm = total[0].sqrt()
    for plain_engine in plain:
        plain_engine.step(norm, clip)
    return norm


def _total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The L2 norm of all of them, in fp64 where any is large.

    On a CPU torch adds up a tensor's squares in a few fp32 numbers, and loses 4e-3 of the norm of
    5e7 elements (torch 2.13). In rows it loses 1e-8, and takes no longer.
    """
    large = [g for g in gradients if g.device.type == "cpu" and g.numel() > _NORM_ROW]
    if not large:
        return torch.nn.utils.get_total_norm(gradients)
    norms = [_norm_in_rows(gradient) for gradient in large]
    small = [g for g in gradients if g.numel() <= _NORM_ROW]
    if small:
        norms.append(torch.nn.utils.get_total_norm(small).double())
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


_NORM_ROW = 2**14


def _norm_in_rows(gradient: Tensor) -> Tensor:
    flat = gradient.flatten()
    in_rows = flat.numel() // _NORM_ROW * _NORM_ROW
    rows = torch.linalg.vector_norm(flat[:in_rows].view(-1, _NORM_ROW), dim=1)
    rest = torch.linalg.vector_norm(flat[in_rows:])
    norm: Tensor = torch.linalg.vector_norm(torch.cat([rows, rest[None]]), dtype=torch.float64)
    return norm


def _given(value: Tensor | None, engines: Iterable[Engine]) -> Tensor:
    if value is not None:
        return value
    device = next((p.device for e in engines for p in e.module.parameters()), torch.device("cpu"))
    return torch.zeros((), device=device)


def _set_learning_rate(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups if optimizer is not None else ():
        group["lr"] = lr


def make_optimizer(name: str, options: dict[str, Any]) -> Callable[[list[nn.Parameter]], Optimizer]:
    """torch's optimizer of that name, as the plan's config would have it."""
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    return lambda parameters: kind(parameters, **options)


def import_deepspeed() -> Any:
    """DeepSpeed, without the shared-memory all-reduce it would compile (20 s of g++) and
    initialise at its first process group, whose only use is inference."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
