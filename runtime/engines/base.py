"""The engine of one TaskGraph on one rank: gradients reduced over its copies, then the update.

ZeRO 0 is torch's DistributedDataParallel and optimizer (`runtime/engines/ddp.py`), ZeRO 1 to 3 a
DeepSpeed engine (`runtime/engines/deepspeed.py`; docs/adr/003). Where they average gradients over
their copies, a loss is scaled by the number of copies first; `backward` hides that. Where a step
has several backwards, a gradient is summed over the copies once, when it is final
(`runtime/engines/grad_reduce.py`). The global gradient norm spans the engines of a job, so an
update is a matter of all of a rank's engines at once (`runtime/train/loop.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from whale_train.runtime.base.copies import Copies
from whale_train.runtime.engines.grad_reduce import Reduction


@dataclass(frozen=True)
class ParameterState:
    """What this rank has of a trained parameter, as the optimizer has it.

    `value` is what is updated (fp32 masters of 16-bit parameters), `slots` the optimizer's moments
    by its names for them, each of the shape of `value`. All are views: what is written to them is
    state. They are the whole local tensor, or, where copies partition that, the elements of it,
    flattened, from `start` on. `counter` has the number of updates under "step" (None where the
    optimizer counts none). `is_owner`: of the ranks that hold these elements, this is the one that
    saves them.
    """

    parameter: nn.Parameter
    value: Tensor
    slots: Mapping[str, Tensor]
    counter: dict[str, Any] | None
    start: int | None
    is_owner: bool


class Engine(Protocol):
    """What the training loop needs of an engine. `counts_norm` says whether this rank adds this
    engine's squared norm to the job's: a copied parameter is counted by one copy. `on_gradients`
    is called in every update, when the gradients are reduced and not yet clipped or used.
    `loss_scale` is what the gradients of the step were multiplied by (fp16; None: 1).
    `reduction` is what wants to be told of every gradient that is final (None: nothing does).
    `scale` is what its backward multiplies gradients by, those of other engines' parameters too.
    `holders` are the ranks that hold the same parameters. What `partitions` is a
    PartitionedEngine, all else a WholeEngine."""

    copies: int
    counts_norm: bool
    holders: Copies
    module: nn.Module
    partitions: bool
    on_gradients: Callable[[], None] | None
    loss_scale: Tensor | None

    @property
    def reduction(self) -> Reduction | None: ...

    @property
    def scale(self) -> int: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Accumulate gradients, given those of `outputs`; over the copies they are summed, by the
        time of the update. What it leaves in inputs' `.grad` may be scaled: see
        `input_gradient`."""

    def input_gradient(self, value: Tensor) -> Tensor | None:
        """Return the gradient `backward` left in an input of this engine (None: it left none)."""

    def accumulating(self) -> AbstractContextManager[Any]:
        """Around a forward and its backward that others of the step will follow: reduce later
        what can be."""

    def finish_backward(self) -> None:
        """Begin what a step's last backward left to reduce."""

    def set_learning_rate(self, lr: float) -> None: ...

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield every trained parameter with its gradient, summed over the copies, the loss scale
        taken out; for `on_gradients`. Of what copies partition, one copy gets the whole and the
        others None; all must ask."""

    def values(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield every trained parameter with its value as the optimizer has it, outside of an
        update; otherwise as `gradients`."""

    def states(self) -> Iterator[ParameterState]:
        """Yield what this rank has of every trained parameter, outside of an update; what no
        update has made yet is made, as the first would find it."""

    def constant(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        """Return what this rank has of a buffer or of a parameter that is not trained, as
        `ParameterState` has the value of one that is: the tensor and where it starts."""

    def computed_with(self) -> Iterator[nn.Parameter]:
        """Yield the trained parameters whose data, whole, the next forward reads and `states` does
        not have: to be read from a checkpoint as well."""

    def read_states(self) -> None:
        """Have the next forward see the values that were written to `states`."""


CLIP_EPS = 1e-6  # that of torch's own clipping, and of DeepSpeed's


class WholeEngine(Engine, Protocol):
    """An engine of copies kept whole."""

    def squared_norm(self) -> Tensor:
        """Return the squared norm of the gradients this rank counts among the shards of a copy, as
        a scalar in fp32."""

    def step(self, norm: Tensor | None, clip: float, found_inf: Tensor | None = None) -> None:
        """Update, clipping by `norm`, the global one without the loss scale; or, where the scalar
        `found_inf` is 1, forget the gradients."""


class PartitionedEngine(Engine, Protocol):
    """An engine of copies that partition what they have in common."""

    def step(self, global_norm: Callable[[Tensor], Tensor] | None, skips: bool = False) -> None:
        """Reduce and update, clipping by what `global_norm` makes of this engine's own squared
        norm; where that is not finite, the step changes nothing if it `skips`."""


def without_scale(gradient: Tensor, loss_scale: Tensor | None) -> Tensor:
    """Return a gradient as it is when the loss is not multiplied."""
    return gradient if loss_scale is None else gradient / loss_scale.to(gradient.device)


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set the learning rate of all groups of the optimizer, if there is one."""
    for group in optimizer.param_groups if optimizer is not None else ():
        group["lr"] = lr
