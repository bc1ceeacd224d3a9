"""Bytes of gradients and buffers under ZeRO in parts of unequal size (runtime/engines/uneven).

`engine_memory.py` owns the same for DeepSpeed, which partitions equally.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from whale_train.strategies.memory.engine_memory import (
    ROUNDED_UP,
    GradientBucket,
    Gradients,
    PeakMemory,
)


@dataclass(frozen=True)
class UnevenGradients:
    """The gradients of a rank's weights, of which it owns a part, as our engine handles them.

    every: the gradients of all the rank's weights.
    fraction: the part of them that the rank sums and updates.
    kept: bytes of the values that a forward keeps for the backward, where blocks run their forward
        again; else infinite.
    sends_once: True if the last of several backwards sends all gradients of a step (ZeRO 1).
    """

    every: Gradients
    fraction: float
    kept: float
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

        A bucket exists twice while it is put together, and one is on its way while the next is
        filled. The rank's own part of the gradients is allocated when the first bucket arrives.
        """
        if self.every.zero == 3:
            return self._in_blocks(come, added, activations)
        bucket, total = self._bucket, self.every.num_bytes
        own = self.fraction * total
        if self.sends_once:
            several = total > bucket
            moving = added + (2 * bucket if several else 0.0)
            return PeakMemory(come + (own if several and come else 0.0), activations, moving)
        if come < min(bucket, total * _ALL):
            return PeakMemory(0.0, activations, added + come)
        moving = bucket + max(bucket, self._made_at(come).gradients)
        return PeakMemory(own if total > bucket else 0.0, activations, added + moving)

    def _in_blocks(self, come: float, added: float, activations: float) -> PeakMemory:
        """Return the bytes at a moment under ZeRO 3, which gathers one block at a time.

        In the backward of a block, the gradients of the block after it are on their way. At its
        end, when nothing that ran again is left, its own are put together.
        """
        every, own = self.every, self.fraction * come
        if not every.made:  # the order of gradients is not known
            return PeakMemory(own, activations, added + 2 * every.gathered)
        if not come:
            weights = max(block.weights for block in every.made)
            return PeakMemory(own, activations, added + weights)
        place = every.place_of(come)
        block = self._made_at(come)
        last = every.made[place - 1] if place else GradientBucket(0.0, 0.0)
        begin = every.come_after[place - 1] if place else 0.0
        is_end = come >= (begin + block.gradients) * _ALL
        if is_end:
            begin, last = come, block
            block = every.made[min(place + 1, len(every.made) - 1)]
        within = block.weights + (come - begin) + last.gradients
        moments = [PeakMemory(own, activations, added + within)]
        if is_end or come - begin < block.gradients / 2:  # at or shortly after the end of `last`
            at_end = last.weights + 2 * last.gradients
            moments.append(PeakMemory(own, min(activations, self.kept), added + at_end))
        return max(moments, key=lambda needed: needed.total)

    def _made_at(self, come: float) -> GradientBucket:
        """Return the gradients that are made together with the last of `come` bytes."""
        place = self.every.place_of(come)
        return self.every.made[place] if place < len(self.every.made) else GradientBucket(0.0, 0.0)

    @property
    def _bucket(self) -> float:
        """Return the bytes of a bucket of gradients."""
        return 4.0 * min(self.every.elements, self.every.bucket_elements)

    def _updated(self) -> PeakMemory:
        """Return the bytes when the last gradients arrive. The update itself works in place."""
        last = self._bucket
        if self.every.zero == 3:
            last = self.every.made[-1].gradients if self.every.made else 0.0
        elif self.sends_once and self.every.num_bytes <= last:
            last *= 2
        return PeakMemory(self.fraction * self.every.num_bytes, 0.0, last)


_ALL = 1 - 1e-9  # of bytes that may be added up in another order
