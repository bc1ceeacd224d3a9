"""The engine of copies that partition state in parts of unequal size (ZeRO 1 to 3).

DeepSpeed partitions equally. This engine serves where the plan gives devices with less memory a
smaller part (docs/adr/095). Its updates are those of one device, element by element: gradients
are summed in fp32, and 16-bit weights have an fp32 master.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

from whale_train.optimizers.together import Together
from whale_train.runtime.base.autocast import NARROW, in_precision
from whale_train.runtime.base.copies import Copies
from whale_train.runtime.engines.base import (
    CLIP_EPS,
    ParameterState,
    set_learning_rate,
    without_scale,
)
from whale_train.runtime.engines.grad_reduce import Reduction
from whale_train.runtime.engines.uneven.flat_unit import FlatUnit, Piece
from whale_train.runtime.engines.uneven.gathering import Gathering, blocks_by_parameter
from whale_train.runtime.engines.uneven.gradient_buckets import GradientBuckets, buckets_of
from whale_train.runtime.optim.cpu_norms import total_norm
from whale_train.runtime.optim.optimizers import MakeOptimizer, skipping, state_of

Own = Mapping[Tensor, dict[str, float]]  # the optimizer options of parameters that have their own


class MakeOfOwn(Protocol):
    """A function that makes the maker of an optimizer, given the parameters' own options."""

    def __call__(self, own: Own) -> MakeOptimizer: ...


