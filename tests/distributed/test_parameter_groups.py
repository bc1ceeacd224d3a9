"""Groups of parameters with a learning rate and a weight decay of their own, under every kind of
plan: a plain loop with the same groups."""

import pytest
from tests.distributed.cases import TOLERANCE, UNEVEN, Case, Run
from tests.distributed.equality import assert_equal
from tests.pairs import some

TO_PLAIN_LOOP = 1e-6

# The head is of two groups, of which the first counts.
GROUPS = (
    "optimizer.groups=[{match: [lm_head.weight, blocks.1.expand.bias], lr_scale: 0.25}, "
    '{match: ["*_norm.weight", lm_head.weight], weight_decay: 0.5, lr_scale: 2.0}]',
)
TIED_GROUPS = ("optimizer.groups=[{match: [position.weight], lr_scale: 2.0}]",)
PIPELINE = "{pipeline: {stages: 2, micro_batches: 2}}"
NESTED = (
    "strategy.graph={replicate: {degree: 2, of: {pipeline: {micro_batches: 2, stages: "
    "[{split: {degree: 2}}, {replicate: {degree: 2, zero: 1}}]}}}}"
)
PLANS = [
    *(("gpt", strategy, 2, ()) for strategy in ("dp", "zero1", "zero2", "zero3")),
    *(("gpt", strategy, 2, ()) for strategy in ("zero2_offload", "hybrid_split_dp", "split")),
    ("gpt", "pipeline", 2, (f"strategy.graph={PIPELINE}",)),
    ("gpt", "3d", 8, (NESTED,)),
    ("gpt_tied", "pipeline", 2, (f"strategy.graph={PIPELINE}",)),
]
QUICK = [row for row in PLANS if row[1] in ("zero2", "zero3", "hybrid_split_dp", "3d")]


def case_of(
    model: str, strategy: str, devices: int, optimizer: str, extra: tuple[str, ...]
) -> Case:
    speeds = UNEVEN if devices == 2 and strategy not in ("pipeline", "split") else ()
    return Case(model, strategy, devices, optimizer, speeds, extra)


@pytest.mark.parametrize("optimizer", some(["adamw", "momentum"], ["adamw"]))
@pytest.mark.parametrize(("model", "strategy", "devices", "graph"), some(PLANS, QUICK))
def test_every_plan_is_a_plain_loop(
    run: Run, model: str, strategy: str, devices: int, graph: tuple[str, ...], optimizer: str
) -> None:
    groups = (
        GROUPS
        if model == "gpt"
        else ("optimizer.groups=[{match: [position.weight], lr_scale: 2}]",)
    )
    found = run(case_of(model, strategy, devices, optimizer, (*groups, *graph)))
    single = Case(model, "single", 1, optimizer, (), groups)
    assert_equal(found, run(single), TOLERANCE)
    assert_equal(run(single), run(single, plainly=True), TO_PLAIN_LOOP)


@pytest.mark.parametrize("strategy", ["hybrid_split_dp", "split"])
def test_trust_ratios_are_of_groups(run: Run, strategy: str) -> None:
    single = Case("gpt", "single", 1, "lamb", (), GROUPS)
    assert_equal(run(case_of("gpt", strategy, 2, "lamb", GROUPS)), run(single), TOLERANCE)


def test_norms_and_biases_have_no_decay_unless_told(run: Run) -> None:
    """As without decay at all, in the first step, to the last bit; and not with it."""
    spared, never, decayed = (
        run(Case("gpt", "single", 1, "adamw", (), ("train.steps=1", *extra))).values
        for extra in ((), ("optimizer.weight_decay=0",), ("optimizer.no_decay=null",))
    )
    paths = {"blocks.0.mlp_norm.weight": True, "blocks.0.expand.weight": False, "norm.weight": True}
    for path, is_spared in paths.items():
        assert (spared[path][0] == never[path][0]).all() == is_spared, path
        assert (spared[path][0] == decayed[path][0]).all() != is_spared, path
