"""Dropout turned off from outside, so that what a model computes can be compared."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode


class DropoutOff(TorchFunctionMode):
    """Inside it, torch's dropouts let everything through, whatever module or exported graph
    calls them. `met` says whether one would have dropped something.

    Modules stay in training mode, unlike under `eval()`: BatchNorm trains as it does in a run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.met = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "").partition(".")[0]  # dropout.default in a graph
        if name in _RECURRENT:  # their one float
            found = any(isinstance(x, float) and x for x in args)
            args = tuple(0.0 if isinstance(x, float) else x for x in args)
            self.met = self.met or found
        elif name in _OFF:
            position, key, off = _OFF[name]
            given = args[position] if len(args) > position else options.get(key, off)
            self.met = self.met or bool(given)
            if len(args) > position:
                args = (*args[:position], off, *args[position + 1 :])
            elif key in options or key == "p":  # whose default is 0.5
                options[key] = off
        return func(*args, **options)


# The argument that says how much is dropped (or whether), and what turns it off.
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
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
