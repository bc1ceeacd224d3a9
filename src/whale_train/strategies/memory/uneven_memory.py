"""Bytes of gradients and buffers under ZeRO in parts of unequal size (runtime/engines/uneven).

`engine_memory.py` owns the same for DeepSpeed, which partitions equally.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from whale_train.strategies.memory.engine_memory import ROUNDED_UP, Gradients, PeakMemory


@dataclass(frozen=True)
class UnevenGradients:
    """The gradients of a rank's weights, of which it owns a part, as our engine handles them.

    every: the gradients of all the rank's weights.
    fraction: the part of them that the rank sums and updates.
    sends_once: True if the last of several backwards sends all gradients of a step (ZeRO 1).
    """

    every: Gradients
    fraction: float
    sends_once: bool

    are_buckets = False
    summed = 0.0
    fits_a_bucket = False

    def worst(self, steps: Iterable[tuple[float, float, float]]) -> PeakMemory:
        """Return the moment of a step that needs the most bytes. `steps` are as in
        `Gradients.worst`."""
        needs = [
            self._meanwhile(come, added, activations * ROUNDED_UP)
            for come, added, activations in dict.fromkeys(steps)
        ]
        return max((*needs, self._updated()), key=lambda needed: needed.total)

    def _meanwhile(self, come: float, added: float, activations: float) -> PeakMemory:
        """Return the bytes at a moment of forward or backward. The arguments are as in `Gradients`.

        A bucket exists twice while it is put together. Under ZeRO 3 a bucket is a block, whose
        weights are gathered; below, the rank's own part is allocated with the first bucket.
        """
        if self.sends_once:
            bucket = min(come, 4.0 * self.every.bucket_elements)
            return PeakMemory(come + self._own(come), activations, added + 2 * bucket)
        last = self.every.just_made(come) if come else None
        made = last.gradients if last is not None else 0.0
        if self.every.zero == 3:
            moving = self.every.gathered_at(come) + made + added
            return PeakMemory(self.fraction * come, activations, moving)
        bucket = min(come, 4.0 * self.every.bucket_elements)
        return PeakMemory(self._own(come), activations, added + bucket + max(bucket, made))

    def _own(self, come: float) -> float:
        """Return the bytes of the gradients that the rank owns, once there are any."""
        return self.fraction * self.every.num_bytes if come else 0.0

    def _updated(self) -> PeakMemory:
        """Return the bytes at the optimizer's update, which works in place."""
        return PeakMemory(self.fraction * self.every.num_bytes, 0.0, 0.0)
