"""Describe what the planner must know of the training, beside model, strategy and devices."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from whale_train.strategies.plan.optimizer_classes import OptimizerClass


@dataclass(frozen=True)
class GroupRule:
    """A user's rule for the optimizer's options of some parameters.

    match: patterns of the parameters' paths, or of modules that hold them, in which `*` stands for
        any text.
    weight_decay: their weight decay (None: the optimizer's).
    lr_scale: their learning rate, as a part of the optimizer's.
    optimizer: the index of their optimizer among `Training.optimizers`.
    """

    match: tuple[str, ...]
    weight_decay: float | None
    lr_scale: float
    optimizer: int = 0


@dataclass(frozen=True)
class Training:
    """What the resolver must know of the training itself.

    global_batch: samples of a step.
    precision: precision of the computation.
    grad_clip: norm that gradients are clipped to (0: off).
    optimizer: name of the optimizer (`sgd`, `adam`, `adamw`, `lamb`), or `custom` for one that is
        named by its class.
    optimizer_options: keyword arguments of the optimizer.
    sync_batchnorm: whether BatchNorm's statistics are those of the global batch.
    accumulate: number of micro-batches in which a rank takes its share.
    loss_over: what the user says that the loss is over samples (None: nothing is said).
    samples_are_independent: whether the user says that samples do not meet in the loss.
    adds_to_frozen: whether what is trained are additions to frozen weights, of which a run keeps
        nothing.
    reduce_dtype: dtype in which copies send gradients, the precision or fp32.
    no_decay: whether norms and biases have no weight decay, where no group is theirs.
    groups: rules for groups of parameters, of which a parameter follows the first that matches it.
    optimizers: the optimizers that are named by their class, that of parameters without a rule
        first; empty where the optimizer is one of ours.
    widths: bytes of these optimizers' state for an element of each parameter, by path.
    mean_width: bytes of their state for an element, over all parameters.
    """

    global_batch: int
    precision: str
    grad_clip: float
    optimizer: str
    optimizer_options: dict[str, Any]
    sync_batchnorm: bool = True
    accumulate: int = 1
    loss_over: Literal["mean", "sum"] | None = None
    samples_are_independent: bool = False
    adds_to_frozen: bool = False
    reduce_dtype: str = "fp32"
    no_decay: bool = False
    groups: tuple[GroupRule, ...] = ()
    optimizers: tuple[OptimizerClass, ...] = ()
    widths: Mapping[str, float] = field(default_factory=dict)
    mean_width: float = 0.0

    @property
    def sent_width(self) -> float:
        """Return the bytes of a gradient's element as it is sent between copies."""
        return 4.0 if self.reduce_dtype == "fp32" else 2.0

    @property
    def optimizer_states(self) -> float:
        """Return the number of fp32 values that the optimizer keeps for each element of a parameter
        between steps, on average."""
        if self.optimizers:
            return self.mean_width / 4
        if self.optimizer == "sgd":
            return 1 if self.optimizer_options.get("momentum") else 0
        return 2

    def state_bytes(self, elements: Mapping[str, float]) -> float:
        """Return the bytes of the optimizer's state for `elements` of parameters, by path."""
        if self.optimizers:
            return sum(self.widths[path] * count for path, count in elements.items())
        return 4 * self.optimizer_states * sum(elements.values())

    @property
    def unlike_in_parts(self) -> OptimizerClass | None:
        """Return the first optimizer that updates a part of a parameter otherwise than within the
        whole, or None where all update elements alone. LAMB, which is ours, is not among them."""
        return next((x for x in self.optimizers if x.unlike_in_parts), None)
