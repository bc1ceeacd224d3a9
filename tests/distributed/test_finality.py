"""A gradient is summed over its holders when it is final: not before, not twice, the same way
on all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
import torch
from tests.distributed.harness import run_ranks
from torch import Tensor, nn
from torch import distributed as dist

from whale_train.runtime.engines import grad_reduce as reduction
from whale_train.runtime.engines.grad_reduce import Reduction
from whale_train.runtime.kernels.weight_gradients import WeightGradients
from whale_train.runtime.pipeline.chunk import Chunk
from whale_train.runtime.pipeline.grad_ready import Finality
from whale_train.strategies.schedule.instructions import Kind, Position
from whale_train.strategies.schedule.orders import schedule

MICRO_BATCHES = 3


class Heard:
    """A reduction that notes what it is told, and the gradient there is at that time."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = set(parameters)
        self.seen: dict[nn.Parameter, Tensor] = {}

    def final(self, parameter: nn.Parameter) -> None:
        assert parameter not in self.seen
        assert parameter.grad is not None
        self.seen[parameter] = parameter.grad.clone()


@dataclass
class Engine:
    reduction: Heard | None


@dataclass
class FakeChunk:
    """Whose loss is the product of its parameters; the backward is one of autograd."""

    parameters: list[nn.Parameter]
    engines: tuple[Engine, ...]

    def loss(self, micro_batch: int) -> Tensor:
        return torch.stack(self.parameters).prod() * (micro_batch + 1.0)


def plus(known: Tensor | None, more: Tensor) -> Tensor:
    return more.clone() if known is None else known.add_(more)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zero_bubble"])
def test_final_once_and_with_all_of_it(name: str) -> None:
    p, q, tied, frozen, alone = (nn.Parameter(torch.tensor(x)) for x in (2.0, 3.0, 5.0, 11.0, 13.0))
    frozen.requires_grad_(False)
    heard = Heard([p, q, tied])
    engine, other = Engine(heard), Engine(None)
    chunks = {0: FakeChunk([p, tied, frozen], (engine,))}
    count = 4 if name == "interleaved_1f1b" else 2
    if count == 4:
        chunks[2] = FakeChunk([q, tied, alone], (engine, other))
    else:
        heard.parameters.remove(q)
    stages = [Position(tuple(range(s, count, 2))) for s in range(2)]
    owners = [[chunk % 2] * MICRO_BATCHES for chunk in range(count)]
    edges = {(chunk, chunk + 1): True for chunk in range(count - 1)}
    instructions = schedule(name, stages, owners, edges, MICRO_BATCHES)[0]
    finality = Finality(cast(dict[int, Chunk], chunks), instructions)
    deferred = WeightGradients()
    within = 0
    for at in instructions:
        key = (at.chunk, at.micro_batch)
        if at.kind is Kind.BACKWARD:
            with finality.during(at):
                before = len(heard.seen)
                chunks[at.chunk].loss(at.micro_batch).backward()  # type: ignore[no-untyped-call]
                within += len(heard.seen) - before
        elif at.kind is Kind.BACKWARD_INPUT:
            with deferred.deferring(key), finality.during(at):
                loss = chunks[at.chunk].loss(at.micro_batch)
                (gradient,) = torch.autograd.grad(loss, [p], retain_graph=True)
                deferred.take([(p, partial(plus, more=gradient))])
                loss.backward(inputs=[tied])  # type: ignore[no-untyped-call]
        elif at.kind is Kind.BACKWARD_WEIGHT:
            with finality.during(at, deferred.left(key)) as added:
                before = len(heard.seen)
                deferred.accumulate(key, added)
                within += len(heard.seen) - before
    assert set(heard.seen) == heard.parameters
    for parameter, gradient in heard.seen.items():
        assert gradient == parameter.grad
    # All while the last backward still ran, but for those known before a deferred part of it.
    assert within == (1 if name == "zero_bubble" else len(heard.parameters))


def test_deferred_gradients_keep_nothing_of_what_they_were_made_of() -> None:
    weight, x = nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    deferred = WeightGradients()
    for micro_batch in (0, 1):
        with deferred.deferring((0, micro_batch)):
            assert deferred.take([(weight, lambda known: plus(known, x * 2))])
        deferred.accumulate((0, micro_batch), lambda parameter: None)
    assert weight.grad is not None
    assert not weight.grad.requires_grad
    assert weight.grad.tolist() == [4.0] * 3


def reduced(told: Sequence[Sequence[int]], rounds: int) -> list[list[Any]]:
    """Gradients of five parameters of which 1 has none and 3 and 4 are shared, rank 1 giving 4
    none; what they are after each of `rounds` steps. Of those `told[rank]` a rank tells, in that
    order, that they are final."""
    rank = dist.get_rank()
    world = dist.group.WORLD
    assert world is not None
    reduction.REDUCE_BUCKET_ELEMENTS = 5
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (3,), (1,), (2,), (2,))]
    shared = dist.new_group([0, 1])
    assert isinstance(shared, dist.ProcessGroup)
    reducing = Reduction(
        parameters[:3], world, {parameters[3]: shared, parameters[4]: shared}, excess=2
    )
    found = []
    for step in range(rounds):
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, 10.0 * number + rank + 1 + step)
        parameters[1].grad = None
        if rank:
            parameters[4].grad = None
        for number in told[rank]:
            reducing.final(parameters[number])
        reducing.finish()
        reducing.wait()
        found.append([p.grad.unique().tolist() if p.grad is not None else p.grad
                      for p in parameters])  # fmt: skip
    return found


def test_ranks_whose_gradients_are_final_in_another_order_agree() -> None:
    of_ranks = run_ranks(reduced, 2, ((1, 2), (2, 0)), 2, deadline_s=30.0)
    for found in of_ranks:
        assert found == [
            [[3.0], None, [43.0], [31.5], [20.5]],  # 1 + 2; 21 + 22; (31 + 32) / 2; 41 / 2
            [[5.0], None, [45.0], [32.5], [21.0]],
        ]
