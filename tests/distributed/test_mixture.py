"""The mixture of experts against a token at a time, and against what training asks of it."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from whale_train.data.open import open_dataset
from whale_train.data.sources.images import ImagesOptions
from whale_train.models.grouped_product import grouped_mm
from whale_train.models.image_classifier import ImageClassifier
from whale_train.models.moe_gpt import Experts, MoEGPT, Router, Routing
from whale_train.models.options import ModelOptions
from whale_train.models.profile.measure import profile_model
from whale_train.strategies.graph.operation_graph import InputField

TOKENS, WIDTH, FFN, EXPERTS = 20, 8, 12, 9


def a_mixture(routing: Routing) -> tuple[Router, Experts, Tensor]:
    """The hidden states are those of 5 samples of 4 tokens."""
    torch.manual_seed(4)
    router, experts = Router(WIDTH, routing), Experts(WIDTH, FFN, routing)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    return router, experts, torch.randn(5, TOKENS // 5, WIDTH, requires_grad=True)


def one_token_after_another(
    router: Router, experts: Experts, hidden: Tensor, routing: Routing
) -> tuple[Tensor, int]:
    """Return what the mixture makes of `hidden`, as [tokens, width], and the slots that found no
    room."""
    rows, dropped = [], 0
    for sample in hidden:
        taken = [0] * routing.experts
        for token in sample:
            row = torch.zeros(WIDTH)
            groups = (token @ router.score.weight.t()).view(routing.prototypes, routing.group)
            for number, probabilities in enumerate(torch.softmax(groups, -1)):
                best = torch.argsort(probabilities.detach(), descending=True)[: routing.top_k]
                for place in best.tolist():
                    e = number * routing.group + place
                    room = routing.capacity(len(sample))
                    taken[e] += 1
                    if room is not None and taken[e] > room:
                        dropped += 1
                        continue
                    made = functional.gelu(token @ experts.expand[e]) @ experts.contract[e]
                    row = row + probabilities[place] * made
            rows.append(row)
    return torch.stack(rows), dropped


@pytest.mark.parametrize(
    "routing",
    [
        *(Routing(EXPERTS, top_k) for top_k in (1, 2, EXPERTS)),
        *(Routing(EXPERTS, top_k, prototypes=3) for top_k in (1, 2)),
        Routing(EXPERTS, 2, capacity_factor=0.9),
        Routing(EXPERTS, 1, prototypes=3, capacity_factor=0.5),
    ],
    ids=lambda x: f"top_{x.top_k}_of_{x.prototypes}_with_room_{x.capacity_factor}",
)
def test_experts_are_those_of_one_token_after_another(routing: Routing) -> None:
    router, experts, hidden = a_mixture(routing)
    expected, dropped = one_token_after_another(router, experts, hidden, routing)
    assert (dropped > 0) == (routing.capacity_factor is not None)
    choice = router(hidden)
    assert int((choice.chosen == EXPERTS).sum()) == dropped
    found = experts(hidden.flatten(0, 1), choice.weights, choice.chosen)
    torch.testing.assert_close(found, expected)
    read = [hidden, *router.parameters(), *experts.parameters()]
    direction = torch.randn_like(found)
    gradients = [torch.autograd.grad(x, read, direction) for x in (found, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("over", ["batch", "sequence"])
@pytest.mark.parametrize("prototypes", [1, 3])
def test_the_loss_that_balances_is_that_of_loads_and_probabilities(
    over: str, prototypes: int
) -> None:
    routing = Routing(EXPERTS, 2, prototypes, balance=0.7, balance_over=over, z_loss=0.3)
    router, _, hidden = a_mixture(routing)
    logits = (hidden @ router.score.weight.t()).view(5, -1, prototypes, routing.group)
    likely = torch.softmax(logits, -1)
    chosen = functional.one_hot(likely.topk(2, -1).indices, routing.group).sum(3).double()
    share = chosen.mean((0, 1), keepdim=True) if over == "batch" else chosen.mean(1, keepdim=True)
    # Every token asks for two of a group, so that shares add up to 2.
    unbalance = routing.group * (share / 2 * likely).sum(-1).mean((1, 2))
    large = torch.logsumexp(logits, -1).square().mean((1, 2))
    expected = (0.7 * unbalance + 0.3 * large).float()
    torch.testing.assert_close(router(hidden).auxiliary, expected)


def test_the_bias_moves_against_the_load() -> None:
    routing = Routing(4, 1, bias_rate=0.5)
    router = Router(2, routing)
    with torch.no_grad():
        router.score.weight.copy_(torch.tensor([[3.0, 0], [0, 3.0], [-9.0, -9.0], [-9.0, -9.0]]))
    hidden = torch.tensor([[[1.0, 0], [1.0, 0.1], [0.9, 0], [0, 1.0]]])
    assert router(hidden).chosen.flatten().tolist() == [0, 0, 0, 1]
    # Two tokens an expert would be above the mean of one, none below, and one is just that.
    assert router.bias.tolist() == [-0.5, 0.0, 0.5, 0.5]
    router(hidden)
    router.eval()
    before = router.bias.tolist()
    choice = router(hidden)
    assert router.bias.tolist() == before
    # It decides who is chosen; what they count is their probability.
    assert choice.chosen.flatten().tolist() != [0, 0, 0, 1]
    likely = torch.softmax(router.score(hidden).float(), -1).flatten(0, 1)
    torch.testing.assert_close(choice.weights, likely.gather(1, choice.chosen))


def test_prototypes_have_as_many_slots_as_top_k() -> None:
    for routing in (Routing(8, 2), Routing(8, 1, prototypes=2)):
        torch.manual_seed(0)
        made = Router(WIDTH, routing)(torch.randn(3, 4, WIDTH))
        assert routing.slots == 2
        assert made.chosen.shape == made.weights.shape == (12, 2)
        assert routing.capacity(4) is None
    groups = made.chosen // 4
    assert groups.tolist() == [[0, 1]] * 12


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prototypes": 3}, "experts=8 do not divide into prototypes=3"),
        ({"prototypes": 4, "top_k": 3}, "top_k=3 is not between 1 and the 2 experts of each of"),
        ({"top_k": 9}, "top_k=9 is not between 1 and experts=8"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0 is not above 0"),
        ({"balance_over": "all"}, "balance_over=all is neither batch nor sequence"),
        ({"z_loss": -1.0}, "z_loss=-1.0 is below 0"),
    ],
)
def test_what_does_not_fit_together_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Routing(**{"experts": 8, "top_k": 2, **options})


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


@pytest.mark.full  # test_folding asks it of one whose blocks share their weights, and of Mixtral
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
