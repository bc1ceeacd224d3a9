"""`mode=verify` finds every plan equal to one process, and nothing that is not.

Each test is a verification run as the command runs it, its two sides in one process after another;
some have an error put into the plan's side. What a comparison says of given tensors is tested on
files written here.

Run as a program, this file is the process that runs the sides: a line of JSON in, a run, a line
of JSON out.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tests.distributed.equality import run_host
from tests.distributed.served import Served, serve
from torch import Tensor, nn
from torch.nn import functional

from whale_train.config import OptimizerOptions, Request, read_request
from whale_train.errors import PlanError
from whale_train.launcher.compose import composed, rewritten
from whale_train.launcher.job import make_run_dir, on_one_process, only_steps, write_plan
from whale_train.launcher.resolve import resolve_request
from whale_train.launcher.verify import Verification, compare
from whale_train.models.build import build_model
from whale_train.models.loss import LossModule
from whale_train.runtime import worker
from whale_train.runtime.engine import Copies
from whale_train.runtime.optimizers import make_optimizer
from whale_train.runtime.verify import DropoutOff, part_of, slope_of
from whale_train.strategies.inventory import MachineFacts
from whale_train.strategies.plan import Plan, TaskGraph

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
        "memory_bandwidth_bytes_s: 9e11}}"
        for speed in (5, 3)
    )
    + "]",
    "launcher=emulate",
)
EVEN = ("hardware=cpu", "hardware.devices=2")


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
    """One process that runs sides; a side of one process is run once for equal requests."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._alone: dict[tuple[str, ...], Path] = {}
        self._process = Served(__file__)

    def verify(self, case: Case) -> Verification:
        run_dir = self._run([*case.overrides, *case.only_plan], False, case.fault)
        key = replace(case, strategy="dp", fault="", only_plan=(), hardware=EVEN).overrides
        if key not in self._alone:
            self._alone[key] = self._run(key, True, "")
        request = Request.from_json((self._alone[key] / "request.json").read_text())
        ranks = json.loads((run_dir / "plan.json").read_text())["world_size"]
        return compare(request, run_dir, self._alone[key], ranks)

    def _run(self, overrides: Sequence[str], alone: bool, fault: str) -> Path:
        self._count += 1
        run_dir = self._folder / f"side_{self._count}"
        failure = self._process.ask(
            overrides=list(overrides), alone=alone, fault=fault, run_dir=str(run_dir)
        )
        assert not failure, f"{' '.join(overrides)}\n{failure}"
        return run_dir

    def close(self) -> None:
        self._process.close()


def run_side(overrides: list[str], alone: bool, fault: str, run_dir: str) -> str:
    """One side of a verification, as the command runs it; why it failed."""
    config = composed(rewritten(overrides))
    request = only_steps(read_request(config, {"hardware": "inventory", "strategy": "strategy"}))
    resolved = resolve_request(request.model_copy(update={"mode": "train"}))
    if alone:
        request, resolved = on_one_process(request, resolved)
    folder = make_run_dir(request, Path(run_dir))
    write_plan(folder, resolved)
    if fault == "swapped_shards":
        swap_shards(folder / "plan.json")
    return run_host(folder, run_steep_rank if fault == "steep" else worker.run_rank)


def run_steep_rank(run_dir: Path, rank: int, world_size: int, prepared: worker.Prepared) -> None:
    """A rank whose losses are right, and their gradients a thousandth too large."""
    right = LossModule._loss_of

    def steeper(module: LossModule, batch: dict[str, Tensor]) -> Tensor:
        loss = right(module, batch)
        return loss + (loss - loss.detach()) * 1e-3

    LossModule._loss_of = steeper  # type: ignore[method-assign]
    worker.run_rank(run_dir, rank, world_size, prepared)


def swap_shards(path: Path) -> None:
    """Give either rank the weights of the other's shard; the graph is cut as it was."""
    plan = json.loads(path.read_text())
    for task_graph in plan["task_graphs"]:
        task_graph["shards"] = {k: v[::-1] for k, v in task_graph["shards"].items()}
    path.write_text(json.dumps(plan))


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    sides = Sides(tmp_path_factory.mktemp("verify"))
    yield sides
    sides.close()


