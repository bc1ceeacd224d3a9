"""Repeat measurements that other users of the machine disturb.

When others use the cores, matrix products take two thirds longer for seconds or minutes, and
measurements from different times cannot be compared. Products on all cores before and after a
measurement show whether it was disturbed.
"""

import time
from collections.abc import Callable
from math import inf
from typing import TypeVar

import torch

from whale_train.runtime.calibrate.timing import undisturbed

SIZE, TIMES = 1024, 100  # extent and number of the timed products: about a second in total
SLOWER = 1.12  # a time above this multiple of the fastest time so far counts as disturbed
TRIES = 3  # the largest number of tries of a measurement
PAUSE_S = 2.0  # seconds between looks

T = TypeVar("T")


class Quiet:
    """A repeater of disturbed measurements.

    patience_s: the longest total time, in seconds, of waiting and repeating.
    repeated: number of repetitions so far.
    """

    def __init__(self, patience_s: float) -> None:
        self._left_s = patience_s
        self._factors = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
        self._least_s = inf
        self.repeated = 0
        self._undisturbed()

    def measure(self, measurement: Callable[[], T]) -> T:
        """Return the result of the first undisturbed measurement, or of the last one after `TRIES`
        tries."""
        for again in range(TRIES):
            while not self._undisturbed() and self._left_s > 0:
                time.sleep(PAUSE_S)
                self._left_s -= PAUSE_S
            began = time.monotonic()
            measured = measurement()
            if self._undisturbed() or self._left_s <= 0:
                break
            if again + 1 < TRIES:
                self.repeated += 1
                self._left_s -= time.monotonic() - began
        return measured

    def _undisturbed(self) -> bool:
        """Return whether products take about as long as the fastest ones so far."""
        times = []
        for _ in range(TIMES):
            began = time.perf_counter()
            torch.mm(*self._factors)
            times.append(time.perf_counter() - began)
        seconds = undisturbed(times)
        self._least_s = min(self._least_s, seconds)
        return seconds <= SLOWER * self._least_s
