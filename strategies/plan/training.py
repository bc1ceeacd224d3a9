"""What the planner must know of the training itself, beside model, strategy and devices."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Training:
    """What the resolver must know of the training itself.

    `optimizer_options` are the keyword arguments of the optimizer of that name (`sgd`, `adam`,
    `adamw`, `lamb`); `grad_clip` 0 means off. `sync_batchnorm`: BatchNorm's statistics are those
    of the global batch. `accumulate` is in how many micro-batches a rank takes its share.
    `loss_over` and `samples_are_independent` are what the user says of the model's loss.
    `reduce_dtype` is what copies send gradients in, the precision or fp32.
    `adds_to_frozen`: what is trained are additions to frozen weights, of which a run keeps nothing.
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

    @property
    def sent_width(self) -> float:
        """The bytes of a gradient's element as it is sent between copies."""
        return 4.0 if self.reduce_dtype == "fp32" else 2.0

    @property
    def optimizer_states(self) -> int:
        """fp32 values kept per parameter between steps."""
        if self.optimizer == "sgd":
            return 1 if self.optimizer_options.get("momentum") else 0
        return 2
