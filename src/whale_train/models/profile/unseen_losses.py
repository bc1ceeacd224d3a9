"""Means over targets that a model computes where torch's function modes do not see them.

The runtime makes them means over the targets of the whole batch as they are called
(`models/batch_parts/target_means.py`). Calls past `torch.nn.functional`, such as those of a
function of TorchScript, show in the exported graph alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx
from torch.overrides import TorchFunctionMode

from whale_train.models.batch_parts.target_means import target_mean

_MEANS = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
_MEAN = 1  # torch's number of this reduction, the fourth argument of these operations


class SeenLosses(TorchFunctionMode):
    """Function mode that counts the means over targets that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self._count += target_mean(func, args, kwargs) is not None
        return func(*args, **kwargs)

    def unseen(self, graph: fx.Graph) -> fx.Node | None:
        """Return the last mean over targets of `graph` where it has more than were called.

        Return None where it has no more.
        """
        means = [node for node in graph.nodes if _is_mean(node)]
        return means[-1] if len(means) > self._count else None


def _is_mean(node: fx.Node) -> bool:
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    given = node.args[3] if len(node.args) > 3 else node.kwargs.get("reduction", _MEAN)
    return name in _MEANS and bool(given == _MEAN)
