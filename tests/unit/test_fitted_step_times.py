"""Fitted step times of jobs: numbers that are known are found again, from few measurements."""

from math import inf

import pytest

from whale_train.strategies.cluster_scheduling.fitted_step_time import (
    FittedStepTime,
    StepParts,
    fit_step_time,
)
from whale_train.strategies.cluster_scheduling.seven_parameters import (
    Bandwidths,
    ModelFigures,
    PlanShape,
    SevenParameters,
    fit_seven_parameters,
    overlapped,
)

PARTS = [
    StepParts(0.080, 0.000, 0.004, 0.000),
    StepParts(0.040, 0.010, 0.004, 0.000),
    StepParts(0.020, 0.016, 0.002, 0.000, 2, 2.0),
    StepParts(0.040, 0.002, 0.002, 0.030, 4),
    StepParts(0.030, 0.030, 0.004, 0.010, 3, 1.5),
    StepParts(0.025, 0.005, 0.008, 0.005, 2, 2.0),
]


def test_the_planners_numbers_are_found_again() -> None:
    true = FittedStepTime(1.6, 2.5, 1.2, 1.8, 0.003, 0.004)
    fitted = fit_step_time([(x, true.seconds(x)) for x in PARTS[:4]])
    for held_out in PARTS[4:]:  # four measurements do not determine six numbers
        assert fitted.seconds(held_out) == pytest.approx(true.seconds(held_out), rel=0.1)
        assert held_out.seconds < 0.8 * true.seconds(held_out)


def test_one_measurement_scales_every_part() -> None:
    fitted = fit_step_time([(PARTS[1], 3 * PARTS[1].seconds)])
    assert fitted.seconds(PARTS[2]) == pytest.approx(3 * PARTS[2].seconds, rel=0.02)
    assert fit_step_time([]).seconds(PARTS[0]) == PARTS[0].seconds


def test_overlap_goes_from_the_sum_to_the_longer_one() -> None:
    assert overlapped(3.0, 4.0, 1.0) == 7.0
    assert overlapped(3.0, 4.0, 2.0) == pytest.approx(5.0)
    assert overlapped(3.0, 4.0, inf) == 4.0
    assert overlapped(0.0, 0.0, 2.0) == 0.0


def test_seven_numbers_are_found_again_as_far_as_plans_tell() -> None:
    figures, links = ModelFigures(0.002, 4e8, 1e6, 12), Bandwidths(1e10, 2e10, 5e9, 1e10)
    true = SevenParameters(1.7, 1.6, 3e-11, 2e-10, 1.4, 1.5, 0.004)
    plans = [
        PlanShape(),
        PlanShape(2),
        PlanShape(4, zero=True),
        PlanShape(8),
        PlanShape(2, offload=True, zero=True),
        PlanShape(4, offload=True, zero=True),
        PlanShape(1, 2),
        PlanShape(2, micro_batches=4),
    ]
    measured = [(x, 64.0, true.seconds(figures, x, 64.0, links)) for x in plans]
    fitted = fit_seven_parameters(figures, measured, links)
    for held_out in (PlanShape(4), PlanShape(2, 2, 2, 4), PlanShape(8, offload=True, zero=True)):
        wanted = true.seconds(figures, held_out, 64.0, links)
        assert fitted.seconds(figures, held_out, 64.0, links) == pytest.approx(wanted, rel=0.1)
