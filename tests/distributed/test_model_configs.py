"""The named models of conf/model have the sizes they are named for, without a byte of weights."""

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from whale_train.config import Request, read_request
from whale_train.errors import PlanError
from whale_train.launcher.compose.command_line import composed, rewritten
from whale_train.launcher.planning.plan_request import resolve_request
from whale_train.models.build import build_model
from whale_train.models.options import ModelOptions


def named_model(name: str) -> nn.Module:
    mapping = OmegaConf.to_container(composed([f"model={name}"]).model)
    assert isinstance(mapping, dict)
    options = ModelOptions.from_mapping({str(key): value for key, value in mapping.items()})
    with torch.device("meta"):
        return build_model(options)


def elements_of(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "billions"),
    [("bert_large", 0.335), ("t5_large", 0.738), ("gpt3_175b", 174.6), ("llama3_405b", 405.9)],
)
def test_a_named_model_has_its_size(name: str, billions: float) -> None:
    pytest.importorskip("transformers")
    assert elements_of(named_model(name)) / 1e9 == pytest.approx(billions, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "layers", "experts", "hidden", "ffn", "billions"),
    [
        ("m6_10b", 10, 128, 1024, 4096, 10),
        ("m6_100b", 24, 512, 1024, 4096, 100),
        ("m6_1t", 24, 960, 1024, 21248, 1_000),
        ("m6_10t", 48, 10_240, 1024, 9984, 10_000),
    ],
)
def test_m6_has_the_experts_of_its_printed_sizes(
    name: str, layers: int, experts: int, hidden: int, ffn: int, billions: int
) -> None:
    model = named_model(name)
    stacks = [p for path, p in model.named_parameters() if ".experts." in path]
    assert sorted({tuple(stack.shape) for stack in stacks}) == sorted(
        [(experts, hidden, ffn), (experts, ffn, hidden)]
    )
    product = layers * experts * 2 * hidden * ffn
    assert sum(stack.numel() for stack in stacks) == product
    assert product / 1e9 == pytest.approx(billions, rel=0.08)
    # What is left: attention, router and norms of every block, tables of tokens and positions.
    block = 4 * hidden * hidden + 4 * hidden + experts * hidden + 4 * hidden
    tables = (2 * 257 + 512) * hidden + 2 * hidden
    assert elements_of(model) - product == layers * block + tables


def test_dense_m6_has_ten_billion() -> None:
    layers, hidden = 50, 4096
    model = named_model("m6_10b_dense")
    assert elements_of(model) == pytest.approx(layers * 12 * hidden**2, rel=2e-3)
    assert model.get_submodule("blocks.49.attention").heads == 128


def test_the_head_of_100_000_classes_is_most_of_its_resnet() -> None:
    pytest.importorskip("transformers")
    model = named_model("resnet50_100k")
    head = sum(p.numel() for path, p in model.named_parameters() if path.startswith("classifier"))
    assert head == 100_000 * (2048 + 1)
    # ResNet-50's 25.6 M parameters (He et al. 2016) without its head of 1,000 classes.
    assert elements_of(model) - head == pytest.approx(25.557e6 - 1000 * 2049, rel=1e-3)


STAGES = "[" + ", ".join(["{split: {degree: 8}}"] * 8) + "]"
COPIES = f"{{replicate: {{zero: 1, of: {{pipeline: {{micro_batches: 16, stages: {STAGES}}}}}}}}}"


def giant(*overrides: str) -> Request:
    """A request to plan training on 512 samples of 512 tokens a step."""
    shapes = ("hardware=v100_512", "data.sequence_length=512", "train.global_batch=512")
    return read_request(composed(rewritten([*overrides, *shapes, "mode=plan"])), {})


def test_a_hundred_billion_are_planned_for_512_devices() -> None:
    plan = resolve_request(giant("model=m6_100b", f"strategy.graph={COPIES}")).plan
    assert len(plan.ranks) == 512
    assert max(rank.memory_bytes.total for rank in plan.ranks) < 32e9


def test_ten_trillion_are_refused_by_how_much_is_missing() -> None:
    request = giant("model=m6_10t", "strategy=zero3")
    with pytest.raises(PlanError, match=r"more than its 31\.0 GB"):
        resolve_request(request)
