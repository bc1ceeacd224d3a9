"""When the stages of a pipeline are done at the earliest, whatever order their instructions have.

A stage begins when its first micro-batch has come forward through the stages before it, and when it
is done its last gradient goes back through these. All is by the samples of a copy of the pipeline,
as copies on unlike devices take unlike numbers of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from whale_train.strategies.cost import Times
from whale_train.strategies.segments import Line
from whale_train.strategies.step_tasks import PIECES

UNSUMMED = 1 - 1 / PIECES  # of a backward, the part in which it has gradients that are not summed


@dataclass(frozen=True)
class Affine:
    """Seconds by the samples of a copy: `offset` + `slope` x samples."""

    offset: float = 0.0
    slope: float = 0.0

    def scaled(self, factor: float) -> "Affine":
        return Affine(factor * self.offset, factor * self.slope)

    def of(self, pieces: int, count: float) -> "Affine":
        """Of `count` micro-batches, each one of the `pieces` of a copy's samples, by these."""
        return Affine(count * self.offset, count * self.slope / pieces)

    def __add__(self, other: "Affine") -> "Affine":
        return Affine(self.offset + other.offset, self.slope + other.slope)


@dataclass(frozen=True)
class StageTimes:
    """Of a micro-batch on a stage, by its samples: of all its chunks, of those without gradients of
    weights, their backward; and of its first chunk the forward, the backward, and that without
    gradients of weights."""

    whole: Affine
    without_weights: Affine
    backward: Affine
    first_forward: Affine
    first_backward: Affine
    first_inputs: Affine

    @classmethod
    def of(cls, chunks: Sequence[Line]) -> "StageTimes":
        first, whole = chunks[0], sum(chunks[1:], chunks[0])
        return cls(
            _affine(whole),
            _affine(whole, weights=False),
            _affine(whole, forward=False),
            _affine(first, backward=False),
            _affine(first, forward=False),
            _affine(first, forward=False, weights=False),
        )


@dataclass(frozen=True)
class Ends:
    """Formulas (of several the latest counts) of when a stage has computed all and its gradients
    have gone back through those before it; of when it is done itself; and of when the first
    gradients of its parameters may be summed."""

    computed: tuple[Affine, ...]
    done: tuple[Affine, ...]
    last_backward: tuple[Affine, ...]


def ends_of(
    stages: Sequence[tuple[StageTimes, Affine, int]], pieces: int, small: float, schedule: str
) -> list[Ends]:
    """Of stages with these times, what they send of a micro-batch to the next one, and in so many
    copies, which share the `pieces`. The smallest micro-batch has the part `small` of the mean of
    their samples. Where gradients of weights may wait so that others' do not (zero_bubble), what a
    stage waits for and what waits for it are the least that this allows."""
    forth = back = back_inputs = Affine()
    found = []
    for times, send, copies in stages:
        mine = pieces / copies
        each = max(mine, ceil(mine) * small)
        done = forth + times.whole.of(pieces, each)
        computed: tuple[Affine, ...] = (done + back,)
        if schedule == "zero_bubble":
            computed = (done, forth + times.without_weights.of(pieces, each) + back_inputs)
        last = times.backward.of(pieces, -UNSUMMED)
        found.append(Ends(computed, (done,), (done + last,)))
        sent = send.of(pieces, small)
        forth += times.first_forward.of(pieces, small) + sent
        back += times.first_backward.of(pieces, small) + sent
        back_inputs += times.first_inputs.of(pieces, small) + sent
    return found


def done_together_s(samples: int, copies: Sequence[float], ends: Sequence[Affine]) -> float:
    """When all are done, where so many `copies` with each of these ends share `samples` so that all
    are done at once, which is the earliest that the last can be."""
    speed = offset = 0.0
    for count, end in zip(copies, ends, strict=True):
        if end.slope > 0:
            speed += count / end.slope
            offset += count * end.offset / end.slope
    return (samples + offset) / speed if speed else 0.0


def _affine(
    line: Line, forward: bool = True, backward: bool = True, weights: bool = True
) -> Affine:
    """The parts named of a line: forward, and backward with gradients of weights or not."""

    def chosen(times: Times) -> float:
        found = times.forward if forward else 0.0
        found += times.backward_input if backward else 0.0
        return found + (times.backward_weight if backward and weights else 0.0)

    return Affine(chosen(line.fixed), chosen(line.each))
