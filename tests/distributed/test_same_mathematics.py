"""Every plan computes what one device would: losses, gradient norms, updated parameters.

Each test is one job, run as the command runs it, against `strategy=single`; and `strategy=single`
against a plain PyTorch loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed.equality import (
    RARE,
    Arrays,
    Computed,
    Jobs,
    OwnNet,
    assert_equal,
    save,
)
from tests.pairs import covering, pairs

STEPS, GLOBAL_BATCH, SEQUENCE = 5, 8, 16
SAMPLES = 3 * GLOBAL_BATCH  # the fourth step begins a second epoch
TOLERANCE = 2e-5
TO_PLAIN_LOOP = 1e-6

# --- Models and data as overrides ----------------------------------------------------------------

_GPT2 = "vocab_size: 61, n_positions: 16, n_embd: 32, n_layer: 2, n_head: 2"
_GPT2_OFF = "resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0, bos_token_id: 0, eos_token_id: 0"
_BERT = (
    "vocab_size: 67, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 2, max_position_embeddings: 16, hidden_dropout_prob: 0.0, "
    "attention_probs_dropout_prob: 0.0"
)
_SMALL_GPT = ("vocab_size=64", "sequence_length=16", "width=32", "depth=2", "heads=2")

# name: (the arrays it reads, its overrides)
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "gpt": ("tokens", ("model=gpt", *(f"model.{x}" for x in _SMALL_GPT))),
    "gpt_tied": ("tokens", ("model=gpt", *(f"model.{x}" for x in _SMALL_GPT), "model.tied=true")),
    "image_classifier": ("images", ("model=image_classifier", "model.width=8")),
    "gpt2": (
        "tokens",
        (
            "model=hf",
            "model.architecture=GPT2LMHeadModel",
            f"model.config={{{_GPT2}, {_GPT2_OFF}}}",
        ),
    ),
    "bert": (
        "masked",
        ("model=hf", "model.architecture=BertForMaskedLM", f"model.config={{{_BERT}}}"),
    ),
    "bert_some_without": (
        "sparse",
        ("model=hf", "model.architecture=BertForMaskedLM", f"model.config={{{_BERT}}}"),
    ),
    # More parameters than one bucket of gradients holds.
    "class_head": ("features", ("model=class_head", "model.num_classes=16000")),
    "own": ("points", ("model._target_=equality.OwnNet", "model.loss=cross_entropy")),
    "own_unexported": (
        "points",
        ("model._target_=equality.OwnNet", "model.loss=cross_entropy", "model.branch=size"),
    ),
    "own_branching": (
        "points",
        ("model._target_=equality.OwnNet", "model.loss=cross_entropy", "model.branch=values"),
    ),
    "sometimes": ("points", ("model._target_=equality.SometimesNet", "model.loss=cross_entropy")),
}


def write_arrays(folder: Path) -> None:
    """One .npz a kind of data. Every sample of `masked` has a number of targets of its own, some
    only one; in `sparse` the first half of every batch has none."""
    draw = np.random.default_rng(7)
    tokens = draw.integers(0, 61, (SAMPLES, SEQUENCE))
    pads = draw.integers(SEQUENCE // 2, SEQUENCE + 1, (SAMPLES, 1))
    attention_mask = (np.arange(SEQUENCE) < pads).astype(np.int64)
    wanted = np.array([1, 12, 3, 1, 7, 1, 16, 5])
    targets = [np.resize(wanted, SAMPLES), np.resize([0, 0, 0, 0, 1, 9, 2, 5], SAMPLES)]
    ranks = draw.random((SAMPLES, SEQUENCE)).argsort(1)
    labels = [np.where(ranks < count[:, None], tokens, -100) for count in targets]
    points = draw.normal(size=(SAMPLES, 6))
    # Steps 1, 3 and 4 (which repeats 1) have one sample each that reads SometimesNet.rare.
    points[[1, 2 * GLOBAL_BATCH + 6], 0] = RARE + 1
    classes = {name: draw.integers(0, top, SAMPLES) for name, top in _CLASSES.items()}
    arrays: dict[str, Arrays] = {
        "tokens": {"input_ids": tokens, "labels": tokens},
        "masked": {"input_ids": tokens, "attention_mask": attention_mask, "labels": labels[0]},
        "sparse": {"input_ids": tokens, "attention_mask": attention_mask, "labels": labels[1]},
        "images": {"pixel_values": draw.normal(size=(SAMPLES, 1, 8, 8))},
        "features": {"features": draw.normal(size=(SAMPLES, 256))},
        "points": {"points": points},
    }
    for name, found in arrays.items():
        labels_of_classes = {"labels": classes[name]} if name in classes else {}
        save(folder / f"{name}.npz", {**found, **labels_of_classes})


_CLASSES = {"images": 10, "features": 16000, "points": 11}

OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "sgd": ("optimizer=sgd", "optimizer.lr=0.1"),
    "momentum": (
        "optimizer=sgd",
        "optimizer.lr=0.1",
        "optimizer.momentum=0.9",
        "optimizer.weight_decay=0.05",
    ),
    # Near 0 Adam multiplies a gradient, and its rounding, by lr / eps: with the default eps a
    # gradient that is 0 but for rounding (that of a key's bias) becomes whole steps in whatever
    # direction. The eps here keeps rounding what it is, and shows a gradient of the wrong scale.
    "adamw": (
        "optimizer=adamw",
        "optimizer.lr=2e-3",
        "optimizer.weight_decay=0.1",
        "optimizer.eps=1e-3",
    ),
    "adam": (
        "optimizer=adam",
        "optimizer.lr=2e-3",
        "optimizer.weight_decay=0.1",
        "optimizer.eps=1e-3",
    ),
    "lamb": (
        "optimizer=lamb",
        "optimizer.lr=2e-3",
        "optimizer.weight_decay=0.1",
        "optimizer.eps=1e-3",
    ),
}


def hardware(devices: int, speeds: Sequence[float]) -> tuple[str, ...]:
    """`devices` CPU processes: equal ones, or as many of each of `speeds` (TFLOP/s), whose memory
    is as fast in proportion."""
    if not speeds:
        return ("hardware=cpu", f"hardware.devices={devices}")
    nodes = ", ".join(
        f"{{devices: {devices // len(speeds)}, link: nvlink2, device: {{name: gpu_{i}, "
        f"flops: {{fp32: {speed}e12, bf16: {speed}e12}}, memory_bytes: 16e9, "
        f"memory_bandwidth_bytes_s: {speed}e11}}}}"
        for i, speed in enumerate(speeds)
    )
    return ("hardware=v100_p100_mix", f"hardware.nodes=[{nodes}]", "launcher=emulate")


@dataclass(frozen=True)
class Case:
    """One job. `speeds` as in `hardware`; `extra` are further overrides."""

    model: str
    strategy: str
    devices: int
    optimizer: str
    speeds: tuple[float, ...] = ()
    extra: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The case as a test's name."""
        shares = f"speeds_{'_'.join(f'{s:g}' for s in self.speeds)}" if self.speeds else "even"
        parts = (self.model, self.strategy, f"{self.devices}x", shares, self.optimizer)
        return "-".join((*parts, *(x.removeprefix("train.") for x in self.extra)))

    @property
    def single(self) -> "Case":
        """The same on one device."""
        return Case(self.model, "single", 1, self.optimizer, (), self.extra)

    def overrides(self, arrays: Path) -> list[str]:
        kind, model = MODELS[self.model]
        return [
            *model,
            *("data=arrays", f"data.path={arrays / kind}.npz", "data.shuffle=false"),
            *(f"strategy={self.strategy}", *hardware(self.devices, self.speeds)),
            *OPTIMIZERS[self.optimizer],
            *(f"train.steps={STEPS}", f"train.global_batch={GLOBAL_BATCH}"),
            *self.extra,
        ]


