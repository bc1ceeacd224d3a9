"""Disable dropout from outside, so that a model's results can be compared."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from whale_train.models.seeded_draws import OwnSeed


class DropoutOff(TorchFunctionMode):
    """Function mode in which torch's dropouts pass everything through.

    It holds for any module or exported graph that calls them. `met` is True once a call would have
    dropped something. With `keeps_seeded`, a dropout whose mask the forward itself seeds stays
    active, because the mask is part of what the model computes.

    Modules stay in training mode, unlike under `eval()`: BatchNorm works as in a run.
    """

    _entered = 0  # in all threads: a backward on a GPU recomputes parts of a forward in others

    def __init__(self, *, keeps_seeded: bool = False) -> None:
        super().__init__()
        self.met, self._keeps_seeded = False, keeps_seeded

    def __enter__(self) -> Self:
        DropoutOff._entered += 1
        self._seed = OwnSeed()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        DropoutOff._entered -= 1
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func in _BACKWARDS:
            return self._backward(*args, **options)
        stays = self._keeps_seeded and self._seed.is_seeded({})
        if stays or not drops(func, args, options):
            return func(*args, **options)
        self.met = True
        name = _name(func)
        if name in _RECURRENT:
            args = tuple(0.0 if isinstance(x, float) else x for x in args)
            return func(*args, **options)
        position, key, off = _OFF[name]
        if len(args) > position:
            args = (*args[:position], off, *args[position + 1 :])
        else:
            options[key] = off
        return func(*args, **options)

    def _backward(
        self,
        tensors: Tensor | Sequence[Tensor],
        grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        **options: Any,
    ) -> None:
        """Run a backward inside this mode.

        A backward may compute forwards again, whose dropouts must be off as well. torch leaves a
        mode while it handles a call, and its backward is such a call since 2.13: the engine is
        called in its place.
        """
        outputs = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        given = options.pop("gradient", grad_tensors)
        gradients = (given,) * len(outputs) if given is None or isinstance(given, Tensor) else given
        seeds = tuple(
            torch.ones_like(x) if seed is None and x.requires_grad else seed
            for x, seed in zip(outputs, gradients, strict=True)
        )
        inputs = options.pop("inputs", None)
        inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs or ())
        engine = torch.autograd.Variable._execution_engine
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            engine.run_backward(
                *(outputs, seeds, create_graph if retain_graph is None else retain_graph),
                *(create_graph, inputs),
                allow_unreachable=True,
                accumulate_grad=True,
            )
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]


def is_dropout_off() -> bool:
    """Return whether a `DropoutOff` is active in any thread."""
    return DropoutOff._entered > 0


def drops(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether a call of a torch function, or of an operation in a graph, drops something."""
    name = _name(func)
    if name in _RECURRENT:  # their only float is the dropout
        return any(isinstance(x, float) and x for x in args)
    if name not in _OFF:
        return False
    position, key, off = _OFF[name]
    default = 0.5 if key == "p" else off
    return bool(args[position] if len(args) > position else options.get(key, default))


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", "")).partition(".")[0]  # dropout.default in a graph


# Position and name of the argument for the dropout's probability or mode, and the value for off.
_OFF: dict[str, tuple[int, str, Any]] = {
    **{
        f"{kind}{in_place}": (1, "p", 0.0)
        for kind in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
        for in_place in ("", "_")
    },
    **{f"dropout{dims}d": (1, "p", 0.0) for dims in (1, 2, 3)},
    "scaled_dot_product_attention": (4, "dropout_p", 0.0),
    "multi_head_attention_forward": (10, "dropout_p", 0.0),
    "rrelu": (3, "training", False),
}
_BACKWARDS = (Tensor.backward, torch.autograd.backward)
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
