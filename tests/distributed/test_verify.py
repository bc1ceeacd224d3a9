"""`mode=verify` finds every plan equal to one process, and nothing that is not.

Each test is a verification run as the command runs it, its two sides in one process after another;
some have an error put into the plan's side.
"""

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.distributed.equality import run_host
from tests.distributed.served import Served
from tests.pairs import covering
from torch import Tensor

from whale_train.config import Request, read_request
from whale_train.launcher.compose.command_line import composed, rewritten
from whale_train.launcher.modes.compare_runs import Verification, compare
from whale_train.launcher.modes.verify import on_one_process, only_steps
from whale_train.launcher.planning.plan_request import resolve_request
from whale_train.launcher.ranks.run_files import make_run_dir, start_ranks
from whale_train.models.build import build_model
from whale_train.models.loss_module import LossModule
from whale_train.runtime.process import rank_main as worker

# --- Running the two sides -----------------------------------------------------------------------

STEPS, GLOBAL_BATCH = 3, 8
_GPT = ("width=32", "depth=2", "heads=2", "sequence_length=16")
_GPT2 = "vocab_size: 256, n_positions: 16, n_embd: 32, n_layer: 2, n_head: 2"
_IDS = "bos_token_id: 0, eos_token_id: 0"
_BERT = (
    "vocab_size: 256, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 2, max_position_embeddings: 16"
)
TEXT = ("data=text", "data.sequence_length=16")
MODELS: dict[str, tuple[str, ...]] = {
    "gpt": ("model=gpt", *(f"model.{x}" for x in _GPT), *TEXT),
    "gpt_tied": ("model=gpt", *(f"model.{x}" for x in _GPT), "model.tied=true", *TEXT),
    # With its dropout of 0.1 in three places.
    "gpt2": (
        *("model=hf", "model.architecture=GPT2LMHeadModel"),
        *(f"model.config={{{_GPT2}, {_IDS}}}", *TEXT),
    ),
    "bert": (
        *("model=hf", "model.architecture=BertForMaskedLM"),
        *(f"model.config={{{_BERT}}}", *TEXT),
    ),
    "image_classifier": ("model=image_classifier", "data=digits"),
    "kinked": ("model._target_=kinked_model.Kinked", "data=classes", "data.num_classes=10"),
    "images": ("model=image_classifier", "data=images", "data.size=12", "model.channels=3"),
    "unreached": (
        *("model._target_=unused_model.Unreached", "model.loss=cross_entropy"),
        *("data=classes", "data.num_classes=10"),
    ),
}
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "sgd": (
        *("optimizer=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9"),
        "optimizer.weight_decay=0.05",
    ),
    # eps is torch's 1e-8: gradients that are rounding become whole steps.
    "adamw": ("optimizer=adamw", "optimizer.lr=1e-3", "optimizer.weight_decay=0.1"),
    "adam": ("optimizer=adam", "optimizer.lr=1e-3", "optimizer.weight_decay=0.1"),
}
UNEVEN = (
    "hardware=v100_p100_mix",
    "hardware.nodes=["
    + ", ".join(
        f"{{devices: 1, link: nvlink2, device: {{name: gpu_{speed}, "
        f"flops: {{fp32: {speed}e12, bf16: {speed}e12}}, memory_bytes: 16e9, "
        f"memory_bandwidth_bytes_s: {speed}e11}}}}"
        for speed in (5, 3)
    )
    + "]",
    "launcher=emulate",
)
EVEN = ("hardware=cpu", "hardware.devices=2")
ALONE = ("hardware=cpu", "hardware.devices=1")


@dataclass(frozen=True)
class Case:
    """A verification. `fault` is put into the plan's side, `only_plan` overrides only its
    request."""

    model: str
    strategy: str
    optimizer: str
    hardware: tuple[str, ...] = EVEN
    extra: tuple[str, ...] = ()
    fault: str = ""
    only_plan: tuple[str, ...] = ()

    def __str__(self) -> str:
        shares = "uneven" if self.hardware == UNEVEN else "even"
        parts = (self.model, self.strategy, shares, self.optimizer, self.fault)
        more = (x.rpartition(".")[2] for x in (*self.extra, *self.only_plan))
        return "-".join(filter(None, (*parts, *more)))

    @property
    def overrides(self) -> tuple[str, ...]:
        return (
            *MODELS[self.model],
            *(f"strategy={self.strategy}", *self.hardware, *OPTIMIZERS[self.optimizer]),
            *(f"train.steps={STEPS}", f"train.global_batch={GLOBAL_BATCH}", "mode=verify"),
            *self.extra,
        )


