"""What a plan says of the copy that checkpoints written beside the steps take."""

import pytest
from tests.unit.operation_graphs import classifier
from tests.unit.plan_requests import mixed, shipped

from whale_train.config import CheckpointOptions
from whale_train.errors import Fault
from whale_train.launcher.planning.checkpoint_memory import explain_checkpoint_copies
from whale_train.quantities import in_bytes
from whale_train.strategies.memory.malloc_headroom import needed_bytes
from whale_train.strategies.plan.plan import Decision
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.resolve import resolve

MODEL = classifier(batch_norm=False)
TRAINING = Training(64, "fp32", 0.0, "adamw", {"lr": 1e-3})
PLAN = resolve(shipped("dp"), mixed(), MODEL, TRAINING)
STATE = 3 * 4 * sum(x.elements for x in MODEL.parameters) + MODEL.buffer_bytes


def said(memory: int | None = None, **options: object) -> tuple[list[Decision], list[Fault]]:
    faults: list[Fault] = []
    checkpoint = CheckpointOptions.model_validate({"every": 10, **options})
    return explain_checkpoint_copies(checkpoint, PLAN, MODEL, TRAINING, memory, faults), faults


def test_weights_and_two_moments_are_copied() -> None:
    (decision,), faults = said()
    assert decision.chosen == f"a copy of {in_bytes(STATE)} of state"
    assert faults == []


@pytest.mark.parametrize("options", [{"every": None}, {"async": False}])
def test_nothing_is_said_where_nothing_is_copied(options: dict[str, object]) -> None:
    assert said(memory=1, **options) == ([], [])


def test_a_copy_without_room_is_refused() -> None:
    enough = int(needed_bytes(PLAN, range(PLAN.world_size)) + STATE) + 1
    assert said(enough)[1] == []
    (fault,) = said(enough - 2)[1]
    assert fault.key == "checkpoint.async"
    assert fault.remedy == "use checkpoint.async=false, which writes it without a copy"