# --- Whole verifications -------------------------------------------------------------------------

EQUAL = [
    *(
        Case("gpt", strategy, optimizer)
        for strategy in ("dp", "zero1", "zero2", "zero3", "zero2_offload", "hybrid_split_dp")
        for optimizer in ("sgd", "adamw")
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
        )
    ),
    Case("gpt", "zero2", "adamw", UNEVEN, ("train.grad_clip=0.3",)),
    Case("gpt", "zero3_offload", "adamw", UNEVEN, ("train.grad_clip=0.3",)),
    *(
        Case("gpt", strategy, "adamw", UNEVEN, ("train.precision=bf16",))
        for strategy in ("dp", "zero1", "zero2", "zero3", "hybrid_split_dp")
    ),
]


@pytest.mark.parametrize("case", EQUAL, ids=str)
def test_a_plan_is_one_process(sides: Sides, case: Case) -> None:
    found = sides.verify(case)
    assert found.equal, found.to_json()
    # What is compared is all there is to train: three differences a parameter, and two a step.
    trained = trained_paths(case)
    assert {x.path for x in found.differences if x.path} == trained
    assert len(found.differences) == 3 * len(trained) + 2 * STEPS
    assert found.dropout_off == (case.model in ("gpt2", "bert"))
    assert not found.drew_random
    assert len(found.losses[0]) == len(found.losses[1]) == STEPS
    # Nearly everything is compared for what it is, however small Adam's eps.
    if "train.precision=bf16" not in case.extra:
        assert found.undecided <= 0.01 * found.elements


def trained_paths(case: Case) -> set[str]:
    """The parameters of the case's model, which all get a gradient."""
    config = composed(rewritten(list(case.overrides)))
    model = build_model(read_request(config, {}).model)
    return {path for path, _ in model.named_parameters()}


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


@pytest.mark.parametrize(("case", "what"), WRONG, ids=str)
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


# --- Comparisons of tensors given here -----------------------------------------------------------

_SAID = {"dropout_off": False, "drew_random": False, "largest": {"w": 2.0}}


def one_step() -> Request:
    overrides = [*Case("gpt", "dp", "sgd").overrides, "verify.steps=1"]
    return read_request(composed(rewritten(overrides)), {})


def write_side(
    folder: Path, parts: Sequence[tuple[Any, Mapping[str, Any]]], loss: float = 1.0
) -> Path:
    """A run of one step with one parameter `w` of shape [2, 6]; per rank the columns it holds and
    its tensors."""
    (folder / "verify").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(
        json.dumps({"loss": loss, "grad_norm": 1.0, "lr": 0.1}) + "\n"
    )
    for rank, (columns, tensors) in enumerate(parts):
        said = {**_SAID, "parts": {"w": {"shape": [2, 6], "index": [None, columns]}}}
        (folder / f"verify/rank_{rank}.json").write_text(json.dumps(said))
        arrays = {f"{k}/w": np.array(x, dtype=np.float32, order="C") for k, x in tensors.items()}
        save_file(arrays, folder / f"verify/rank_{rank}.safetensors")
    return folder


def whole_tensors() -> dict[str, Any]:
    draw = np.random.default_rng(3)
    initial, gradient = draw.normal(size=(2, 6)), draw.uniform(-2, 2, size=(2, 6))
    final = initial - 0.1 * gradient
    return {"initial": initial, "gradient": gradient, "final": final}


def columns_of(tensors: Mapping[str, Any], columns: Sequence[int]) -> dict[str, Any]:
    return {k: x[:, list(columns)] for k, x in tensors.items()}


def compared(
    folder: Path, parts: Sequence[tuple[Any, Mapping[str, Any]]], loss: float = 1.0
) -> Verification:
    alone = write_side(folder / "alone", [(None, whole_tensors() | {"sensitivity": 0.1})])
    side = write_side(folder / "side", parts, loss)
    return compare(one_step(), side, alone, len(parts))


# A fused weight of two pieces of three columns, cut two to one.
FUSED = (([[0, 2], [3, 5]], (0, 1, 3, 4)), ([[2, 3], [5, 6]], (2, 5)))


