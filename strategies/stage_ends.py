"""When the stages of a pipeline are done at the earliest, whatever order their instructions have.

A stage begins when its first micro-batch has come forward through the stages before it; its last
gradient then goes back through these. In between it has all of its work to do, and of what it has
begun only so much may be on its way through the stages after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from whale_train.strategies.cost import Times


@dataclass(frozen=True)
class PieceTimes:
    """Seconds of a micro-batch on a stage: of all its chunks, and of these without gradients of
    weights; of its first chunk the forward, the backward, and that without gradients of weights."""

    whole: float
    inputs: float
    first_forward: float
    first_backward: float
    first_inputs: float

    @classmethod
    def of(cls, chunks: Sequence[Times]) -> "PieceTimes":
        """Of these chunks, in the order they run."""
        first, whole = chunks[0], sum(times.total for times in chunks)
        return cls(
            whole,
            whole - sum(times.backward_weight for times in chunks),
            first.forward,
            first.total - first.forward,
            first.backward_input,
        )


@dataclass(frozen=True)
class StageOf:
    """A stage of a pipeline: what a micro-batch of the `mean` size takes, and one of the smallest;
    its copies, which share the micro-batches; how many of these, times the chunks it holds, may be
    in flight in all copies. To send one to the next stage takes `send` at the least and `sends` in
    the mean; a copy's link is `sending` for so long, values on and gradients back. `linked`: the
    stage reads what the one before it has made."""

    mean: PieceTimes
    small: PieceTimes
    copies: int = 1
    in_flight: int = 1
    send: float = 0.0
    sends: float = 0.0
    sending: float = 0.0
    linked: bool = True


def ends_of(stages: Sequence[StageOf], pieces: int, schedule: str) -> list[float]:
    """When each of `stages` has computed all of `pieces` micro-batches. Where gradients of weights
    may wait so that others' do not (zero_bubble), what a stage waits for and what waits for it are
    the least that this allows."""
    defers = schedule == "zero_bubble"
    begin, done, handed_on, sent = 0.0, list[float](), list[float](), list[float]()
    for stage, passing in zip(stages, _rounds(stages, schedule), strict=True):
        begin = begin if stage.linked else 0.0
        passed = begin + passing * pieces / stage.in_flight
        whole, inputs = (
            begin + max(pieces / stage.copies * mean, ceil(pieces / stage.copies) * small)
            for mean, small in (
                (stage.mean.whole, stage.small.whole),
                (stage.mean.inputs, stage.small.inputs),
            )
        )
        done.append(max(whole, passed))
        handed_on.append(max(inputs if defers else whole, passed))
        begin += stage.small.first_forward
        sent.append(begin + stage.sending)
        begin += stage.send
    if len(stages) > 1 and stages[1].linked:  # what is sent last is still to come back
        handed_on[1] = max(handed_on[1], sent[0] + stages[1].small.first_forward)
    for number in reversed(range(len(stages) - 1)):
        small = stages[number].small
        if stages[number + 1].linked:
            back = small.first_inputs if defers else small.first_backward
            arrives = max(handed_on[number + 1] + stages[number].send, sent[number + 1]) + back
            handed_on[number] = max(handed_on[number], arrives)
            done[number] = max(done[number], arrives)
    return done


def _rounds(stages: Sequence[StageOf], schedule: str) -> list[float]:
    """Of each stage, the seconds from a micro-batch's forward there to the end of its backward
    (under zero_bubble but for gradients of weights); under interleaved_1f1b of both its chunks
    together, the first of which waits for the second chunks of all stages."""
    interleaved = schedule == "interleaved_1f1b"
    if interleaved and not all(stage.linked for stage in stages):
        return [0.0 for _ in stages]
    found, after, seconds = list[float](), 0.0, 0.0
    for number in reversed(range(len(stages))):
        stage, is_last = stages[number], number + 1 == len(stages)
        if not is_last and not stages[number + 1].linked:
            after = 0.0
        sent = 0.0 if is_last or not stages[number + 1].linked else 2 * stage.sends
        after += (stage.mean.inputs if schedule == "zero_bubble" else stage.mean.whole) + sent
        if interleaved:
            after += sent
            seconds += stage.mean.whole - stage.mean.first_forward - stage.mean.first_backward
            seconds += sent
        found.append(after)
    return [each + seconds for each in reversed(found)]


def done_together_s(samples: int, kinds: Sequence[tuple[float, float, float]]) -> float:
    """When all copies are done, where (count, offset, slope) of each kind, done after `offset` +
    `slope` x samples, share `samples` so that all are done at once, which is the earliest that the
    last can be."""
    speed = shifted = 0.0
    for count, offset, slope in kinds:
        if slope > 0:
            speed += count / slope
            shifted += count * offset / slope
    return (samples + shifted) / speed if speed else 0.0
