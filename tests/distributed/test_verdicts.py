"""What a verification compares beside the trained tensors, and what it allows for rounding."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed.recorded_sides import PLAIN, Left, asked, whole_tensors, write_side
from torch import nn

from whale_train.launcher.modes.compare_runs import compare
from whale_train.launcher.modes.verification import Verification
from whale_train.launcher.ui.show_verify import verdict_line
from whale_train.optimizer_options import OptimizerOptions
from whale_train.runtime.train.rounded_weights import RoundedWeights

# --- What one process has a number, a gradient or a buffer for -----------------------------------


def both(folder: Path, plan: Left, alone: Left) -> Verification:
    """Compare sides of one rank with the same `w`."""
    tensors = whole_tensors() | {"sensitivity": 0.1, "first": np.zeros((2, 6))}
    one = write_side(folder / "alone", [(None, tensors)], alone)
    side = write_side(folder / "side", [(None, tensors)], plan)
    return compare(asked(len(alone.losses)), side, one, 1)


def test_no_number_on_either_side_compares_with_nothing(tmp_path: Path) -> None:
    nothing = replace(PLAIN, losses=(float("nan"),))
    found = both(tmp_path, nothing, nothing)
    assert not found.equal
    assert found.not_finite == 1
    assert "of step 1 is no number on either side" in verdict_line(found)


def test_a_model_no_gradient_reaches_compares_with_nothing(tmp_path: Path) -> None:
    none = replace(PLAIN, largest=0.0)
    found = both(tmp_path, none, none)
    assert not found.equal
    assert "no gradient but 0 reached any parameter" in verdict_line(found)


def test_a_parameter_without_a_gradient_has_one_of_0(tmp_path: Path) -> None:
    tensors = whole_tensors() | {"sensitivity": 0.0}
    gradient = tensors.pop("gradient")
    still = tensors | {"final": tensors["initial"]}
    alone = write_side(tmp_path / "alone", [(None, still)])
    for name, given, equal in (
        ("none", still, True),
        ("zeros", still | {"gradient": np.zeros((2, 6))}, True),
        ("some", still | {"gradient": gradient}, False),
    ):
        side = write_side(tmp_path / name, [(None, given)])
        assert compare(asked(1), side, alone, 1).equal == equal, name


@pytest.mark.parametrize(
    ("buffer", "equal"),
    [
        ((((0, 3), [1.0, 2.0, 4.0]),), True),
        ((((0, 2), [1.0, 2.0]), ((2, 3), [4.0])), True),
        ((((0, 2), [1.0, 2.0]),), False),
        ((((0, 3), [1.0, 2.0, 4.0 + 1e-3]),), False),
        ((((0, 3), [1.0 + 1e-5, 2.0, 4.0]),), True),  # 2e-5 of 4
    ],
)
def test_buffers_are_compared(tmp_path: Path, buffer: Any, equal: bool) -> None:
    whole = replace(PLAIN, buffer=(((0, 3), [1.0, 2.0, 4.0]),))
    found = both(tmp_path, replace(PLAIN, buffer=buffer), whole)
    assert found.equal == equal
    assert [x.path for x in found.differences if not x.within] == ["b"] * (not equal)


def test_counters_are_compared_to_the_last_bit(tmp_path: Path) -> None:
    count = 2**40  # no fp32 has it
    sides = (replace(PLAIN, buffer=(((0, 1), [x]),)) for x in (count + 1, count))
    assert not both(tmp_path, *sides).equal


def test_steps_that_overflow_are_the_same_ones(tmp_path: Path) -> None:
    over = Left(losses=(1.0, 1.0), norms=(float("nan"), 1.0), skipped=(1,))
    assert both(tmp_path / "same", over, over).equal
    other = both(tmp_path / "other", Left((1.0, 1.0), (1.0, 1.0)), over)
    assert not other.equal
    assert "fp16 overflowed in other steps (none; on one process 1)" in verdict_line(other)


# --- What rounding does --------------------------------------------------------------------------


def with_roundings(
    folder: Path, plan: dict[str, Any], rounded: Sequence[dict[str, Any]], steps: int = 1
) -> Verification:
    """Compare a plan's `w` with one process, as runs with other roundings allow. Losses are under
    `losses`, and as whole_tensors() has all that is not given."""
    tensors = whole_tensors() | {"sensitivity": 0.1, "first_sensitivity": 0.1}
    if steps > 1:
        tensors["first"] = tensors["initial"] - 0.05 * tensors["gradient"]
    folders = []
    for number, given in enumerate([{}, plan, *rounded]):
        losses = given.get("losses", (1.0,) * steps)
        own = tensors | {k: x for k, x in given.items() if k != "losses"}
        left = replace(PLAIN, losses=losses, norms=(1.0,) * steps)
        folders.append(write_side(folder / str(number), [(None, own)], left))
    alone, side, *others = folders
    return compare(asked(steps), side, alone, 1, "fp32", others)


def moved(kind: str, by: float, place: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """`kind` of `w`, one element off by so much of the gradient's largest."""
    values = whole_tensors()[kind]
    values[place] += by * np.abs(whole_tensors()["gradient"]).max()
    return {kind: values}


def test_an_update_may_follow_what_is_allowed_of_its_gradient(tmp_path: Path) -> None:
    """As that of a bias before a batch norm, whose gradient is nothing but rounding."""
    plan = moved("gradient", 3e-3) | moved("final", -0.05 * 3e-3)
    elsewhere = moved("gradient", 2e-3, (1, 4))
    assert with_roundings(tmp_path / "follows", plan, [elsewhere]).equal
    assert not with_roundings(tmp_path / "alone", plan, [{}]).equal


