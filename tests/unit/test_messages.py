"""Messages that are matched by order alone: the real Transport of every rank, and a machine of
communicators without tags that carry one message at a time (NCCL's).

The machine knows nothing of the schedule: each rank has a stream of computations and posts, and
each pair of ranks a communicator on which a send leaves when the post at the same place of the
other side is made, and all before it are done.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pairs import examples
from tests.unit.pipelines import Pipeline, regular, wide
from tests.unit.test_any_schedule import pipelines

from whale_train.runtime.base.value_type import ValueType
from whale_train.runtime.comms import p2p
from whale_train.runtime.pipeline.executor import receives_ahead
from whale_train.runtime.pipeline.route import PipelinePlace, Route
from whale_train.strategies.grammar.nodes import SCHEDULES
from whale_train.strategies.plan.program import PlannedCopy
from whale_train.strategies.schedule.instructions import COMPUTATIONS, SENDS, Instruction
from whale_train.strategies.schedule.messages import Message, message_of, messages_as_sent

_HELD = 5  # elements of a sample that every value has


@dataclass
class Rank:
    """What a rank does, in its order: a computation (None), a post (peer, sends, elements), or a
    wait for what a post receives (its number among those of the peer)."""

    events: list[tuple[str, Any]] = field(default_factory=list)
    posts: dict[int, list[tuple[str, int]]] = field(default_factory=lambda: defaultdict(list))


def record(pipeline: Pipeline, name: str, sizes: Sequence[int], widths: int = 1) -> list[Rank]:
    """What the ranks of a pipeline post, each position being a shard group of `widths`."""
    lists = pipeline.run(name)
    messages = messages_as_sent(lists, pipeline.durations, pipeline.transits)
    count = len(pipeline.positions)
    copy = PlannedCopy(
        positions=tuple(tuple(range(p * widths, (p + 1) * widths)) for p in range(count)),
        samples=tuple((0, size) for size in sizes),
        owners=pipeline.owners,
        durations=(),
        transits=(),
    )
    found = []
    for position, instructions in enumerate(lists):
        for index in range(widths):
            route = Route(PipelinePlace(0, position, index), copy, pipeline.edges, (), ())
            found.append(_posted(route, instructions, messages))
    return found


def _posted(route: Route, instructions: Sequence[Instruction], messages: Any) -> Rank:
    rank = Rank()

    class Work:
        def __init__(self, peer: int, place: int) -> None:
            self.peer, self.place = peer, place

        def wait(self) -> None:
            rank.events.append(("wait", (self.peer, self.place)))

        def is_completed(self) -> bool:
            return False

    def batch(operations: list[tuple[str, torch.Tensor, int]]) -> list[Work]:
        works = []
        for kind, tensor, peer in operations:
            rank.posts[peer].append((kind, tensor.numel()))
            rank.events.append(("post", peer))
            works.append(Work(peer, len(rank.posts[peer]) - 1))
        return works

    def types(message: Message) -> list[ValueType]:
        return [ValueType((route.num_samples(message.micro_batch), _HELD), torch.float32)]

    fake = SimpleNamespace(
        isend="send",
        irecv="receive",
        P2POp=lambda kind, tensor, peer, group, tag: (kind, tensor, peer),
        batch_isend_irecv=batch,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p, "dist", fake)
        transport = p2p.Transport(torch.device("meta"), {}, types)
        transport.begin(route.passages(messages))
        ahead = receives_ahead(instructions)
        for place, instruction in enumerate(instructions):
            for message in map(message_of, ahead[place]):
                transport.expect(message, route.source(message))
            if instruction.kind in COMPUTATIONS:
                rank.events.append(("compute", None))
                continue
            message = message_of(instruction)
            if instruction.kind in SENDS:
                values = [torch.empty(types(message)[0].shape, device="meta")]
                transport.send(message, values, route.targets(message))
            else:
                transport.receive(message, route.source(message))
        transport.finish()
    return rank


def carry(ranks: Sequence[Rank]) -> None:
    """Run to the end. Fails where two posts that meet do not match, and where nothing can go on."""
    places, posted = [0] * len(ranks), [defaultdict[int, int](int) for _ in ranks]
    done = defaultdict[tuple[int, int], int](int)  # of a pair, how many messages were carried

    def advance(number: int) -> bool:
        kind, what = ranks[number].events[places[number]]
        if kind == "wait":
            peer, place = what
            if done[_pair(number, peer)] <= place:
                return False
        elif kind == "post":
            posted[number][what] += 1
        places[number] += 1
        return True

    def meet() -> bool:
        met = False
        for number, rank in enumerate(ranks):
            for peer in rank.posts:
                pair = _pair(number, peer)
                while done[pair] < min(posted[number][peer], posted[peer][number]):
                    here, there = rank.posts[peer], ranks[peer].posts[number]
                    (one, size), (other, expected) = here[done[pair]], there[done[pair]]
                    assert {one, other} == {"send", "receive"}, (pair, done[pair])
                    assert size == expected, (pair, done[pair])
                    done[pair] += 1
                    met = True
        return met

    while any(place < len(rank.events) for place, rank in zip(places, ranks, strict=True)):
        moved = False
        for number, rank in enumerate(ranks):
            while places[number] < len(rank.events) and advance(number):
                moved = True
        assert meet() or moved, "deadlock"


def _pair(one: int, other: int) -> tuple[int, int]:
    return min(one, other), max(one, other)


def _lists_of_sizes() -> Iterator[tuple[str, int, list[int]]]:
    draw = random.Random(0)
    for _ in range(200):
        stages, count = draw.choice([2, 3, 4]), draw.choice([4, 6, 8])
        yield draw.choice(SCHEDULES), stages, [draw.choice([2, 3]) for _ in range(count)]


def test_unequal_micro_batches_arrive_in_order_without_tags() -> None:
    """200 lists of sizes: of what was, 112 put a value into another's buffer."""
    for name, stages, sizes in _lists_of_sizes():
        carry(record(regular(stages, len(sizes)), name, sizes))


@settings(max_examples=examples(150), deadline=None)
@given(pipelines(), st.sampled_from(SCHEDULES), st.integers(1, 2), st.data())
def test_every_schedule_is_carried_without_tags(
    pipeline: Pipeline, name: str, width: int, data: st.DataObject
) -> None:
    sizes = [data.draw(st.integers(1, 3)) for _ in range(pipeline.micro_batches)]
    carry(record(pipeline, name, sizes, width))


def test_receives_in_the_order_of_their_use_alone_would_meet_other_sends() -> None:
    """The machine tells: swapped posts of one rank, of unlike sizes, do not go unseen."""
    ranks = record(wide([1, 1], 4), "1f1b", [1, 2, 3, 4])
    first, second = ranks[1].posts[0][:2]
    ranks[1].posts[0][:2] = [second, first]
    with pytest.raises(AssertionError):
        carry(ranks)


def test_instructions_that_wait_for_each_other_are_refused() -> None:
    lists = [list(x) for x in regular(2, 1).run("1f1b")]
    lists[0].insert(0, lists[0].pop(-2))  # the gradient before what it is of
    with pytest.raises(ValueError, match="wait for each other"):
        messages_as_sent(lists)
