"""A batch compared with its parts: what is found, in which models, and what is said of it."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.distributed.odd_models import CLASSES, TOKENS
from tests.distributed.test_odd_models import MODULES
from torch import Tensor
from transformers import CLIPConfig, CLIPModel

from whale_train.launcher.planning.compare_samples import _batches
from whale_train.models.batch_parts.compare_parts import Comparison, compare_parts
from whale_train.models.batch_parts.fixed_draws import FixedDraws
from whale_train.models.options import ModelOptions
from whale_train.models.profile.repeated_calls import first_difference, record_calls

PARTS = (8, 4)


def pool() -> dict[str, NDArray[np.generic]]:
    draw = np.random.default_rng(3)
    return {
        "points": draw.normal(size=(40, 6, 8)).astype(np.float32),
        "labels": draw.integers(0, CLASSES, 40),
        "ids": draw.integers(0, TOKENS, (40, 6)),
        "weights": draw.uniform(0.2, 2.0, 40).astype(np.float32),
    }


def compared(name: str, *, one_copy: bool = False, loss_over: str | None = None) -> Comparison:
    target = {"_target_": f"{MODULES[name]}.{name}", "loss_over": loss_over}
    options = ModelOptions.from_mapping(target)
    batches = list(_batches(pool(), PARTS))
    return compare_parts(options, batches, PARTS, one_copy=one_copy, seed=0)


@pytest.mark.parametrize(
    "name",
    [
        *("SeveralLosses", "PicksByLabel", "GradientPenalty", "Packed", "Spectral", "CountsCalls"),
        *(
            pytest.param(name, marks=pytest.mark.full)  # test_odd_models has them as well
            for name in (
                *("BagOfTokens", "Normed", "CountsInPython", "Frozen", "ReversedGradient"),
                "Spectrum",
            )
        ),
    ],
)
def test_parts_that_make_up_their_batch(name: str) -> None:
    found = compared(name)
    assert found.different == ""
    assert found.of_parts == pytest.approx(found.loss, rel=2e-5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("WorstSample", "a batch's loss is "),
        ("MeanOfThoseMasked", "a batch's loss is "),
        ("WeightedMean", "a batch's loss is "),
        ("Bincount", "a batch's loss is "),
        ("HalvesContrasted", "a batch's loss is "),
        ("RemembersTheLast", "a batch's loss is "),
        ("ClampedGradient", "the gradient of head.weight has norm "),
        ("BranchesOnLoss", "it reads a number made of several samples: odd_models.py:"),
        ("BranchesOnInput", "a batch's loss is "),
    ],
)
def test_parts_that_do_not(name: str, said: str) -> None:
    assert compared(name).different.startswith(said)


def test_a_buffer_that_follows_the_batch_is_named() -> None:
    found = compared("RunningInstanceNorm").different
    assert found.startswith("copies on other samples keep another buffer norm.running_")


def test_micro_batches_share_what_moves_between_calls() -> None:
    assert compared("CountsCalls", one_copy=True).different.startswith("a batch's loss is ")


def test_a_sum_is_told_and_carried() -> None:
    found = compared("SumOfEntropies")
    assert found.remedy == "its parts add up: use model.loss_over=sum"
    assert compared("SumOfEntropies", loss_over="sum").different == ""
    assert compared("SeveralLosses", loss_over="sum").different.startswith("a batch's loss is ")


class Clip(CLIPModel):
    """A contrastive model that torch.export cannot trace: its loss has a label for every sample."""

    def __init__(self) -> None:
        part = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        part["num_attention_heads"] = 2
        text = {**part, "vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 2}
        vision = {**part, "image_size": 16, "patch_size": 8}
        super().__init__(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Any:
        return super().forward(input_ids, pixel_values, return_loss=True)


def test_a_contrastive_model_without_a_graph_is_refused() -> None:
    draw = np.random.default_rng(5)
    samples = {
        "input_ids": draw.integers(3, 64, (24, 8)),
        "pixel_values": draw.normal(size=(24, 3, 16, 16)).astype(np.float32),
    }
    options = ModelOptions.from_mapping({"_target_": f"{__name__}.Clip"})
    batches = list(_batches(samples, PARTS))
    found = compare_parts(options, batches, PARTS, one_copy=False, seed=0)
    assert found.different.startswith("a batch's loss is ")
    assert abs(found.of_parts / found.loss - 1) > 0.1


def test_batches_have_unlike_parts() -> None:
    """In the second batch one field's least are in the first part, and its largest in the other."""
    samples = {"x": np.zeros((40, 2)), "weights": np.arange(40.0)[::-1]}
    first, second = _batches(samples, PARTS)
    assert len(first["x"]) == len(second["weights"]) == 12
    assert second["weights"].tolist() == [*range(8), *range(36, 40)]


def test_draws_are_one_number() -> None:
    with FixedDraws():
        drawn = [torch.rand(3), torch.randn(2, 2), torch.empty(2).normal_()]
        order, whole = torch.randperm(4), torch.randint(3, 9, (5,))
    assert all(bool((x == 0.5).all()) for x in drawn)
    assert order.tolist() == [3, 2, 1, 0]  # and not the one there was
    assert len(set(whole.tolist())) == 1


def test_what_changes_from_call_to_call_is_said() -> None:
    calls = iter([1.0, 1.0, 2.0])
    x = torch.ones(2)

    def run() -> Tensor:
        return x * next(calls)

    one, two, three = (record_calls(run) for _ in range(3))
    assert first_difference(one, two) == ""
    assert first_difference(two, three) == "it gives mul 1.0 at first, and 2.0 when called again"
    assert first_difference(two, record_calls(run)) == ""  # it raises: there is nothing to compare