class Sides:
    """Runs sides in `served`, one of one process once for equal requests."""

    def __init__(self, folder: Path, served: Served) -> None:
        self._folder, self._count = folder, 0
        self._alone: dict[tuple[str, ...], Path] = {}
        self._served = served

    def verify(self, case: Case, roundings: Sequence[int] = ()) -> Verification:
        run_dir = self._run([*case.overrides, *case.only_plan], False, case.fault)
        ranks = json.loads((run_dir / "plan.json").read_text())["world_size"]
        return self.compared(case, run_dir, ranks, roundings)

    def compared(
        self, case: Case, run_dir: Path, ranks: int, roundings: Sequence[int] = ()
    ) -> Verification:
        """Compare the side of a plan that is in `run_dir` with one process."""
        alone, rounded = self.alone(case), [self.alone(case, seed) for seed in roundings]
        request = Request.from_json((alone / "request.json").read_text())
        return compare(request, run_dir, alone, ranks, request.train.precision or "fp32", rounded)

    def alone(self, case: Case, rounding: int | None = None) -> Path:
        """Return the folder of the side of one process, with other roundings or none."""
        overrides = replace(case, strategy="dp", fault="", only_plan=(), hardware=EVEN).overrides
        key = (*overrides, str(rounding))
        if key not in self._alone:
            self._alone[key] = self._run(overrides, True, "", rounding)
        return self._alone[key]

    def _run(
        self, overrides: Sequence[str], alone: bool, fault: str, rounding: int | None = None
    ) -> Path:
        self._count += 1
        run_dir = self._folder / f"side_{self._count}"
        asked = {"overrides": list(overrides), "alone": alone, "fault": fault}
        failure = self._served.ask(run_side, **asked, run_dir=str(run_dir), rounding=rounding)
        assert not failure, f"{' '.join(overrides)}\n{failure}"
        return run_dir


def run_side(
    overrides: list[str], alone: bool, fault: str, run_dir: str, rounding: int | None
) -> str:
    """One side of a verification, as the command runs it; why it failed."""
    config = composed(rewritten(overrides))
    request = only_steps(read_request(config, {"hardware": "inventory", "strategy": "strategy"}))
    resolved = resolve_request(request.model_copy(update={"mode": "train"}))
    if alone:
        request, resolved = on_one_process(request, resolved)
    folder = make_run_dir(request, Path(run_dir))
    start_ranks(folder, resolved, request, rounding=rounding)
    if fault == "swapped_shards":
        swap_shards(folder / "plan.json")
    faulty = {"steep": run_steep_rank, "share": run_rank_of_a_larger_share}
    return run_host(folder, faulty.get(fault, worker.run_rank))


def run_steep_rank(run_dir: Path, rank: int, world_size: int, prepared: worker.Prepared) -> None:
    """A rank whose losses are right, and their gradients a thousandth too large."""
    _run_steeper(1e-3, run_dir, rank, world_size, prepared)


def run_rank_of_a_larger_share(
    run_dir: Path, rank: int, world_size: int, prepared: worker.Prepared
) -> None:
    """A rank that counts, if it is the first, an eighth too much."""
    _run_steeper(1 / 8 if rank == 0 else 0.0, run_dir, rank, world_size, prepared)


def _run_steeper(
    by: float, run_dir: Path, rank: int, world_size: int, prepared: worker.Prepared
) -> None:
    right = LossModule._loss_of

    def steeper(module: LossModule, batch: dict[str, Tensor]) -> Tensor:
        loss = right(module, batch)
        return loss + (loss - loss.detach()) * by

    LossModule._loss_of = steeper  # type: ignore[method-assign]
    worker.run_rank(run_dir, rank, world_size, prepared)


