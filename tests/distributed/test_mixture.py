"""The mixture of experts against a token at a time, and against what training asks of it."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from whale_train.data.images import ImagesOptions
from whale_train.data.open import open_dataset
from whale_train.models.grouped_product import grouped_mm
from whale_train.models.image_classifier import ImageClassifier
from whale_train.models.moe_gpt import Experts, MoEGPT, Router
from whale_train.models.options import ModelOptions
from whale_train.models.profile.measure import profile_model
from whale_train.strategies.graph.operation_graph import InputField

TOKENS, WIDTH, FFN, EXPERTS = 20, 8, 12, 9


def a_mixture(top_k: int) -> tuple[Router, Experts, Tensor]:
    torch.manual_seed(4)
    router, experts = Router(WIDTH, EXPERTS, top_k), Experts(WIDTH, FFN, EXPERTS)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    return router, experts, torch.randn(TOKENS, WIDTH, requires_grad=True)


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_experts_are_those_of_one_token_after_another(top_k: int) -> None:
    router, experts, tokens = a_mixture(top_k)
    probabilities = torch.softmax(tokens @ router.score.weight.t(), -1)
    rows = []
    for token, row in zip(tokens, probabilities, strict=True):
        best = torch.argsort(row.detach(), descending=True)[:top_k].tolist()
        hidden = [functional.gelu(token @ experts.expand[e]) @ experts.contract[e] for e in best]
        rows.append(sum(row[e] * each for e, each in zip(best, hidden, strict=True)))
    expected = torch.stack(rows)
    found = experts(tokens, *router(tokens))
    torch.testing.assert_close(found, expected)
    read = [tokens, *router.parameters(), *experts.parameters()]
    direction = torch.randn_like(found)
    gradients = [torch.autograd.grad(x, read, direction) for x in (found, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_expert_without_rows_has_no_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = torch.randn(6, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 8, 16, dtype=dtype, requires_grad=True)
    ends = torch.tensor([2, 2, 2, 6], dtype=torch.int32)
    product = grouped_mm(rows, weight, ends)
    torch.testing.assert_close(product[:2], rows[:2] @ weight[0], rtol=2e-2, atol=2e-2)
    product.backward(torch.randn_like(product))
    assert weight.grad is not None
    assert [bool(each.any()) for each in weight.grad] == [True, False, False, True]


def test_a_sample_does_not_see_the_others() -> None:
    torch.manual_seed(2)
    model = MoEGPT(vocab_size=31, width=16, depth=2, heads=2, ffn=24, experts=4)
    ids = torch.randint(31, (5, 12))
    torch.testing.assert_close(model(ids).logits[3:], model(ids[3:]).logits)


def test_the_work_of_experts_is_counted() -> None:
    """A token's rows through two matrices each, wherever its router sends it."""
    target = "whale_train.models.moe_gpt.MoEGPT"
    options = ModelOptions.from_mapping({"_target_": target, "depth": 2, "ffn": 64, "top_k": 3})
    fields = tuple(InputField(name, (32,), "int64", 257) for name in ("input_ids", "labels"))
    graph = profile_model(options, "moe", fields).graph
    assert graph is not None
    products = [op.flops for op in graph if "grouped_mm" in op.target]
    assert products == [2 * 32 * 3 * 128 * 64] * 4


def test_a_deep_mixture_is_folded() -> None:
    target = "whale_train.models.moe_gpt.MoEGPT"
    options = ModelOptions.from_mapping({"_target_": target, "depth": 7, "width": 16, "ffn": 16})
    fields = tuple(InputField(name, (12,), "int64", 257) for name in ("input_ids", "labels"))
    folded, whole = (profile_model(options, "moe", fields, by_folding=x) for x in (True, False))
    assert folded == whole
    assert whole.graph is not None


def test_an_image_model_learns_from_images() -> None:
    torch.manual_seed(0)
    dataset = open_dataset(ImagesOptions(num_classes=10, size=12))
    model = ImageClassifier(channels=3, width=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for step in range(40):
        batch = dataset.samples(np.arange(32 * step, 32 * (step + 1)))
        loss = model(**{name: torch.from_numpy(x) for name, x in batch.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 2
    assert sum(losses[-5:]) / 5 < 0.5
