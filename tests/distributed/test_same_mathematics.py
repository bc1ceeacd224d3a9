"""Every plan computes what one device would: losses, gradient norms, updated parameters.

Each test is one job, run as the command runs it, against `strategy=single`; and `strategy=single`
against a plain PyTorch loop.
"""

from itertools import product

import pytest
import torch
from tests.distributed.cases import (
    CLIPPED,
    EVALUATED,
    ONE,
    SCHEDULED,
    TOLERANCE,
    UNEVEN,
    UNEVEN_3,
    Case,
    Run,
    zero_backbone,
)
from tests.distributed.equality import (
    OwnNet,
    assert_equal,
)
from tests.distributed.equality_table import fewest, shown_by
from tests.pairs import covering, once

TO_PLAIN_LOOP = 1e-6

ZERO = ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
STRATEGIES = ("dp", *ZERO, "hybrid_split_dp")


# How a batch of 8 is shared, by devices and speeds. Of the four, the last ends after 3/5 of a unit
# of time; with 3 + 2 + 2 + 1 it would be 2/3.
SHARES = {
    (2, ()): [4, 4],
    (3, ()): [3, 3, 2],
    (4, ()): [2, 2, 2, 2],
    (2, UNEVEN): [5, 3],
    (4, UNEVEN): [3, 3, 1, 1],
    (3, UNEVEN_3): [4, 3, 1],
    (2, ONE): [7, 1],
}
_MATRIX = [
    Case(model, strategy, devices, optimizer, speeds)
    for model, devices, speeds, optimizer, strategy in product(
        ("gpt", "image_classifier", "gpt2", "bert"),
        (2, 4),
        ((), UNEVEN),
        ("momentum", "adamw"),
        STRATEGIES,
    )
]
_VARIANTS = [
    # A clip that bites.
    *(
        Case("gpt", strategy, 2, "sgd", UNEVEN, CLIPPED)
        for strategy in ("dp", "zero1", "zero2", "zero3", "zero2_offload", "hybrid_split_dp")
    ),
    # A learning rate that moves.
    *(
        Case("gpt", strategy, 2, "adamw", UNEVEN, SCHEDULED)
        for strategy in ("dp", "zero1", "zero3", "zero2_offload", "hybrid_split_dp")
    ),
    # Adam's decay is in the gradient, not in the update.
    *(Case("gpt2", strategy, 2, "adam") for strategy in STRATEGIES),
    # One weight as the embedding and the head.
    *(Case("gpt_tied", strategy, 2, "momentum", UNEVEN) for strategy in STRATEGIES),
    Case("gpt_tied", "hybrid_split_dp", 4, "adamw", UNEVEN),
    # A user's own class, with a parameter nothing reads and a frozen one.
    *(Case("own", strategy, 2, "momentum", UNEVEN) for strategy in STRATEGIES),
    # The same, which no graph can be had of.
    *(
        Case("own_unexported", strategy, 2, "momentum", UNEVEN)
        for strategy in ("dp", "zero1", "zero2", "zero3")
    ),
    Case("own_branching", "dp", 2, "momentum", UNEVEN),
    # A parameter that in some steps nobody reads, and in the others one rank does.
    Case("sometimes", "dp", 2, "momentum", UNEVEN),
    # One sample on a rank, of one target.
    *(
        Case(model, strategy, 2, "momentum", ONE)
        for model in ("image_classifier", "bert")
        for strategy in ("dp", "zero3", "hybrid_split_dp")
    ),
    # No target at all on a rank.
    *(
        Case("bert_some_without", strategy, 2, "momentum")
        for strategy in ("dp", "zero2", "zero3", "hybrid_split_dp")
    ),
    # Three devices, equal (3 + 3 + 2) and of three kinds.
    *(
        Case(model, strategy, 3, "momentum", speeds)
        for model in ("gpt2", "image_classifier")
        for strategy in ("dp", "zero2", "zero3", "hybrid_split_dp")
        for speeds in ((), UNEVEN_3)
    ),
    # More than a bucket of gradients.
    *(
        Case("class_head", strategy, 2, "sgd")
        for strategy in ("dp", "zero1", "zero2", "zero3", "hybrid_split_dp")
    ),
    # Another order of the samples.
    *(
        Case("gpt", strategy, 2, "sgd", UNEVEN, ("data.shuffle=true",))
        for strategy in ("dp", "hybrid_split_dp")
    ),
    # Held-back samples: with the statistics BatchNorm has gathered, and with masked targets.
    *(
        Case(model, strategy, 2, "momentum", UNEVEN, EVALUATED)
        for model in ("image_classifier", "bert")
        for strategy in ("dp", "zero1", "zero3", "hybrid_split_dp")
    ),
]
# Both show together what `equality_table` wants of this file.
_CHOSEN = fewest([*_MATRIX, *_VARIANTS], shown_by("test_same_mathematics"))
MATRIX = [case for case in _CHOSEN if case in _MATRIX]
VARIANTS = [case for case in _CHOSEN if case in _VARIANTS]


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_every_plan_is_one_device(run: Run, case: Case) -> None:
    found = run(case)
    assert found.plan["task_graphs"][0]["shares"] == SHARES[case.devices, case.speeds]
    assert_equal(found, run(case.single), TOLERANCE)


