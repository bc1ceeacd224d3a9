"""Copies of a stage that share a host, in place of the stages of a copy."""

import pytest
from tests.distributed.cases import TOLERANCE, UNEVEN, Case, Run
from tests.distributed.equality import JobFailed, assert_equal

_COPIES_OF_STAGES = (
    "strategy.graph={replicate: {degree: 2, of: {pipeline: {stages: 2, micro_batches: 2}}}}"
)
APART = "strategy.prefer_intra_node=false"
CASE = Case("gpt_tied", "pipeline", 4, "momentum", UNEVEN, (_COPIES_OF_STAGES, APART))


def test_gradients_are_summed_inside_hosts_and_the_job_is_one_process(run: Run) -> None:
    """Two hosts of two devices: stage 0 on one, stage 1 on the other."""
    computed = run(CASE)
    assert_equal(computed, run(Case("gpt_tied", "single", 1, "momentum")), TOLERANCE)
    groups = computed.plan["groups"]
    assert groups["stage_0.data_parallel"] == [[0, 1]]
    assert groups["stage_1.data_parallel"] == [[2, 3]]


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        (Case("gpt", "dp", 4, "sgd", UNEVEN, (APART,)), "without several replicas of a pipeline"),
        (Case("gpt", "pipeline", 4, "sgd", (), (_COPIES_OF_STAGES, APART)), "on one host, "),
    ],
)
def test_where_it_makes_no_difference_it_is_refused(run: Run, case: Case, rule: str) -> None:
    with pytest.raises(JobFailed) as failure:
        run(case)
    assert f"{APART} has no effect {rule}" in str(failure.value)
