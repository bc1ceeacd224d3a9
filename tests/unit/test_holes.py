"""When there is no room for what malloc keeps of freed memory, and what a plan says then."""

import pytest
from tests.unit.operation_graphs import classifier
from tests.unit.plan_requests import mixed, shipped, training

from whale_train.quantities import in_bytes
from whale_train.strategies.memory.malloc_headroom import (
    HOLES,
    explain_fragmentation,
    has_room,
    needed_bytes,
)
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.resolver.resolve import resolve


@pytest.fixture(scope="module")
def plan() -> Plan:
    return resolve(shipped("dp"), mixed(), classifier(batch_norm=False), training(64))


def test_ranks_need_what_their_tensors_do_and_a_third_more(plan: Plan) -> None:
    needed = needed_bytes(plan, (0, 1))
    assert needed == sum(plan.ranks[rank].memory_bytes.total for rank in (0, 1)) > 0
    enough = int(needed * (1 + HOLES)) + 1
    assert has_room(plan, (0, 1), enough)
    assert not has_room(plan, (0, 1), enough - 2)
    assert not has_room(plan, range(plan.world_size), enough)


def test_a_plan_says_what_is_done_where_there_is_no_room(plan: Plan) -> None:
    needed = needed_bytes(plan, range(plan.world_size))
    assert explain_fragmentation(plan, int(2 * needed)) == ()
    (said,) = explain_fragmentation(plan, int(1.1 * needed))
    assert (said.key, said.chosen) == ("memory", "freed blocks given back")
    assert said.reason.startswith(
        f"ranks need {in_bytes(needed)} of {in_bytes(1.1 * needed)} they share, and what malloc "
        "keeps of freed blocks has been up to 35% more: blocks of 64 KiB and more go back"
    )