# --- Tests ---------------------------------------------------------------------------------------

ZERO = ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
STRATEGIES = ("dp", *ZERO, "hybrid_split_dp")


class Run:
    """Runs cases on arrays in `folder`."""

    def __init__(self, folder: Path, jobs: Jobs) -> None:
        write_arrays(folder)
        self.folder, self._jobs = folder, jobs

    def __call__(self, case: Case, plainly: bool = False) -> Computed:
        return self._jobs.run(case.overrides(self.folder), plainly)


UNEVEN = (5.0, 3.0)
UNEVEN_3 = (4.0, 3.0, 1.0)
ONE = (7.0, 1.0)
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


CLIPPED = ("train.grad_clip=0.3",)
SCHEDULED = (
    "optimizer.schedule=cosine",
    "optimizer.warmup_steps=2",
    "optimizer.final_lr_fraction=0.1",
)
EVALUATED = ("data.evaluation_fraction=0.4", "train.evaluate_every=5", "train.evaluation_samples=8")


def zero_backbone(stage: int) -> tuple[str, ...]:
    """hybrid_split_dp whose backbone is partitioned as well."""
    copies = f'{{replicate: {{modules: "*", zero: {stage}}}}}'
    return (f"strategy.graph=[{copies}, {{split: {{modules: head}}}}]",)


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