def test_shards_of_several_intervals_and_copies_are_put_together(tmp_path: Path) -> None:
    whole = whole_tensors()
    shards = [(index, columns_of(whole, columns)) for index, columns in FUSED]
    found = compared(tmp_path, [*shards, *shards])
    assert found.equal, found.differences
    # fp32 in the files; and the update is a difference of two of them.
    assert max(x.difference for x in found.differences) < 1e-6
    assert found.elements == 12


def test_a_part_is_where_the_plan_cuts_it() -> None:
    """A fused weight of two times (8 and 4) columns, cut along 4 units, three to one; and rows."""
    task_graph = TaskGraph(
        *(0, "model", "split", "strategy.graph.split", (), ("fused", "plain"), 0.0, 0, {}),
        replicas=((4, 5), (6, 7)),
        shares=(2, 2),
        shards={"fused": ((0, 3), (3, 4)), "plain": ((0, 5), (5, 7))},
        shard_dims={"fused": 1, "plain": 0},
        shard_layouts={"fused": {"dim": 1, "axis": "heads", "outer": 2, "pieces": (8, 4)}},
    )
    ranks = [SimpleNamespace(task_graphs=(1,))] * 8
    plan = cast(Plan, SimpleNamespace(task_graphs=(None, task_graph), ranks=ranks))
    first = part_of(plan, 6, "fused", (3, 18))
    assert first == {"shape": [3, 24], "index": [None, [(0, 6), (8, 11), (12, 18), (20, 23)]]}
    second = part_of(plan, 5, "fused", (3, 6))
    assert second == {"shape": [3, 24], "index": [None, [(6, 8), (11, 12), (18, 20), (23, 24)]]}
    assert part_of(plan, 7, "plain", (2, 9)) == {"shape": [7, 9], "index": [[(5, 7)], None]}
    assert part_of(plan, 7, "norm", (9,)) == {"shape": [9], "index": [None]}


def test_shards_in_the_others_place_are_found(tmp_path: Path) -> None:
    whole = whole_tensors()
    shards = [([[0, 3]], columns_of(whole, (3, 4, 5))), ([[3, 6]], columns_of(whole, (0, 1, 2)))]
    found = compared(tmp_path, shards)
    assert {x.what for x in found.differences if not x.within} == {
        *("initial value", "gradient", "update")
    }
    assert found.worst is not None
    assert found.worst.what == "initial value"
    expected = np.abs(whole["initial"][:, :3] - whole["initial"][:, 3:]).max()
    assert found.worst.difference == pytest.approx(expected, rel=1e-6)
    assert found.worst.of_allowed == np.inf
    written = json.dumps(found.to_json(), allow_nan=False)
    assert json.loads(written)["worst"] == "w"


def test_one_copy_that_drifts_is_found(tmp_path: Path) -> None:
    other = whole_tensors()
    other["final"][1, 2] += 1e-3
    found = compared(tmp_path, [(None, whole_tensors()), (None, other)])
    wrong = [x for x in found.differences if not x.within]
    assert [x.what for x in wrong] == ["update"]
    assert wrong[0].apart == pytest.approx(1e-3, rel=1e-3)


def test_what_nobody_holds_is_found(tmp_path: Path) -> None:
    found = compared(tmp_path, [([[0, 4]], columns_of(whole_tensors(), range(4)))])
    assert not any(x.within for x in found.differences if x.path)
    assert found.to_json()["differences"][0]["difference"] is None


def test_no_number_is_not_equal(tmp_path: Path) -> None:
    other = whole_tensors()
    other["gradient"][0, 0] = np.nan
    found = compared(tmp_path, [(None, other)], loss=float("nan"))
    assert {x.what for x in found.differences if not x.within} == {"gradient", "loss"}
    assert found.parted is not None
    assert found.parted.step == 1


def test_one_process_that_cannot_hold_the_model_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 classes take 0.8 GB of weights, gradients and Adam's state; 16 devices hold them."""
    small_host = MachineFacts(2, 500_000_000, (), None)
    monkeypatch.setattr("whale_train.launcher.job.machine_facts", lambda faults: small_host)
    overrides = ["model=class_head", "model.num_classes=100000", "data=classes", "mode=verify"]
    overrides += ["strategy=hybrid_split_dp", "hardware=v100_p100_mix", "optimizer=adamw"]
    request = only_steps(read_request(composed(rewritten(overrides)), {}))
    resolved = resolve_request(request)
    with pytest.raises(PlanError) as raised:
        on_one_process(request, resolved)
    first, *others = raised.value.faults
    assert str(first) == (
        "mode=verify compares with one process, which cannot hold this model and batch; verify a "
        "smaller model or train.global_batch"
    )
    assert others  # what does not fit, and by how much