class UnevenEngine:
    """The engine of copies that partition state in parts of unequal size.

    parts: the relative parts of the copies.
    zero: the ZeRO stage. 1 and 2 partition the optimizer's state and the summed gradients; 1 sums
        them once a step, 2 in every backward. 3 partitions the weights too, block by block.
    optimizer: makes the optimizer of this copy's pieces.
    own: the optimizer options of the parameters that have their own.
    clip: the norm to clip gradients to; 0: do not clip.
    precision: the precision of every forward; autocast if it has 16 bits.
    units: the partitioned weights.
    overlap: whether gradients are sent within backwards; otherwise after the last one of a step.
    compiled: modules of `module` that run compiled code, whose weights are gathered at once.
    gathers: called with a unit when it is made, gathered (True) or freed (False), under ZeRO 3;
        None: nothing is called.
    """

    loss_scale: Tensor | None = None
    reduction = None
    partitions = True

    def __init__(
        self,
        module: nn.Module,
        copies: Copies,
        parts: Sequence[int],
        zero: int,
        optimizer: MakeOfOwn,
        own: Own,
        clip: float,
        precision: str,
        device: torch.device,
        *,
        overlap: bool = True,
        compiled: Sequence[nn.Module] = (),
        gathers: Callable[[FlatUnit, bool], None] | None = None,
    ) -> None:
        assert copies.group is not None
        assert len(parts) == copies.size
        self.module, self.holders, self.copies = module, copies, copies.size
        self.counts_norm = copies.is_first and copies.index == 0
        self.on_gradients: Callable[[], None] | None = None
        # As DeepSpeed's and DistributedDataParallel's averages, this keeps fp16 gradients at the
        # magnitude that they would have on one device.
        self.scale = copies.size if precision == "fp16" else 1
        self._group, self._zero, self._clip = copies.group, zero, clip
        self._precision, self._device = precision, device
        self._is_last_backward = True
        self._shared = Reduction((), None, copies.shared, copies.shards * copies.size)
        # The gradients of weights that other stages hold too are summed over these first.
        self._overlaps = overlap and not copies.shared
        self._trained = [p for p in module.parameters() if p.requires_grad]
        by_block = _by_block(module, copies, zero, NARROW.get(precision), compiled)
        blocks: dict[str, list[FlatUnit]] = {}
        for (block, dtype, _), parameters in by_block.items():
            unit = FlatUnit(parameters, parts, copies.group, dtype, device, releases=zero == 3)
            blocks.setdefault(block, []).append(unit)
        self.units = [unit for units in blocks.values() for unit in units]
        self._unit_of = {p: unit for unit in self.units for p in unit.parameters}
        self._pieces = [piece for unit in self.units for piece in unit.pieces]
        self._gathering = Gathering(module, blocks, gathers) if zero == 3 else None
        buckets = buckets_of(self.units, None if zero == 3 else copies.bucket_elements)
        gathering = self._gathering
        self._sums = GradientBuckets(
            buckets,
            copies.reduce_dtype,
            self.scale,
            (lambda bucket: gathering.done(bucket.unit)) if gathering else lambda bucket: None,
        )
        of_pieces: dict[Tensor, dict[str, float]] = {
            x.value: own[x.parameter] for x in self._pieces if x.parameter in own
        }
        values = [piece.value for piece in self._pieces]
        self._optimizer: Optimizer | None = optimizer(of_pieces)(values) if values else None
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._made)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gathered = nullcontext() if self._gathering is None else self._gathering.forward()
        with in_precision(self._precision, self._device), gathered:
            return self.module(*args, **kwargs)

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Accumulate gradients times `scale`, and send them to their owners, under ZeRO 1 in the
        last backward of a step."""
        scaled = [x * self.scale for x in gradients] if self.scale > 1 else gradients
        gathered = nullcontext() if self._gathering is None else self._gathering.backward()
        with gathered:
            torch.autograd.backward(outputs, scaled)
            if self._sends:
                self._sums.end()

    def input_gradient(self, value: Tensor) -> Tensor | None:
        return None if value.grad is None else value.grad / self.scale

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Return the context of all backwards of a step but the last, in which ZeRO 1 keeps the
        gradients."""
        self._is_last_backward = False
        try:
            yield
        finally:
            self._is_last_backward = True

    def finish_backward(self) -> None:
        """Begin to sum the gradients of shared parameters."""
        self._shared.finish()

    @property
    def _sends(self) -> bool:
        """Return whether the backward in progress sends gradients to their owners."""
        return self._overlaps and (self._is_last_backward or self._zero > 1)

    def _made(self, parameter: nn.Parameter) -> None:
        if self._sends:
            self._sums.made(parameter)

    def set_learning_rate(self, lr: float) -> None:
        set_learning_rate(self._optimizer, lr)

    def step(self, global_norm: Callable[[Tensor], Tensor] | None, skips: bool = False) -> None:
        """Clip the gradients and update the parameters.

        global_norm: maps this engine's squared norm to the squared norm over all engines, for
            clipping; None: neither is needed.
        skips: whether a step whose norm is not finite changes nothing.
        """
        self._shared.wait()
        if not self._overlaps:
            self._sums.end()
        self._sums.wait()
        for unit in self.units:
            for piece in unit.pieces:
                if unit.gradient is not None:
                    piece.value.grad = unit.gradient[slice(*piece.at)]
        if self.on_gradients is not None:
            self.on_gradients()
        norm = None if global_norm is None else global_norm(self._squared_norm()).sqrt()
        found_inf = (~norm.isfinite()).float() if skips and norm is not None else None
        if self._optimizer is not None:
            with skipping(self._optimizer, found_inf) as steps:
                if steps:
                    self._scale_gradients(norm)
                    self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        for unit in self.units:
            unit.gradient = None
            if unit.is_trained:
                unit.publish()

    def _squared_norm(self) -> Tensor:
        """Return the squared norm of all copies' gradients, an fp32 scalar. A collective."""
        counted = (piece for piece in self._pieces if self.holders.counts(piece.parameter))
        gradients = [piece.value.grad for piece in counted if piece.value.grad is not None]
        squared = torch.zeros((), device=self._device)
        if gradients:
            squared = (total_norm(gradients).float() ** 2).to(self._device)
        dist.all_reduce(squared, group=self._group)
        if self.holders.shard_group is not None:
            dist.all_reduce(squared, group=self.holders.shard_group)
        return squared

    def _scale_gradients(self, norm: Tensor | None) -> None:
        """Divide the gradients by the loss scale and clip them, in one pass."""
        gradients = [x.value.grad for x in self._pieces if x.value.grad is not None]
        if norm is None or not gradients or not (self._clip or self.loss_scale is not None):
            return
        factor = torch.ones_like(norm)
        if self.loss_scale is not None:
            factor = self.loss_scale.reciprocal().to(norm.device)
            norm = norm * factor
        if self._clip:
            factor = factor * (self._clip / (norm + CLIP_EPS)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor)

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield every trained parameter with its summed gradient on the first copy, or None on the
        others."""
        for parameter, gradient in self._whole(lambda piece: piece.value.grad):
            scaled = None if gradient is None else without_scale(gradient, self.loss_scale)
            yield parameter, scaled

    def values(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield every trained parameter with its fp32 value on the first copy, or None on the
        others."""
        yield from self._whole(lambda piece: piece.value.detach())

    def _whole(
        self, of: Callable[[Piece], Tensor | None]
    ) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield every trained parameter with the tensor that is put together, on the first copy,
        of all copies' pieces."""
        pieces: dict[nn.Parameter, Piece] = {piece.parameter: piece for piece in self._pieces}
        for parameter in self._trained:
            full = torch.zeros(parameter.numel(), device=self._device)
            piece = pieces.get(parameter)
            held = None if piece is None else of(piece)
            if piece is not None and held is not None:
                full[piece.start : piece.start + held.numel()] = held
            dist.reduce(full, group=self._group, group_dst=0)
            yield parameter, full.view(parameter.shape) if self.holders.is_first else None

    def states(self) -> Iterator[ParameterState]:
        """Yield the state of this copy's pieces."""
        for piece in self._pieces:
            assert self._optimizer is not None
            state = state_of(self._optimizer, piece.value)
            is_owner = self.holders.counts(piece.parameter)
            of_optimizer = (state.moments, state.entries, state.apart)
            value = piece.value.detach()
            yield ParameterState(piece.parameter, value, *of_optimizer, piece.start, is_owner)

    def make_states(self, parameters: Collection[nn.Parameter]) -> None:
        """Create the state of this copy's pieces of `parameters` that does not exist yet."""
        if isinstance(self._optimizer, Together):
            asked = set(parameters)
            self._optimizer.make_states([x.value for x in self._pieces if x.parameter in asked])

    @property
    def optimizer_tensors(self) -> list[Tensor]:
        """Return the tensors of the optimizer's state."""
        states = () if self._optimizer is None else self._optimizer.state.values()
        return [x for state in states for x in state.values() if isinstance(x, Tensor)]

    def constant(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        """Return this rank's part of a buffer or of a frozen parameter, and the index of its first
        flattened element.

        Buffers are whole, and so are parameters below ZeRO 3; the index is then None.
        """
        if self._zero < 3 or not isinstance(tensor, nn.Parameter):
            return tensor.detach(), None
        held, start = self._unit_of[tensor].held_of(tensor)
        return held.detach(), start

    def computed_with(self) -> Iterator[nn.Parameter]:
        """Yield all trained parameters below ZeRO 3: copies hold their data whole beside the
        partitioned state."""
        if self._zero < 3:
            yield from self._trained

    def read_states(self) -> None:
        """Copy the values in `states` into the weights that this copy keeps under ZeRO 3."""
        for unit in self.units if self._zero == 3 else ():
            unit.shard.copy_(unit.master)


def _by_block(
    module: nn.Module,
    copies: Copies,
    zero: int,
    narrow: torch.dtype | None,
    compiled: Sequence[nn.Module],
) -> dict[tuple[str, torch.dtype, bool], list[nn.Parameter]]:
    """Return the parameters to lay end to end, by their block under ZeRO 3 (else ''), their dtype
    as held, and whether they are trained. Below ZeRO 3 frozen ones are left as they are."""
    units: dict[tuple[str, torch.dtype, bool], list[nn.Parameter]] = {}
    for parameter, block in blocks_by_parameter(module, compiled).items():
        if zero < 3 and not parameter.requires_grad:
            continue
        dtype = parameter.dtype
        if parameter in copies.narrow:
            assert narrow is not None
            dtype = narrow
        key = block if zero == 3 else "", dtype, parameter.requires_grad
        units.setdefault(key, []).append(parameter)
    return units
