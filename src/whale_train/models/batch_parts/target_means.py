"""Intercept losses that are means over their targets, where a model calls torch for them.

A part of a batch computes its term of such a mean as a sum times a factor (`scaled`). Activation
checkpointing recomputes parts of a forward in the backward, where no factor is known.
`RecomputedLosses` gives losses that are recomputed the factors of their first call.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_PLAIN = ("weight", "size_average", "ignore_index", "reduce", "reduction")
# Losses that are means over targets, and the names of their arguments after logits and targets.
_LOSSES: dict[Callable[..., Any], tuple[str, ...]] = {
    functional.cross_entropy: (*_PLAIN, "label_smoothing"),
    functional.nll_loss: _PLAIN,
}


@dataclass(frozen=True)
class TargetMean:
    """Call of a loss that takes the mean over its targets.

    function: the loss, of torch.nn.functional.
    logits: [batch, classes, ...], or [classes] for one sample.
    target: class indices, in the shape of the logits without the classes; or probabilities, in the
        shape of the logits.
    options: all other arguments of the call, by name.
    """

    function: Callable[..., Any]
    logits: Tensor
    target: Tensor
    options: dict[str, Any]

    @property
    def counted(self) -> Tensor:
        """Return a mask of the targets that are not ignored.

        It is bool, in the shape of the logits without the classes. With probabilities as targets,
        every place counts.
        """
        if self.target.is_floating_point():
            return torch.ones_like(self.target.select(self._class_dim, 0), dtype=torch.bool)
        ignored: int = self.options.get("ignore_index", -100)
        return torch.ne(self.target, ignored)

    @property
    def _class_dim(self) -> int:
        return min(self.logits.dim() - 1, 1)

    def divisor(self) -> Tensor:
        """Return the divisor of torch's mean, an fp64 scalar.

        It is the number of targets that count, or with class weights the sum of their weights.
        Targets that are probabilities are counted without weights.
        """
        weight = self.options.get("weight")
        if weight is None or self.target.is_floating_point():
            return self.counted.sum(dtype=torch.float64)
        weights: Tensor = weight[self.target.clamp(0, len(weight) - 1)]
        return (weights * self.counted).sum(dtype=torch.float64)

    def sum(self) -> Tensor:
        """Return the sum of the loss over the targets, a scalar.

        Half-precision logits give fp32, because the sum's later factor contains a count.
        """
        logits = self.logits.to(torch.promote_types(self.logits.dtype, torch.float32))
        options = {**self.options, "reduction": "sum"}
        total: Tensor = self.function(logits, self.target, **options)
        return total

    def answers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the predicted classes, the target classes, and the mask of targets that count.

        All three have the shape of the logits without the classes. A prediction is the class of the
        largest logit. The target class of probabilities is the most probable one.
        """
        target = self.target
        if target.is_floating_point():
            target = target.argmax(self._class_dim)
        return self.logits.argmax(self._class_dim), target, self.counted

    def probability(self, predicted: Tensor) -> Tensor:
        """Return the probability of the `predicted` classes, fp32 in their shape."""
        return probability(self.logits, predicted, self._class_dim)


def probability(logits: Tensor, classes: Tensor, dim: int) -> Tensor:
    """Return the softmax probability of `classes`, fp32 in their shape.

    logits: logits, or log probabilities.
    dim: the dimension of the classes in `logits`.
    """
    wide = logits.float()
    chosen = wide.gather(dim, classes.unsqueeze(dim)).squeeze(dim)
    return (chosen - wide.logsumexp(dim)).exp()


def target_mean(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> TargetMean | None:
    """Return the call as a TargetMean where it is the mean of a known loss, else None.

    A call inside a transform of `torch.func`, such as `vmap`, does not count: its rows are not the
    samples of a batch.
    """
    names = _LOSSES.get(function)
    if names is None:
        return None
    options = {**dict(zip(("input", "target", *names), args, strict=False)), **kwargs}
    logits, target = options.pop("input"), options.pop("target")
    if is_functorch_wrapped_tensor(logits) or is_functorch_wrapped_tensor(target):
        return None
    legacy = (options.pop("size_average", None), options.pop("reduce", None))
    reduction = options.get("reduction", "mean")
    if legacy != (None, None):  # torch's deprecated pair, which overrules `reduction`
        reduction = "other" if False in legacy else "mean"
    return TargetMean(function, logits, target, options) if reduction == "mean" else None


def scaled(call: TargetMean, total: Tensor, factor: Tensor) -> Tensor:
    """Return `total` times `factor`, in the dtype that the call itself would return.

    `total` is the sum over the call's targets. Autocast computes these losses in fp32 and returns
    fp32.
    """
    # torch cannot tell whether autocast is on for meta tensors (runtime/base/autocast.py).
    widened = total.is_meta or torch.is_autocast_enabled(total.device.type)
    dtype = total.dtype if widened else call.logits.dtype
    return (total * factor.to(total.dtype)).to(dtype)


class RecomputedLosses:
    """Losses that a forward calls in checkpointed functions, with the factors of their sums."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, Tensor, Tensor]] = []

    def note(self, call: TargetMean, total: Tensor, factor: Tensor) -> None:
        """Record a call, if it is made inside a checkpointed function.

        Inside of such a function, torch's hooks for saved tensors are set, or gradients are off.
        """
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None or not torch.is_grad_enabled():
            self._made.append((call.target.detach(), total.detach(), factor))

    def factor(self, call: TargetMean, total: Tensor) -> Tensor:
        """Return the factor of the recorded call with the same targets and the sum nearest to
        `total`.

        Raises RuntimeError where no recorded call has these targets.
        """
        same = [(before, x) for target, before, x in self._made if _equal(target, call.target)]
        if not same:
            raise RuntimeError("a loss that the backward computes again has other targets there")
        return min(same, key=lambda made: float((made[0] - total.detach()).abs()))[1]

    def in_backward(self) -> AbstractContextManager[Any]:
        """Return the context for a backward that recomputes parts of the forward."""
        return _Replay(self) if self._made else nullcontext()


def run_backward(output: Tensor, gradient: Tensor) -> None:
    """Accumulate gradients of `output` like torch.autograd.backward, inside of function modes.

    torch.autograd.backward disables torch's function modes while it runs. Here, the parts of a
    forward that checkpointing recomputes run inside of them. `gradient` is the gradient of
    `output`.
    """
    _backward(output, gradient)


def _backward(
    tensors: Tensor | Sequence[Tensor],
    grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    **named: Any,
) -> None:
    """Accumulate gradients, given the arguments of torch.autograd.backward or Tensor.backward."""
    outputs = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    given = named.get("gradient", grad_tensors)
    gradients = (given,) * len(outputs) if given is None or isinstance(given, Tensor) else given
    torch.autograd.graph._engine_run_backward(
        outputs,
        tuple(
            torch.ones_like(x) if g is None else g for x, g in zip(outputs, gradients, strict=True)
        ),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        tuple(named.get("inputs") or ()),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


class _Replay(TorchFunctionMode):
    """Function mode that gives losses of a recomputed forward the factors of their first call."""

    def __init__(self, made: RecomputedLosses) -> None:
        super().__init__()
        self._made = made

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.autograd.backward, Tensor.backward):
            with self:
                return _backward(*args, **kwargs)
        call = target_mean(func, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        # It is computed as in the forward, because checkpointing counts the saved tensors.
        total = call.sum()
        return scaled(call, total, self._made.factor(call, total))
