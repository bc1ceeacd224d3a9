"""Detect when training with shared layers no longer pays off."""

from collections import deque

WINDOW, GAIN = 50, 0.01  # steps in a mean, and the smallest relative fall of a falling loss


class Plateau:
    """A detector of a loss that has stopped falling.

    The loss has stopped falling when its mean over the last `WINDOW` steps is above 1 - `GAIN`
    times its mean over the `WINDOW` steps before.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=2 * WINDOW)

    def add(self, loss: float) -> None:
        """Add the loss of the next step."""
        self._losses.append(loss)

    @property
    def reached(self) -> bool:
        """Return True once the loss has stopped falling; False before step 2 * `WINDOW`."""
        if len(self._losses) < 2 * WINDOW:
            return False
        losses = list(self._losses)
        return sum(losses[WINDOW:]) > (1.0 - GAIN) * sum(losses[:WINDOW])
