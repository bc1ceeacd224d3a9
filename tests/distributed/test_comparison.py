"""What a verification says of given tensors, and what its tolerances stand on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.distributed.recorded_sides import PLAIN, asked, whole_tensors, write_side
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from whale_train.config import read_request
from whale_train.errors import PlanError
from whale_train.launcher.compose.command_line import composed, rewritten
from whale_train.launcher.modes.compare_runs import compare
from whale_train.launcher.modes.verification import Verification
from whale_train.launcher.modes.verify import on_one_process, only_steps
from whale_train.launcher.planning.plan_request import resolve_request
from whale_train.optimizer_options import OptimizerOptions
from whale_train.runtime.base.copies import Copies
from whale_train.runtime.optim.optimizers import make_optimizer
from whale_train.runtime.state.blocks import Placement, placement
from whale_train.runtime.train.recorder import DropoutOff, slope_of
from whale_train.strategies.plan.plan import Plan, TaskGraph
from whale_train.strategies.plan.program import PlannedShard

# --- Comparisons of tensors given here -----------------------------------------------------------


def columns_of(tensors: Mapping[str, Any], columns: Sequence[int]) -> dict[str, Any]:
    return {k: x[:, list(columns)] for k, x in tensors.items()}


def compared(
    folder: Path, parts: Sequence[tuple[Any, Mapping[str, Any]]], loss: float = 1.0
) -> Verification:
    alone = write_side(folder / "alone", [(None, whole_tensors() | {"sensitivity": 0.1})])
    side = write_side(folder / "side", parts, replace(PLAIN, losses=(loss,)))
    return compare(asked(1), side, alone, len(parts))


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
        shard_layouts={
            "fused": PlannedShard(1, "heads", 2, (8, 4)),
            "plain": PlannedShard(0, "rows"),
        },
    )
    ranks = [SimpleNamespace(task_graphs=(1,))] * 8
    plan = cast(Plan, SimpleNamespace(task_graphs=(None, task_graph), ranks=ranks))
    first = placement(plan, 6, "fused", (3, 18))
    assert first == Placement((3, 24), (None, ((0, 6), (8, 11), (12, 18), (20, 23))))
    second = placement(plan, 5, "fused", (3, 6))
    assert second == Placement((3, 24), (None, ((6, 8), (11, 12), (18, 20), (23, 24))))
    assert placement(plan, 7, "plain", (2, 9)) == Placement((7, 9), (((5, 7),), None))
    assert placement(plan, 7, "norm", (9,)) == Placement((9,), (None,))


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
    assert found.not_finite is None  # one process has a number


def test_one_process_that_cannot_hold_the_model_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 classes take 0.8 GB of weights, gradients and Adam's state; 16 devices hold them."""
    monkeypatch.setattr("whale_train.launcher.modes.verify.memory_bytes", lambda: 500_000_000)
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


@pytest.mark.parametrize("by_tensor", [True, False])
def test_dropout_off_reaches_forwards_of_a_backward(by_tensor: bool) -> None:
    x = torch.randn(4, 8, requires_grad=True)

    def dropped(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5).sin()

    with DropoutOff():
        value = checkpoint(dropped, x, use_reentrant=False)
        total = value.sum()
        if by_tensor:
            total.backward()
        else:
            torch.autograd.backward([total, value], [None, torch.ones_like(value)])
    assert x.grad is not None
    torch.testing.assert_close(x.grad, x.detach().cos() * (1 if by_tensor else 2))


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
