"""The learning rates of a run, against torch's schedulers and the formulas of papers."""

from math import sqrt
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from whale_train.optimizer_options import OptimizerOptions
from whale_train.runtime.optim.lr_schedule import learning_rate

STEPS = 12


def rates(**options: Any) -> list[float]:
    read = OptimizerOptions(name="sgd", lr=0.5, **options)
    return [learning_rate(read, step, STEPS) for step in range(STEPS)]


def of_torch(make: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    schedule, taken = make(optimizer), []
    for _ in range(STEPS):
        taken.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return taken


def test_a_line_and_half_a_cosine_end_at_the_last_step() -> None:
    line = of_torch(lambda x: lr_scheduler.LinearLR(x, 1.0, 0.1, STEPS - 1))
    assert rates(schedule="linear", final_lr_fraction=0.1) == pytest.approx(line)
    cosine = of_torch(lambda x: lr_scheduler.CosineAnnealingLR(x, STEPS - 1, 0.05))
    assert rates(schedule="cosine", final_lr_fraction=0.1) == pytest.approx(cosine)


@pytest.mark.parametrize("power", [2.0, 3.0])
def test_a_polynomial_ends_at_the_last_step(power: float) -> None:
    wanted = of_torch(lambda x: lr_scheduler.PolynomialLR(x, STEPS - 1, power))
    assert rates(schedule="polynomial", power=power) == pytest.approx(wanted)
    warm = rates(schedule="polynomial", power=power, warmup_steps=2, final_lr_fraction=0.1)
    fallen = [0.5 * (0.1 + 0.9 * (1 - i / 9) ** power) for i in range(10)]
    assert warm == pytest.approx([0.25, 0.5, *fallen])


def test_wsd_stays_and_falls_in_its_last_steps() -> None:
    taken = rates(schedule="wsd", warmup_steps=2, decay_steps=4, final_lr_fraction=0.2)
    assert taken == pytest.approx([0.25, *[0.5] * 7, 0.4, 0.3, 0.2, 0.1])
    assert rates(schedule="wsd", decay_steps=STEPS)[0] == pytest.approx(0.5 * 11 / 12)


@pytest.mark.parametrize("warmup", [1, 4])
def test_inverse_sqrt_is_the_formula_of_the_transformer(warmup: int) -> None:
    """Which has no rate at its peak, but one for the width of the model."""
    formula = [min(1 / sqrt(n), n / warmup**1.5) for n in range(1, STEPS + 1)]
    taken = rates(schedule="inverse_sqrt", warmup_steps=warmup)
    assert taken == pytest.approx([0.5 * x / max(formula) for x in formula])


def test_inverse_sqrt_without_a_warm_up_begins_at_the_rate() -> None:
    assert rates(schedule="inverse_sqrt")[:4] == pytest.approx(
        [0.5, 0.5 / sqrt(2), 0.5 / sqrt(3), 0.25]
    )