# --- What it stands on ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "adam", "lamb", "sgd"])
def test_the_sensitivity_bounds_what_errors_of_gradients_make_of_updates(name: str) -> None:
    """Against torch's optimizer, given gradients of all sizes with and without errors."""
    torch.manual_seed(0)
    options = OptimizerOptions.model_validate(
        {"name": name, "lr": 1e-3, "momentum": 0.9 if name == "sgd" else 0.0}
    )
    error, elements, steps = 1e-6, 4000, 4
    sizes = 10 ** torch.linspace(-5, 0, elements)
    gradients = [sizes * torch.randn(elements) for _ in range(steps)]
    errors = [error * torch.sign(torch.randn(elements)) for _ in range(steps)]

    def trained(given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        parameter = nn.Parameter(torch.full((elements,), 0.02, dtype=torch.float64))
        optimizer = make_optimizer(name, options.arguments())([parameter], Copies(None))
        slope = torch.zeros(elements)
        for step, gradient in enumerate(given):
            parameter.grad = gradient.double()
            optimizer.step()
            slope = slope + options.lr * slope_of(
                options, step + 1, optimizer.state[parameter], parameter
            )
        return parameter.detach(), slope

    right, sensitivity = trained(gradients)
    wrong, _ = trained([g + e for g, e in zip(gradients, errors, strict=True)])
    moved, allowed = (wrong - right).abs(), sensitivity * error
    # To first order: gradients of at least ten times the error.
    large = torch.stack(gradients).abs().min(0).values > 10 * error
    assert large.sum() > elements / 2
    assert (moved <= 1.2 * allowed)[large].all()
    # Of errors of random signs, some element's add up to a fair part of the bound.
    assert (moved / allowed)[large].max() > 0.3


def test_an_element_without_a_gradient_is_allowed_nothing() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.tensor([0.0, 1e-12])
    optimizer.step()
    options = OptimizerOptions(name="adamw", lr=1e-3)
    slope = slope_of(options, 1, optimizer.state[parameter], parameter)
    assert slope[0] == 0
    assert slope[1] > 1e7  # near 1 / eps


class Dropping(nn.Module):
    """Dropout in all the places torch has it."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Dropout(p), nn.AlphaDropout(p), nn.FeatureAlphaDropout(p))
        self.channels = nn.Dropout1d(p)
        self.attention = nn.MultiheadAttention(8, 2, p, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, 2, dropout=p, batch_first=True)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        x = self.channels(self.layers(x))
        x = x + self.attention(x, x, x)[0] + self.attention(x, x, x, need_weights=False)[0]
        x = functional.scaled_dot_product_attention(x, x, x, dropout_p=self.p)
        x = torch.feature_dropout(torch.dropout(x, self.p, True), self.p, True)
        recurrent: Tensor = self.recurrent(x)[0]
        return recurrent


def dropping(p: float) -> Dropping:
    torch.manual_seed(1)
    return Dropping(p)


def test_dropout_off_is_every_dropout_of_zero() -> None:
    x = torch.randn(3, 5, 8)
    with DropoutOff() as mode:
        found = dropping(0.5)(x)
    assert mode.met
    assert torch.equal(found, dropping(0.0)(x))
    with DropoutOff() as mode:
        dropping(0.0)(x)
    assert not mode.met


def test_dropout_off_reaches_exported_graphs() -> None:
    x = torch.randn(3, 5, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Dropout1d(0.5))
    graph = torch.export.export(model, (x,), strict=False).module()
    assert not torch.equal(graph(x), graph(x))
    with DropoutOff() as mode:
        before = torch.get_rng_state()
        assert torch.equal(graph(x), model[0](x))
        assert torch.equal(before, torch.get_rng_state())
    assert mode.met


if __name__ == "__main__":
    serve(run_side)
