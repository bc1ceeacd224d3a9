"""fp16 with a dynamic loss scale: every plan is one device, and an overflow is nobody's update."""

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed.cases import (
    CLIPPED,
    GLOBAL_BATCH,
    SAMPLES,
    UNEVEN,
    Case,
    Run,
    zero_backbone,
)
from tests.distributed.equality import Computed, JobFailed, Jobs, assert_equal, save
from tests.distributed.equality_table import fewest, shown_by
from tests.distributed.harness import run_ranks
from tests.pairs import covering
from torch import distributed as dist
from torch import nn

from whale_train.runtime.base.copies import Copies
from whale_train.runtime.cpu.shm_collectives import SharedMemoryGroup
from whale_train.runtime.engines.ddp import TorchEngine
from whale_train.runtime.optim.optimizers import make_optimizer
from whale_train.runtime.train.loop import update

STRATEGIES = ("dp", "zero1", "zero2", "zero3", "zero2_offload", "hybrid_split_dp")
FP16 = ("train.precision=fp16",)
TO_FP16 = 5e-3  # one device in fp16: fp16 rounds to 5e-4, in other places on each
TO_FP32 = 2e-2


class Fp16Run(Run):
    """Runs cases on devices that compute fp16."""

    def __call__(self, case: Case, plainly: bool = False) -> Computed:
        overrides = [x.replace("bf16:", "fp16:") for x in case.overrides(self.folder)]
        return self._jobs.run(overrides, plainly)