SINGLE = sorted({case.single for case in MATRIX}, key=str)
SINGLE_VARIANTS = sorted(
    {c.single for c in VARIANTS if not {*EVALUATED, "data.shuffle=true"} & {*c.extra}}, key=str
)
# Every optimizer and whatever else is asked for; statistics of the batch, targets of some tokens,
# and a user's own class.
PLAIN = covering(
    [*SINGLE, *SINGLE_VARIANTS],
    lambda case: {
        *once(case.optimizer, case.extra),
        *({case.model} & {"image_classifier", "bert", "own"}),
    },
)


@pytest.mark.parametrize("case", [case for case in SINGLE if case in PLAIN], ids=str)
def test_one_device_is_a_plain_loop(run: Run, case: Case) -> None:
    assert_equal(run(case), run(case, plainly=True), TO_PLAIN_LOOP)


@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_every_variant_is_one_device(run: Run, case: Case) -> None:
    found, single = run(case), run(case.single)
    assert found.plan["task_graphs"][0]["shares"] == SHARES[case.devices, case.speeds]
    assert_equal(found, single, TOLERANCE)
    assert len(single.evaluations) == (2 if EVALUATED[1] in case.extra else 0)
    if CLIPPED[0] in case.extra:
        assert min(single.norms) > 0.3  # it bites


SPLIT_HEADS = list(product(["gpt", "gpt_tied", "image_classifier"], [1, 2, 3], [(), CLIPPED]))
# Stage 1 is beside a split head in test_accumulation and in test_precision, too.
SOME_SPLIT_HEADS = covering(SPLIT_HEADS, lambda row: {*row} & {2, 3, (), CLIPPED, "gpt_tied"})


@pytest.mark.parametrize(("model", "stage", "clip"), SOME_SPLIT_HEADS)
def test_a_split_head_beside_zero(run: Run, model: str, stage: int, clip: tuple[str, ...]) -> None:
    extra = (*clip, *zero_backbone(stage))
    case = Case(model, "hybrid_split_dp", 2, "sgd", UNEVEN, extra)
    assert_equal(run(case), run(Case(model, "single", 1, "sgd", (), clip)), TOLERANCE)


@pytest.mark.parametrize("case", [case for case in SINGLE_VARIANTS if case in PLAIN], ids=str)
def test_one_device_is_a_plain_loop_variants(run: Run, case: Case) -> None:
    assert_equal(run(case), run(case, plainly=True), TO_PLAIN_LOOP)


BF16 = ("train.precision=bf16",)


# Of all others `test_verify` has bf16 as well.
BF16_STRATEGIES = covering(
    STRATEGIES, lambda strategy: {strategy} & {"zero2_offload", "hybrid_split_dp"}
)


@pytest.mark.parametrize("strategy", BF16_STRATEGIES)
def test_bf16_is_one_device_in_bf16(run: Run, strategy: str) -> None:
    """Eight bits of mantissa: 2e-3 an operation. Biases start at 0 and are nothing but updates."""
    case = Case("gpt", strategy, 2, "adamw", UNEVEN, BF16)
    found = run(case)
    assert_equal(found, run(case.single), 1e-2, rel_values=3e-2)
    in_fp32 = run(Case("gpt", "single", 1, "adamw")).losses
    assert found.losses[0] != pytest.approx(in_fp32[0], rel=1e-6)  # it is no fp32 in disguise


UNUSED = [
    *((m, s) for m in ("own", "own_unexported") for s in ("dp", "zero1", "zero2", "zero3")),
    ("own_branching", "dp"),
]


# With and without a graph; where copies hold all parameters, and where they partition them.
@pytest.mark.parametrize(
    ("model", "strategy"), covering(UNUSED, lambda row: once(row[0] == "own", row[1] == "dp"))
)
def test_what_the_loss_does_not_use_stays_put(run: Run, model: str, strategy: str) -> None:
    """Under weight decay and momentum, to the last bit of its first weights."""
    torch.manual_seed(0)
    before = {path: tensor.numpy() for path, tensor in OwnNet().state_dict().items()}
    after = run(Case(model, strategy, 2, "momentum", UNEVEN)).values
    for path in ("forgotten.weight", "forgotten.bias", "frozen"):
        assert all((copy == before[path]).all() for copy in after[path]), path
    assert all((copy != before["first.weight"]).all() for copy in after["first.weight"])


CHANGES = [
    ("momentum", "optimizer.lr=0.1001"),
    ("momentum", "optimizer.momentum=0.901"),
    ("momentum", "optimizer.weight_decay=0.0505"),
    ("adamw", "optimizer.weight_decay=0.11"),
    ("adamw", "optimizer.lr=2.002e-3"),
]


@pytest.mark.parametrize(("optimizer", "change"), covering(CHANGES, lambda row: {row[0]}))
def test_a_small_difference_is_seen(run: Run, optimizer: str, change: str) -> None:
    single = run(Case("gpt", "single", 1, optimizer))
    other = run(Case("gpt", "single", 1, optimizer, (), (change,)))
    with pytest.raises(AssertionError, match="off by"):
        assert_equal(other, single, TOLERANCE)
