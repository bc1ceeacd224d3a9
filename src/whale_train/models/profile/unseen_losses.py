"""Find means over targets that a model computes where torch's function modes do not see them.

The runtime intercepts such means and replaces each by a mean over the targets of the whole batch
(`models/batch_parts/target_means.py`). Calls that bypass `torch.nn.functional`, such as those of a
TorchScript function, appear only in the exported graph.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx
from torch.overrides import TorchFunctionMode

from whale_train.models.batch_parts.target_means import target_mean

_MEANS = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
_MEAN = 1  # torch's number of this reduction, the fourth argument of these operations


class SeenLosses(TorchFunctionMode):
    """Function mode that counts the means over targets that are called in it."""

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
        """Return the last mean over targets in `graph` where the graph has more of them than were
        called, else None."""
        means = [node for node in graph.nodes if _is_mean(node)]
        return means[-1] if len(means) > self._count else None


def _is_mean(node: fx.Node) -> bool:
    """Return whether a node computes a mean over targets."""
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    given = node.args[3] if len(node.args) > 3 else node.kwargs.get("reduction", _MEAN)
    return name in _MEANS and bool(given == _MEAN)
