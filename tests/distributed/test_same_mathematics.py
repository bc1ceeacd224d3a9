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
from tests.pairs import covering, pairs

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
MATRIX = covering(
    [
        Case(model, strategy, devices, optimizer, speeds)
        for model, devices, speeds, optimizer, strategy in product(
            ("gpt", "image_classifier", "gpt2", "bert"),
            (2, 4),
            ((), UNEVEN),
            ("momentum", "adamw"),
            STRATEGIES,
        )
    ],
    lambda case: pairs(case.model, case.devices, case.speeds, case.optimizer, case.strategy),
)


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_every_plan_is_one_device(run: Run, case: Case) -> None:
    found = run(case)
    assert found.plan["task_graphs"][0]["shares"] == SHARES[case.devices, case.speeds]
    assert_equal(found, run(case.single), TOLERANCE)


SINGLE = sorted({case.single for case in MATRIX}, key=str)


@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_one_device_is_a_plain_loop(run: Run, case: Case) -> None:
    assert_equal(run(case), run(case, plainly=True), TO_PLAIN_LOOP)


VARIANTS = [
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


@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_every_variant_is_one_device(run: Run, case: Case) -> None:
    found, single = run(case), run(case.single)
    assert found.plan["task_graphs"][0]["shares"] == SHARES[case.devices, case.speeds]
    assert_equal(found, single, TOLERANCE)
    assert len(single.evaluations) == (2 if EVALUATED[1] in case.extra else 0)
    if CLIPPED[0] in case.extra:
        assert min(single.norms) > 0.3  # it bites


SPLIT_HEADS = list(product(["gpt", "gpt_tied", "image_classifier"], [1, 2, 3], [(), CLIPPED]))


@pytest.mark.parametrize(("model", "stage", "clip"), covering(SPLIT_HEADS, lambda row: pairs(*row)))
def test_a_split_head_beside_zero(run: Run, model: str, stage: int, clip: tuple[str, ...]) -> None:
    extra = (*clip, *zero_backbone(stage))
    case = Case(model, "hybrid_split_dp", 2, "sgd", UNEVEN, extra)
    assert_equal(run(case), run(Case(model, "single", 1, "sgd", (), clip)), TOLERANCE)


SINGLE_VARIANTS = sorted(
    {c.single for c in VARIANTS if not {*EVALUATED, "data.shuffle=true"} & {*c.extra}}, key=str
)


@pytest.mark.parametrize("case", SINGLE_VARIANTS, ids=str)
def test_one_device_is_a_plain_loop_variants(run: Run, case: Case) -> None:
    assert_equal(run(case), run(case, plainly=True), TO_PLAIN_LOOP)


BF16 = ("train.precision=bf16",)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_is_one_device_in_bf16(run: Run, strategy: str) -> None:
    """Eight bits of mantissa: 2e-3 an operation. Biases start at 0 and are nothing but updates."""
    case = Case("gpt", strategy, 2, "adamw", UNEVEN, BF16)
    found = run(case)
    assert_equal(found, run(case.single), 1e-2, rel_values=3e-2)
    in_fp32 = run(Case("gpt", "single", 1, "adamw")).losses
    assert found.losses[0] != pytest.approx(in_fp32[0], rel=1e-6)  # it is no fp32 in disguise


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        *((m, s) for m in ("own", "own_unexported") for s in ("dp", "zero1", "zero2", "zero3")),
        ("own_branching", "dp"),
    ],
)
def test_what_the_loss_does_not_use_stays_put(run: Run, model: str, strategy: str) -> None:
    """Under weight decay and momentum, to the last bit of its first weights."""
    torch.manual_seed(0)
    before = {path: tensor.numpy() for path, tensor in OwnNet().state_dict().items()}
    after = run(Case(model, strategy, 2, "momentum", UNEVEN)).values
    for path in ("forgotten.weight", "forgotten.bias", "frozen"):
        assert all((copy == before[path]).all() for copy in after[path]), path
    assert all((copy != before["first.weight"]).all() for copy in after["first.weight"])


@pytest.mark.parametrize(
    ("optimizer", "change"),
    [
        ("momentum", "optimizer.lr=0.1001"),
        ("momentum", "optimizer.momentum=0.901"),
        ("momentum", "optimizer.weight_decay=0.0505"),
        ("adamw", "optimizer.weight_decay=0.11"),
        ("adamw", "optimizer.lr=2.002e-3"),
    ],
)
def test_a_small_difference_is_seen(run: Run, optimizer: str, change: str) -> None:
    single = run(Case("gpt", "single", 1, optimizer))
    other = run(Case("gpt", "single", 1, optimizer, (), (change,)))
    with pytest.raises(AssertionError, match="off by"):
        assert_equal(other, single, TOLERANCE)
