"""When training with shared layers has come to where it stops being worth it."""

from collections import deque

WINDOW, GAIN = 50, 0.01  # steps whose mean losses are compared, and by what part they fall at least


class Plateau:
    """Whether a loss has stopped falling: its mean over the last `WINDOW` steps is above 1 - `GAIN`
    times that over as many before."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=2 * WINDOW)

    def add(self, loss: float) -> None:
        self._losses.append(loss)

    @property
    def reached(self) -> bool:
        if len(self._losses) < 2 * WINDOW:
            return False
        losses = list(self._losses)
        return sum(losses[WINDOW:]) > (1.0 - GAIN) * sum(losses[:WINDOW])
