"""Recognise losses that compare a model's values with target values, and derive predictions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

_REGRESSIONS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_LOGITS, _PROBABILITIES = "binary_cross_entropy_with_logits", "binary_cross_entropy"
_NAMES = (*_REGRESSIONS, _LOGITS, _PROBABILITIES)
_FUNCTIONS: dict[Any, str] = {getattr(functional, name): name for name in _NAMES}


@dataclass(frozen=True)
class ValueLoss:
    """A loss that compares values.

    name: the name of the loss in torch.nn.functional.
    """

    name: str

    @classmethod
    def of_function(cls, function: Callable[..., Any]) -> "ValueLoss | None":
        """Return the value loss that a torch function computes, or None."""
        name = _FUNCTIONS.get(function)
        return None if name is None else cls(name)

    @classmethod
    def of_operation(cls, target: object) -> "ValueLoss | None":
        """Return the value loss that the target of a graph's node computes, or None."""
        name = str(target).removeprefix("aten.").partition(".")[0]
        return cls(name) if name in _NAMES else None

    def predicted(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the prediction that follows from the loss's input `values`, and its probability.

        A regression predicts the values themselves, without a probability. A binary cross-entropy
        predicts 1 where a label has a probability above 0.5, else 0, with the probability of 1,
        fp32. Both results have the shape of `values`.
        """
        if self.name in _REGRESSIONS:
            return values.float(), None
        sure = values.float().sigmoid() if self.name == _LOGITS else values.float()
        return (sure > 0.5).long(), sure


def loss_operands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the model's values and the targets in a call of a loss."""
    values = args[0] if args else kwargs["input"]
    target = args[1] if len(args) > 1 else kwargs["target"]
    return values, target
