"""Gradients that copies send each other in 16 bits: what a step then is, and what it sends."""

from dataclasses import replace

import pytest
from tests.distributed.served import Served
from tests.distributed.test_rehearse import LARGE, rehearsed
from tests.distributed.test_verify import Case, Sides
from tests.pairs import covering

from whale_train.rehearsal import Rehearsal

FOUR = ("hardware=cpu", "hardware.devices=4")
_COPIES = "{replicate: {of: {pipeline: {stages: 2, micro_batches: 2}}}}"
CASES = [
    *(Case("gpt", name, "adamw") for name in ("dp", "zero1", "zero2", "zero3", "hybrid_split_dp")),
    Case("gpt", "dp", "adamw", extra=("train.accumulate=2",)),
    Case("gpt_tied", "dp", "adamw", FOUR, only_plan=(f"strategy.graph={_COPIES}",)),
    Case("gpt", "zero1_pipeline", "adamw", FOUR),
]


# One of each engine: what copies send is rounded as they have their gradients whole, as they
# partition parameters, and beside a split head, where a step has more than one backward.
SOME = covering(CASES, lambda case: {case.strategy} & {"dp", "zero3", "hybrid_split_dp"})


@pytest.mark.parametrize("case", SOME, ids=str)
def test_sixteen_bits_of_gradients_train_as_one_process(sides: Sides, case: Case) -> None:
    case = replace(case, extra=("train.precision=bf16", *case.extra))
    wide, narrow = (
        sides.verify(replace(case, only_plan=(*case.only_plan, f"train.reduce_dtype={sent}")))
        for sent in ("fp32", "bf16")
    )
    assert narrow.equal, narrow.to_json()
    assert narrow.losses[0] != wide.losses[0]  # by what was rounded on the way


@pytest.mark.parametrize(
    ("graph", "kind"),
    [
        ("{replicate: {}}", "all-reduce"),
        ("{replicate: {zero: 2}}", "reduce-scatter"),
        pytest.param("{replicate: {zero: 3}}", "reduce-scatter", marks=pytest.mark.full),
        pytest.param(
            "{replicate: {of: {pipeline: {stages: 2, micro_batches: 4}}}}",
            "all-reduce",
            marks=pytest.mark.full,
        ),
    ],
)
def test_half_the_bytes_are_sent(graph: str, kind: str, served: Served) -> None:
    found = []
    for sent in ("fp32", "bf16"):
        more = [f"strategy.graph={graph}", "train.precision=bf16", f"train.reduce_dtype={sent}"]
        said = Rehearsal.from_json(served.ask(rehearsed, overrides=[*LARGE, *more]))
        assert said.is_clean
        for rank in said.kinds:
            assert rank.peak == pytest.approx(rank.planned, rel=0.1)
        found.append(
            sum(
                each.num_bytes
                for rank in said.kinds
                for each in rank.traffic
                if each.kind == kind and each.group.endswith(".data_parallel")
            )
        )
    wide, narrow = found
    assert narrow == pytest.approx(wide / 2, rel=1e-3)