def test_what_rounding_does_is_allowed_twice(tmp_path: Path) -> None:
    """A kink that a rounding decides, in the plan at another element than on one process."""
    kink, elsewhere = moved("gradient", 3e-3), moved("gradient", 2e-3, (1, 4))
    assert not with_roundings(tmp_path / "none", kink, []).equal
    assert not with_roundings(tmp_path / "still", kink, [{}, {}]).equal
    found = with_roundings(tmp_path / "found", kink, [{}, elsewhere])
    assert found.equal
    assert found.rounding["gradient", 1] == pytest.approx(2e-3 / 2e-5, rel=1e-3)
    assert found.stretched == pytest.approx(3e-3 / 2e-5, rel=1e-3)
    assert "or 2 times what rounding does to this model, 3.0e-03 at most" in verdict_line(found)
    assert not with_roundings(tmp_path / "more", moved("gradient", 4.1e-3), [elsewhere]).equal
    # Of gradients: an update, a loss or an initial value is allowed no more.
    for name, other in (
        ("update", moved("final", 1e-3)),
        ("loss", {"losses": (1.001,)}),
        ("initial", moved("initial", 1e-6)),
    ):
        assert not with_roundings(tmp_path / name, other, [elsewhere]).equal, name


def test_what_rounding_does_in_a_later_step_hides_nothing_in_an_earlier(tmp_path: Path) -> None:
    chaos = {"losses": (1.0, 1.1), **moved("final", 0.1)}
    late = with_roundings(tmp_path / "late", {"losses": (1.0, 1.15)}, [chaos], 2)
    assert late.equal
    early = with_roundings(tmp_path / "early", {"losses": (1.0001, 1.0)}, [chaos], 2)
    assert early.parted is not None
    assert (early.parted.step, early.equal) == (1, False)
    first = whole_tensors()["initial"] - 0.05 * whole_tensors()["gradient"]
    first[0, 0] += 1e-3
    update = with_roundings(tmp_path / "first", {"first": first}, [chaos], 2)
    assert [(x.what, x.step) for x in update.differences if not x.within] == [("update", 1)]


def test_rounding_may_decide_whether_an_element_gets_a_gradient(tmp_path: Path) -> None:
    """Adam makes a whole step of the first, which nothing bounds but Adam's steps."""
    initial = whole_tensors()["initial"] * [0, 1, 1, 1, 1, 1]
    slopes = np.full((2, 6), 0.1) * [0, 1, 1, 1, 1, 1]

    def of(*columns: int) -> dict[str, Any]:
        final = initial.copy()
        final[0, list(columns)] += 0.1  # the learning rate
        return {"initial": initial, "final": final, "sensitivity": slopes}

    request = asked(1).model_copy(update={"optimizer": OptimizerOptions(name="adamw", lr=0.1)})
    tensors = {"gradient": np.ones((2, 6))}
    alone = write_side(tmp_path / "alone", [(None, tensors | of())])
    side = write_side(tmp_path / "side", [(None, tensors | of(0))])
    rounded = write_side(tmp_path / "rounded", [(None, tensors | of(0))])
    assert not compare(request, side, alone, 1).equal
    assert compare(request, side, alone, 1, "fp32", [rounded]).equal
    other = write_side(tmp_path / "other", [(None, tensors | of(1))])
    assert not compare(request, other, alone, 1, "fp32", [rounded]).equal


def test_a_gradient_that_cancels_to_0_at_first_may_be_rounding(tmp_path: Path) -> None:
    """Adam's first step of an element that later gradients reach, and of one that none does."""
    slopes = {"sensitivity": np.full((2, 6), 0.1) * [1, 0, 1, 1, 1, 1]}
    slopes["first_sensitivity"] = slopes["sensitivity"] * [0, 1, 1, 1, 1, 1]
    tensors = whole_tensors() | slopes
    tensors["initial"] = tensors["final"] = np.zeros((2, 6))
    request = asked(2).model_copy(update={"optimizer": OptimizerOptions(name="adamw", lr=0.1)})
    left = replace(PLAIN, losses=(1.0, 1.0), norms=(1.0, 1.0))
    still = tensors | {"first": np.zeros((2, 6))}
    alone = write_side(tmp_path / "alone", [(None, still)], left)
    for column, equal in ((0, True), (1, False)):
        first = np.zeros((2, 6))
        first[0, column] = 0.1  # the learning rate
        side = write_side(tmp_path / str(column), [(None, tensors | {"first": first})], left)
        assert compare(request, side, alone, 1).equal == equal


def test_rounded_weights_are_put_back() -> None:
    weight, counter = nn.Parameter(torch.randn(100)), torch.arange(3)
    before, state = weight.detach().clone(), torch.get_rng_state()
    rounded = RoundedWeights([weight, counter], "fp32", seed=1)
    draws = []
    for _ in range(2):
        with rounded.moved():
            draws.append((weight.detach() / before - 1).abs())
            weight.sum().backward()
        assert torch.equal(weight.detach(), before)
    assert weight.grad is not None
    assert not torch.equal(*draws)
    assert 2**-23 < max(draws[0]) <= 8 * 2**-24 + 2**-24
    assert torch.equal(torch.get_rng_state(), state)