def swap_shards(path: Path) -> None:
    """Give either rank the weights of the other's shard; the graph is cut as it was."""
    plan = json.loads(path.read_text())
    for task_graph in plan["task_graphs"]:
        task_graph["shards"] = {k: v[::-1] for k, v in task_graph["shards"].items()}
    path.write_text(json.dumps(plan))


# --- Whole verifications -------------------------------------------------------------------------

EQUAL = [
    *(
        Case("gpt", strategy, optimizer)
        for strategy in ("dp", "zero1", "zero2", "zero3", "zero2_offload", "hybrid_split_dp")
        for optimizer in ("sgd", "adamw")
    ),
    # One device and its host.
    *(
        Case(
            "gpt", strategy, "adamw", ALONE, (f"train.precision={precision}", "train.grad_clip=0.1")
        )
        for strategy, precision in (("zero2_offload", "fp32"), ("zero3_offload", "bf16"))
    ),
    *(
        Case(model, strategy, optimizer, UNEVEN)
        for model, strategy, optimizer in (
            ("gpt2", "dp", "adamw"),
            ("gpt2", "zero3", "adamw"),
            ("gpt2", "hybrid_split_dp", "adamw"),
            ("bert", "zero1", "adam"),
            ("bert", "hybrid_split_dp", "sgd"),
            ("gpt_tied", "hybrid_split_dp", "adamw"),
            ("image_classifier", "dp", "adamw"),
            ("image_classifier", "zero2", "sgd"),
            ("images", "dp", "sgd"),
        )
    ),
    Case("gpt", "zero2", "adamw", UNEVEN, ("train.grad_clip=0.3",)),
    Case("gpt", "zero3_offload", "adamw", UNEVEN, ("train.grad_clip=0.3",)),
    *(
        Case("gpt", strategy, "adamw", UNEVEN, ("train.precision=bf16",))
        for strategy in ("dp", "zero1", "zero2", "zero3", "hybrid_split_dp")
    ),
]


def shown(case: Case) -> set[Hashable]:
    """Return what a verification shows: every strategy in fp32 and in bf16, where there are both;
    but what the host has of ZeRO 3, once. Devices that are alike have the faults below."""
    strategy = (case.strategy, "train.precision=bf16" in case.extra)
    return {
        # Copies in fp32 are those of data=images.
        *({strategy} - {("zero3_offload", False), ("dp", False)}),
        *({case.hardware} - {EVEN}),
        *(case.model, case.optimizer),
    }


@pytest.mark.parametrize("case", covering(EQUAL, shown), ids=str)
def test_a_plan_is_one_process(sides: Sides, case: Case) -> None:
    found = sides.verify(case)
    assert found.equal, found.to_json()
    # What is compared is all there is: four differences a parameter, one a buffer, two a step.
    trained, buffers = paths(case)
    assert {x.path for x in found.differences if x.what == "buffer"} == buffers
    assert {x.path for x in found.differences if x.path} == trained | buffers
    assert len(found.differences) == 4 * len(trained) + len(buffers) + 2 * STEPS
    assert found.dropout_off == (case.model in ("gpt2", "bert"))
    assert not found.drew_random
    assert len(found.losses[0]) == len(found.losses[1]) == STEPS
    # Nearly everything is compared for what it is, however small Adam's eps.
    if "train.precision=bf16" not in case.extra:
        assert found.undecided <= 0.01 * found.elements


@pytest.mark.parametrize(
    ("strategy", "extra"),
    [
        ("dp", ()),
        ("zero3", ()),
        ("split", ()),
        ("pipeline", ("strategy.graph.pipeline.stages=2",)),
        ("hybrid_split_dp", ()),
    ],
)
def test_what_no_loss_depends_on_is_compared_under_every_plan(
    sides: Sides, strategy: str, extra: tuple[str, ...]
) -> None:
    found = sides.verify(Case("unreached", strategy, "sgd", only_plan=extra))
    assert found.equal, found.to_json()
    untrained = {x.path: x for x in found.differences if x.what == "untrained parameter"}
    layers = ("fixed", "spare")
    assert set(untrained) == {f"{x}.{part}" for x in layers for part in ("weight", "bias")}
    assert all(x.difference == 0 and x.largest > 0 for x in untrained.values())
    (rates,) = (x for x in found.differences if x.what == "buffer")
    assert (rates.path, rates.difference, rates.largest) == ("spare_rates", 0, 3)


