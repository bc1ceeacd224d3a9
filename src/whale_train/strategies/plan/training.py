"""Describe the training as the planner needs it, besides model, strategy and devices."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from whale_train.strategies.plan.optimizer_classes import OptimizerClass

BUCKET_MB = 25.0  # MiB of fp32 gradients in a bucket, as DistributedDataParallel's


def bucket_elements(megabytes: float) -> int:
    """Return the number of fp32 gradients in a bucket of `megabytes` MiB, which is even:
    DeepSpeed's ZeRO 1 and 2 need that."""
    return max(2, 2 * round(megabytes * 2**17))


BUCKET_ELEMENTS = bucket_elements(BUCKET_MB)


@dataclass(frozen=True)
class GroupRule:
    """A user's rule for the optimizer's options of some parameters.

    match: patterns of the parameters' paths, or of modules that hold them; `*` stands for any text.
    weight_decay: their weight decay (None: the optimizer's).
    lr_scale: their learning rate, as a factor of the optimizer's.
    optimizer: the index of their optimizer in `Training.optimizers`.
    trust_ratio: True if LARS scales their updates by the trust ratio.
    """

    match: tuple[str, ...]
    weight_decay: float | None
    lr_scale: float
    optimizer: int = 0
    trust_ratio: bool = True


@dataclass(frozen=True)
class Training:
    """The training, as far as the resolver depends on it.

    global_batch: samples of a step.
    precision: precision of the computation.
    grad_clip: norm to which gradients are clipped (0: off).
    optimizer: name of the optimizer (`sgd`, `adam`, `adamw`, `lamb`, `lars`), or `custom` for one
        that is named by its class.
    optimizer_options: keyword arguments of the optimizer.
    sync_batchnorm: True if BatchNorm takes its statistics over the global batch.
    accumulate: number of micro-batches in which a rank takes its share.
    loss_over: the user's reduction of the loss over samples (None: not given).
    samples_are_independent: True if the user vouches that samples do not meet in the loss.
    adds_to_frozen: True if the trained parameters are additions to frozen weights, which a run does
        not save.
    reduce_dtype: dtype in which replicas send gradients, the precision or fp32.
    all_reduce: how replicas sum gradients over several hosts: `flat`, over all at once;
        `hierarchical`, inside each host first; or `auto`, whichever is faster.
    bucket_elements: number of gradients that replicas sum together.
    no_decay: True if norms and biases have no weight decay, and under LARS no trust ratio, unless a
        group contains them.
    groups: rules for groups of parameters; a parameter follows the first that matches it.
    optimizers: the optimizers that are named by their class, the first for parameters without a
        rule; empty where the optimizer is one of ours.
    widths: bytes of these optimizers' state per element of each parameter, by path.
    mean_width: bytes of their state per element, over all parameters.
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
    all_reduce: Literal["auto", "flat", "hierarchical"] = "auto"
    bucket_elements: int = BUCKET_ELEMENTS
    no_decay: bool = False
    groups: tuple[GroupRule, ...] = ()
    optimizers: tuple[OptimizerClass, ...] = ()
    widths: Mapping[str, float] = field(default_factory=dict)
    mean_width: float = 0.0

    @property
    def sent_width(self) -> float:
        """Return the bytes per element of a gradient as replicas send it."""
        return 4.0 if self.reduce_dtype == "fp32" else 2.0

    @property
    def optimizer_states(self) -> float:
        """Return the mean number of fp32 values that the optimizer keeps for each element of a
        parameter."""
        if self.optimizers:
            return self.mean_width / 4
        if self.optimizer in ("sgd", "lars"):
            return 1 if self.optimizer_options.get("momentum") else 0
        return 2

    def state_bytes(self, elements: Mapping[str, float]) -> float:
        """Return the bytes of the optimizer's state for parameters. `elements` are their elements,
        by path."""
        if self.optimizers:
            return sum(self.widths[path] * count for path, count in elements.items())
        return 4 * self.optimizer_states * sum(elements.values())

    @property
    def needs_norms(self) -> bool:
        """Return True if an update needs the norm of each whole parameter, by which our own LAMB
        and LARS scale it."""
        return self.optimizer in ("lamb", "lars")

    @property
    def unlike_in_parts(self) -> OptimizerClass | None:
        """Return the first optimizer that needs whole parameters, since its update is not
        elementwise; None where all updates are elementwise. LAMB and LARS, which are ours, are
        not among them."""
        return next((x for x in self.optimizers if x.unlike_in_parts), None)
