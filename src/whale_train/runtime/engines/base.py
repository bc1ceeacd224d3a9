"""The engine of one TaskGraph on one rank: it reduces gradients over the copies and updates.

ZeRO 0 is torch's DistributedDataParallel and optimizer (`runtime/engines/ddp.py`), ZeRO 1 to 3 a
DeepSpeed engine (`runtime/engines/deepspeed.py`; docs/adr/003), or one of our own where copies keep
parts of unequal size (`runtime/engines/uneven`, docs/adr/095). An engine that averages gradients
over its copies first multiplies the loss by the number of copies; `backward` hides that. Where a
step has several backwards, a gradient is summed over the copies once, when it is final
(`runtime/engines/grad_reduce.py`). The global gradient norm spans the engines of a job, so an
update concerns all of a rank's engines at once (`runtime/train/optimizer_step.py`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from whale_train.optimizers.together import set_rate
from whale_train.runtime.base.copies import Copies
from whale_train.runtime.engines.grad_reduce import GradientSums


@dataclass(frozen=True)
class ParameterState:
    """The part of a trained parameter's optimizer state that this rank holds.

    All tensors are views, so writing to a tensor changes the state. A tensor is the whole local
    tensor, or, where copies partition it, a range of its flattened elements.

    parameter: the parameter.
    value: the values that updates change (the fp32 master of a 16-bit parameter).
    slots: the optimizer's moments by the optimizer's names, each of the shape of `value`.
    entries: the optimizer's own state dictionary of the parameter.
    apart: names of the entries that are numbers, or tensors other than moments.
    start: the index of the first flattened element; None for the whole local tensor.
    is_owner: whether this rank, of all that hold these elements, is the one that saves them.
    """

    parameter: nn.Parameter
    value: Tensor
    slots: Mapping[str, Tensor]
    entries: dict[str, Any]
    apart: Sequence[str]
    start: int | None
    is_owner: bool


class Engine(Protocol):
    """The interface of an engine to the training loop.

    copies: the number of ranks that hold the same shards.
    counts_norm: whether this rank adds this engine's squared norm to the job's. A copied parameter
        is counted by one copy.
    holders: the ranks that hold the same parameters.
    module: the module that the engine runs.
    partitions: True for a PartitionedEngine, False for a WholeEngine.
    on_gradients: called in every update, after the gradients are reduced and before they are
        clipped or used.
    loss_scale: the scalar that the step's gradients were multiplied by (fp16); None: 1.
    reduction: the sums to notify of every final gradient; None: nothing to notify.
    scale: the factor by which the backward multiplies gradients, those of other engines' parameters
        included.
    """

    copies: int
    counts_norm: bool
    holders: Copies
    module: nn.Module
    partitions: bool
    on_gradients: Callable[[], None] | None
    loss_scale: Tensor | None

    @property
    def reduction(self) -> GradientSums | None: ...

    @property
    def scale(self) -> int: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Accumulate the gradients of the parameters, given the gradients of `outputs`.

        `gradients` has one tensor for each of `outputs`. By the time of the update the parameters'
        gradients are summed over the copies. The gradients left in inputs' `.grad` may be scaled;
        `input_gradient` returns the true ones.
        """

    def input_gradient(self, value: Tensor) -> Tensor | None:
        """Return the gradient that `backward` left in `value`, an input of this engine, or None if
        there is no gradient."""

    def accumulating(self) -> AbstractContextManager[Any]:
        """Return the context for every forward and backward of a step but the last.

        Reductions that can wait are postponed inside the context.
        """

    def finish_backward(self) -> None:
        """Begin all reductions that have not begun yet, after the step's last backward."""

    def set_learning_rate(self, lr: float) -> None: ...

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield every trained parameter with its gradient, summed over the copies and without the
        loss scale.

        Call it in `on_gradients`. Where copies partition gradients, one copy gets the whole
        gradient and the others get None; all copies must iterate.
        """

    def values(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield every trained parameter with its value in the optimizer, outside of an update.

        Where copies partition values, one copy gets the whole value and the others get None; all
        copies must iterate.
        """

    def states(self) -> Iterator[ParameterState]:
        """Yield this rank's part of the optimizer state of every trained parameter, outside of an
        update.

        State that one of our optimizers would create in its first update is created, with the
        values that the update would start from. Other optimizers have no state before their first
        update.
        """

    def make_states(self, parameters: Collection[nn.Parameter]) -> None:
        """Create the state of `parameters` (trained ones) that does not exist yet, outside of an
        update.

        The caller then writes values to the state.
        """

    def constant(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        """Return this rank's part of a buffer or of a frozen parameter.

        The result is the tensor and the index of its first flattened element, or None for the whole
        local tensor, as in `ParameterState`.
        """

    def computed_with(self) -> Iterator[nn.Parameter]:
        """Yield the trained parameters whose data the next forward reads and `states` does not
        contain.

        A checkpoint has to be read into these parameters as well.
        """

    def read_states(self) -> None:
        """Make the next forward use the values that were written to `states`."""


CLIP_EPS = 1e-6  # as in torch's own clipping, and in DeepSpeed's


class WholeEngine(Engine, Protocol):
    """An engine whose copies hold whole parameters."""

    def squared_norm(self) -> Tensor:
        """Return the squared norm, an fp32 scalar, of the gradients that this rank counts among the
        shards of a copy."""

    def step(self, norm: Tensor | None, clip: float, found_inf: Tensor | None = None) -> None:
        """Clip the gradients and update the parameters, then drop the gradients.

        norm: the norm over all engines, without the loss scale; None: do not clip.
        clip: the norm to clip to; 0: do not clip.
        found_inf: a scalar; where it is 1, only drop the gradients.
        """


class PartitionedEngine(Engine, Protocol):
    """An engine whose copies partition optimizer states, gradients or parameters among them."""

    def step(self, global_norm: Callable[[Tensor], Tensor] | None, skips: bool = False) -> None:
        """Reduce the gradients, clip them and update the parameters.

        global_norm: maps this engine's squared norm to the squared norm over all engines, for
            clipping; None: this engine's own norm is used.
        skips: whether a step whose norm is not finite changes nothing.
        """


def without_scale(gradient: Tensor, loss_scale: Tensor | None) -> Tensor:
    """Return a gradient divided by the loss scale (None: 1)."""
    return gradient if loss_scale is None else gradient / loss_scale.to(gradient.device)


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set the learning rate of all parameter groups of `optimizer`; do nothing if it is None.

    A group that has an `lr_scale` gets `lr` times its `lr_scale`.
    """
    for group in optimizer.param_groups if optimizer is not None else ():
        set_rate(group, lr * group.get("lr_scale", 1.0))