def paths(case: Case) -> tuple[set[str], set[str]]:
    """The parameters of the case's model, which all get a gradient, and what a checkpoint has of
    its buffers."""
    config = composed(rewritten(list(case.overrides)))
    model = build_model(read_request(config, {}).model)
    trained = {path for path, _ in model.named_parameters()}
    return trained, set(model.state_dict(keep_vars=True)) & {
        path for path, _ in model.named_buffers()
    }


WRONG = [
    # Gradients a thousandth too large, which AdamW would hide in its updates.
    *(
        (Case("gpt", strategy, optimizer, hardware, fault="steep"), "gradient")
        for strategy, optimizer, hardware in (
            ("dp", "sgd", EVEN),
            ("zero1", "adamw", UNEVEN),
            ("zero3", "adamw", EVEN),
        )
    ),
    # An optimizer of other numbers.
    *(
        (Case("gpt", strategy, optimizer, only_plan=(f"optimizer.{other}",)), "update")
        for strategy, optimizer, other in (
            ("dp", "sgd", "weight_decay=0.055"),
            ("zero2", "sgd", "momentum=0.901"),
            ("dp", "adamw", "weight_decay=0.11"),
            ("zero2_offload", "adamw", "weight_decay=0.11"),
            ("zero1", "adamw", "lr=1.001e-3"),
            ("zero3", "adamw", "betas=[0.9,0.99]"),
        )
    ),
    # A head whose halves are on each other's rank.
    (Case("gpt", "hybrid_split_dp", "adamw", fault="swapped_shards"), "gradient"),
    (Case("gpt_tied", "hybrid_split_dp", "sgd", fault="swapped_shards"), "gradient"),
]


# Every fault, and other numbers of every optimizer.
SOME_WRONG = covering(WRONG, lambda row: {row[0].fault or row[0].optimizer})


@pytest.mark.parametrize(("case", "what"), SOME_WRONG, ids=str)
def test_what_is_not_one_process_is_found(sides: Sides, case: Case, what: str) -> None:
    found = sides.verify(case)
    assert not found.equal
    assert found.worst is not None
    assert found.worst.what == what
    wrong = {x.what for x in found.differences if x.path and not x.within}
    first_loss = next(x for x in found.differences if (x.what, x.step) == ("loss", 1))
    if case.fault == "steep":
        gradients = [x for x in found.differences if x.what == "gradient"]
        assert all(x.relative == pytest.approx(1e-3, rel=0.05) for x in gradients)
        norms = [x for x in found.differences if (x.what, x.step) == ("gradient norm", 1)]
        assert norms[0].relative == pytest.approx(1e-3, rel=0.01)
    assert ("gradient" in wrong) == (what == "gradient")
    # Only weights at the wrong place can be seen by the first loss.
    assert first_loss.within == (case.fault != "swapped_shards")
    if case.fault == "swapped_shards":
        head = "lm_head.weight" if case.model == "gpt" else "token.weight"
        wrong_gradients = [x for x in found.differences if x.what == "gradient" and not x.within]
        assert head in {x.path for x in wrong_gradients}
        assert found.parted == first_loss


@pytest.mark.parametrize("fault", ["", "steep", "share"])
def test_what_rounding_decides_is_told_from_a_fault(sides: Sides, fault: str) -> None:
    """A model with a kink, whose right gradients are off by more than the tolerance."""
    case = Case("kinked", "dp", "sgd", fault=fault)
    found = sides.verify(case, roundings=(1, 2))
    assert found.rounding["gradient", 1] > 5
    assert found.stretched > 2
    assert found.equal == (not fault), found.to_json()
    if not fault:
        assert not sides.verify(case).equal