@pytest.fixture(scope="module")
def run(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Fp16Run:
    run = Fp16Run(tmp_path_factory.mktemp("precision"), jobs)
    write_spoilt(run.folder)
    return run


def write_spoilt(folder: Path) -> None:
    """`points` whose second batch has a sample that no fp16 number is large enough for; it is
    the last of the batch, and so the last rank's."""
    draw = np.random.default_rng(3)
    points = draw.normal(size=(SAMPLES, 6))
    points[2 * GLOBAL_BATCH - 1] = 1e6
    save(folder / "spoilt.npz", {"points": points, "labels": draw.integers(0, 11, SAMPLES)})


CASES = [
    *(
        Case(model, strategy, 2, optimizer, UNEVEN, FP16)
        for model, optimizer in (("gpt", "momentum"), ("bert", "adamw"))
        for strategy in STRATEGIES
    ),
    *(Case("gpt", s, 2, "sgd", UNEVEN, (*FP16, *CLIPPED)) for s in STRATEGIES),
    *(
        Case("gpt", "hybrid_split_dp", 2, "sgd", UNEVEN, (*FP16, *zero_backbone(stage)))
        for stage in (1, 3)
    ),
    *(
        Case("gpt", s, 2, "momentum", UNEVEN, (*FP16, "train.accumulate=2"))
        for s in ("dp", "zero1", "zero3", "hybrid_split_dp")
    ),
]


def nested(**node: object) -> str:
    return f"strategy.graph={json.dumps(node)}".replace('"', "")


PIPELINE = {"pipeline": {"stages": 2, "micro_batches": 2}}
NESTED = [
    Case("gpt", "pipeline", 2, "sgd", (), (*FP16, nested(**PIPELINE))),
    Case(
        "gpt",
        "zero1_pipeline",
        4,
        "momentum",
        (),
        (*FP16, nested(replicate={"degree": 2, "zero": 1, "of": PIPELINE})),
    ),
    Case(
        "gpt",
        "split_zero3",
        4,
        "sgd",
        (),
        (*FP16, nested(replicate={"degree": 2, "zero": 3, "of": {"split": {"degree": 2}}})),
    ),
]
CASES += NESTED


def alone(case: Case, *extra: str) -> Case:
    """One device; a strategy's own overrides and micro-batches left out."""
    kept = [x for x in case.extra if not x.startswith(("strategy.", "train.accumulate", *FP16))]
    return Case(case.model, "single", 1, case.optimizer, (), (*extra, *kept))


@pytest.mark.parametrize("case", fewest(CASES, shown_by("test_precision")), ids=str)
def test_every_plan_is_one_device(run: Fp16Run, case: Case) -> None:
    found, single, fp32 = run(case), run(alone(case, *FP16)), run(alone(case))
    assert [line["loss_scale"] for line in found.lines] == [2.0**15] * len(single.losses)
    assert_equal(found, single, TO_FP16)
    assert_equal(found, fp32, TO_FP32)
    with pytest.raises(AssertionError):  # it is no fp32 in disguise
        assert_equal(found, fp32, 2e-6)


@pytest.mark.parametrize(
    "strategy",
    covering(["dp", "zero2", "hybrid_split_dp"], lambda strategy: {strategy} & {"zero2"}),
)
def test_batch_norm(run: Fp16Run, strategy: str) -> None:
    """Of one step: its rounding is a part of every channel's mean, and grows."""
    case = Case("image_classifier", strategy, 2, "sgd", (), (*FP16, "train.steps=1"))
    found, single = run(case), run(alone(case, *FP16))
    assert found.losses == pytest.approx(single.losses, rel=1e-5)
    assert found.norms == pytest.approx(single.norms, rel=1e-3)


def test_only_fp16_has_a_loss_scale(run: Fp16Run) -> None:
    for extra in ((), ("train.precision=bf16",)):
        case = Case("gpt", "dp", 2, "sgd", (), extra)
        assert all("loss_scale" not in line for line in run(case).lines)


HUGE = (*FP16, "train.loss_scale=33554432", "train.steps=10")  # 2^25


# Where copies divide the gradients, and the host has the optimizer.
@pytest.mark.parametrize(
    "strategy",
    covering(["single", *STRATEGIES], lambda strategy: {strategy} & {"zero2_offload"}),
)
def test_a_scale_that_overflows_skips_steps_until_it_does_not(run: Fp16Run, strategy: str) -> None:
    """A step skipped is a step of no training: what follows is what a run begun with the scale
    that holds computes, from the batch that is next."""
    devices = 1 if strategy == "single" else 2
    case = Case(
        "own",
        strategy,
        devices,
        "momentum",
        UNEVEN if devices > 1 else (),
        (*HUGE[:-1], "train.steps=12"),
    )
    found = run(case)
    lines = found.lines
    skipped = sum(line["grad_norm"] is None for line in lines)
    # The engine that runs a head averages over the copies what all samples of the head gave: of two
    # copies twice as much, which overflows a halving longer.
    longer = int(strategy == "hybrid_split_dp")
    assert 1 <= skipped <= 8 + longer
    assert [line["grad_norm"] is None for line in lines] == [True] * skipped + [False] * (
        12 - skipped
    )
    assert [line.get("skipped", False) for line in lines] == [True] * skipped + [False] * (
        12 - skipped
    )
    expected = [2.0 ** (25 - number) for number in range(skipped)]
    assert [line["loss_scale"] for line in lines] == [
        *expected,
        *[2.0 ** (25 - skipped)] * (12 - skipped),
    ]
    assert all(np.isfinite(line["loss"]) for line in lines)

    # Batches come around every third step: so does the loss of weights that are not updated.
    first = [line["loss"] for line in lines]
    for number in range(3, skipped + 1):
        assert first[number] == pytest.approx(first[number - 3], rel=1e-6)
    assert first[-1] != pytest.approx(first[(12 - 1) % 3], rel=1e-4)

    begun = ("train.precision=fp16", f"train.loss_scale={2 ** (25 + longer)}", "train.steps=12")
    reference = replace(case, strategy="single", devices=1, speeds=(), extra=begun)
    expected_run = run(reference)
    assert sum(line["grad_norm"] is None for line in expected_run.lines) == skipped
    wanted = expected_run.values
    for path, copies in found.values.items():
        for copy in copies:
            np.testing.assert_allclose(copy, wanted[path][0], rtol=2e-2, atol=2e-3, err_msg=path)


@pytest.mark.parametrize(
    "strategy", covering(["single", "zero2"], lambda strategy: {strategy} & {"zero2"})
)
def test_the_schedule_waits_for_the_scale(run: Fp16Run, strategy: str) -> None:
    devices = 1 if strategy == "single" else 2
    linear = (*HUGE, "optimizer.schedule=linear")
    found = run(Case("own", strategy, devices, "momentum", (), linear))
    skipped = sum(line.get("skipped", False) for line in found.lines)
    assert 1 <= skipped <= 8
    taken = [max(0, step - skipped) for step in range(10)]  # before each step
    assert found.rates == pytest.approx([found.rates[0] * (1 - n / 9) for n in taken])


# Stages, and copies of each that divide its gradients.
@pytest.mark.parametrize(
    "case", covering(NESTED, lambda case: {case.strategy} & {"zero1_pipeline"}), ids=str
)
def test_stages_and_shards_skip_the_same_steps(run: Fp16Run, case: Case) -> None:
    """However the overflow is divided among them: a rank that did not would wait for ever."""
    spoilt = replace(case, extra=(*case.extra, "train.loss_scale=4294967296", "train.steps=4"))
    found = run(spoilt)
    assert [line["grad_norm"] for line in found.lines] == [None] * 4
    assert [line["loss_scale"] for line in found.lines] == [2.0**n for n in (32, 31, 30, 29)]
    one_step = replace(spoilt, extra=(*spoilt.extra[:-1], "train.steps=1"))
    first = run(one_step)
    for path, copies in found.values.items():
        assert all((copy == first.values[path][0]).all() for copy in copies), path


# Where one rank has a part of a head, and another engine the rest of the model.
@pytest.mark.parametrize(
    "strategy", covering(STRATEGIES, lambda strategy: {strategy} & {"hybrid_split_dp"})
)
def test_what_one_rank_overflows_is_skipped_by_all(run: Fp16Run, strategy: str) -> None:
    data = f"data.path={run.folder / 'spoilt'}.npz"
    case = Case("own", strategy, 2, "sgd", UNEVEN, (*FP16, "train.steps=2", data))
    before = replace(case, extra=(*FP16, "train.steps=1", data))
    found, first = run(case), run(before)
    norms = [line["grad_norm"] for line in found.lines]
    assert norms[0] is not None
    assert norms[1] is None
    for path, copies in first.values.items():  # the second step moved nothing, anywhere
        for one, other in zip(copies, found.values[path], strict=True):
            assert (one == other).all(), path


def test_what_overflows_at_every_scale_fails(run: Fp16Run) -> None:
    data = f"data.path={run.folder / 'spoilt'}.npz"
    extra = (*FP16, "train.loss_scale=1", data)
    with pytest.raises(JobFailed, match="not finite in fp16, even with a loss scale of 1"):
        run(Case("own", "dp", 2, "sgd", UNEVEN, extra))


# --- Engines -------------------------------------------------------------------------------------


def updated(clip: float, scale: float | None) -> tuple[float, list[float], list[list[float]]]:
    """The norm, the weights after one SGD step, and what `on_gradients` saw, of a loss x . w."""
    torch.manual_seed(0)
    module = nn.Linear(3, 1, bias=False)
    nn.init.ones_(module.weight)
    optimizer = make_optimizer("sgd", {"lr": 1.0})
    engine = TorchEngine(
        module, Copies(dist.group.WORLD), optimizer, "fp32", torch.device("cpu"),
        may_skip_parameters=False,
    )  # fmt: skip
    seen: list[list[float]] = []
    engine.on_gradients = lambda: seen.extend(
        g.flatten().tolist() for _, g in engine.gradients() if g is not None
    )
    loss = engine(torch.tensor([[1.0, 2.0, 2.0]])).sum() / dist.get_world_size()
    engine.backward([loss], [torch.full_like(loss, scale or 1.0)])
    norm = update([engine], clip, True, None, None if scale is None else torch.tensor(scale))
    assert norm is not None
    return float(norm), module.weight.flatten().tolist(), seen


@pytest.mark.parametrize("scale", [pytest.param(None, marks=pytest.mark.full), 1024.0])
@pytest.mark.parametrize(
    ("clip", "factor"),
    [
        pytest.param(0.0, 1.0, marks=pytest.mark.full),
        (1.5, 0.5),
        pytest.param(6.0, 1.0, marks=pytest.mark.full),
    ],
)
def test_scale_and_clip_in_one(scale: float | None, clip: float, factor: float) -> None:
    for norm, weights, seen in run_ranks(updated, 2, clip, scale):
        assert norm == pytest.approx(3.0)
        assert seen == [pytest.approx([1.0, 2.0, 2.0])]
        assert weights == pytest.approx([1 - factor, 1 - 2 * factor, 1 - 2 * factor], abs=1e-5)


def test_infinite_gradients_move_nothing() -> None:
    for norm, weights, _ in run_ranks(updated, 2, 0.0, 2.0**127):
        assert norm == float("inf")
        assert weights == [1.0, 1.0, 1.0]


def reduced_when(by_memory: bool) -> list[float]:
    """The gradient a rank holds after each of two backwards, of which the first accumulates."""
    module = nn.Linear(1, 1, bias=False)
    ranks = list(range(dist.get_world_size()))
    sums = SharedMemoryGroup.new(ranks, timedelta(seconds=60), "sums") if by_memory else None
    engine = TorchEngine(
        module, Copies(dist.group.WORLD, sums=sums), make_optimizer("sgd", {"lr": 1.0}), "fp32",
        torch.device("cpu"), may_skip_parameters=False,
    )  # fmt: skip
    x = torch.full((1, 1), float(dist.get_rank() + 1))
    found = []
    for context in (engine.accumulating(), torch.enable_grad()):
        with context:
            out = engine(x).sum()
            engine.backward([out], [torch.ones_like(out)])
        assert module.weight.grad is not None
        found.append(float(module.weight.grad))
    return found


@pytest.mark.parametrize("by_memory", [pytest.param(False, marks=pytest.mark.full), True])
def test_accumulated_gradients_are_reduced_once_by_the_last_backward(by_memory: bool) -> None:
    first, second = run_ranks(reduced_when, 2, by_memory)
    # Their own, twice where averaging will halve it, then 2 x (1 + 2) on both.
    times = 1.0 if by_memory else 2.0
    assert first == [times, 6.0]
    assert second == [2 * times, 6.0]
