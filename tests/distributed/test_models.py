"""The models as torch modules: exported against eager, and their first weights."""

import copy
from collections.abc import Callable
from importlib.util import find_spec
from math import log, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from whale_train.models.build import build_model
from whale_train.models.class_head import ClassHead
from whale_train.models.gpt import GPT
from whale_train.models.image_classifier import ImageClassifier
from whale_train.models.loss_module import LossModule
from whale_train.models.options import HUGGING_FACE, ModelOptions

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)

LLAMA = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def hugging_face_options(name: str, **options: Any) -> ModelOptions:
    return ModelOptions.from_mapping(
        {"_target_": HUGGING_FACE, "architecture": name, "loss": "model", **options}
    )


def options_of(target: str, **options: Any) -> ModelOptions:
    return ModelOptions.from_mapping({"_target_": target, **options})


def tokens(samples: int, vocabulary: int = 31, length: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(vocabulary, (samples, length))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def images(samples: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(samples, 1, 8, 8), "labels": torch.arange(samples) % 10}


def vectors(samples: int) -> dict[str, Tensor]:
    return {"features": torch.randn(samples, 256), "labels": torch.arange(samples) % 50}


def on_meta(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in batch.items()}


def exported(module: nn.Module, batch: dict[str, Tensor]) -> nn.Module:
    shapes = {name: {0: Dim("batch")} for name in batch}
    program = torch.export.export(module, (), batch, dynamic_shapes=shapes, strict=False)
    return program.module()


REFERENCE: dict[str, tuple[ModelOptions, Callable[[int], dict[str, Tensor]]]] = {
    "gpt": (
        options_of("whale_train.models.gpt.GPT", vocab_size=31, width=16, depth=2, heads=2),
        tokens,
    ),
    "gpt_tied": (
        options_of("whale_train.models.gpt.GPT", vocab_size=31, width=16, depth=1, tied=True),
        tokens,
    ),
    "moe_gpt": (
        options_of(
            "whale_train.models.moe_gpt.MoEGPT",
            **{"vocab_size": 31, "width": 16, "depth": 2, "heads": 2, "ffn": 24, "experts": 5},
        ),
        tokens,
    ),
    "image_classifier": (
        options_of("whale_train.models.image_classifier.ImageClassifier", width=4, depth=4),
        images,
    ),
    "class_head": (
        options_of("whale_train.models.class_head.ClassHead", num_classes=50),
        vectors,
    ),
    "class_head_cross_entropy": (
        options_of("whale_train.models.class_head.ClassHead", num_classes=50, loss="cross_entropy"),
        vectors,
    ),
    "llama": (hugging_face_options("LlamaForCausalLM", config=LLAMA), tokens),
}
NAMES = [
    pytest.param(name, marks=needs_transformers if options.is_hugging_face else ())
    for name, (options, _) in REFERENCE.items()
]


@pytest.mark.parametrize("name", NAMES)
def test_exported_on_meta_for_any_batch(name: str) -> None:
    """The program has no batch size in it, and every parameter it was built with."""
    options, batch_of = REFERENCE[name]
    with torch.device("meta"):
        module = LossModule(build_model(options), options)
    program = exported(module, on_meta(batch_of(3)))
    assert {n for n, _ in program.named_parameters()} == {n for n, _ in module.named_parameters()}
    for samples in (1, 5):
        assert program(**on_meta(batch_of(samples))).shape == ()


@pytest.mark.parametrize("samples", [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("name", NAMES)
def test_exported_loss_and_gradients_are_the_models(name: str, samples: int) -> None:
    options, batch_of = REFERENCE[name]
    torch.manual_seed(5)
    module = LossModule(build_model(options), options)
    # BatchNorm's running statistics move: each side gets its own copy.
    program = exported(copy.deepcopy(module), batch_of(4))
    batch = batch_of(samples)
    losses = module(**batch), program(**batch)
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    gradients = {n: p.grad for n, p in program.named_parameters()}
    for path, parameter in module.named_parameters():
        torch.testing.assert_close(gradients[path], parameter.grad)


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_is_the_weights(name: str) -> None:
    options, _ = REFERENCE[name]
    first, again, other = (_seeded(options, seed) for seed in (3, 3, 4))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[path], again[path]) for path in first)
    assert any(not torch.equal(first[path], other[path]) for path in first)


def _seeded(options: ModelOptions, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return dict(build_model(options).state_dict())


def test_gpt_starts_as_gpt2_does() -> None:
    torch.manual_seed(0)
    model = GPT(width=128, depth=8, heads=4)
    block = model.blocks[0]
    for weight in (model.token.weight, model.lm_head.weight, block.attention.qkv.weight):
        assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    for layer in (block.attention.projection, block.contract):
        assert float(layer.weight.detach().std()) == pytest.approx(0.02 / sqrt(16), rel=0.05)
        assert not layer.bias.any()
    batch = {"input_ids": torch.randint(257, (8, 128))}
    # Nothing learned: every token is as likely as any other.
    loss = model(**batch, labels=batch["input_ids"]).loss
    assert float(loss.detach()) == pytest.approx(log(257), abs=0.1)


def test_gpt_loss_is_of_the_next_token_that_counts() -> None:
    torch.manual_seed(1)
    model = GPT(vocab_size=31, width=16, depth=1, heads=2)
    batch = tokens(2)
    loss, logits = model(**batch)
    picked = []
    for sample in range(2):
        for place in range(11):
            label = int(batch["labels"][sample, place + 1])
            if label != -100:
                picked.append(-torch.log_softmax(logits[sample, place], dim=-1)[label])
    assert len(picked) == 22 - 3
    torch.testing.assert_close(loss, torch.stack(picked).mean())


def test_gpt_looks_back_only() -> None:
    torch.manual_seed(1)
    model = GPT(vocab_size=31, width=16, depth=2, heads=2)
    ids = torch.randint(30, (1, 12))
    changed = ids.clone()
    changed[0, 7] = 30
    moved = (model(ids).logits != model(changed).logits).any(dim=-1)[0]
    assert not moved[:7].any()
    assert moved[7:].all()


def test_gpt_dropout_is_random_in_training_only() -> None:
    torch.manual_seed(1)
    model = GPT(vocab_size=31, width=16, depth=1, heads=2, dropout=0.5)
    ids = torch.randint(31, (1, 12))
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_tied_gpt_has_one_weight_for_both_ends() -> None:
    model = GPT(vocab_size=31, width=16, depth=1, heads=2, tied=True)
    apart = GPT(vocab_size=31, width=16, depth=1, heads=2)
    assert model.lm_head.weight is model.token.weight
    assert apart.lm_head.weight is not apart.token.weight
    count = [sum(p.numel() for p in m.parameters()) for m in (model, apart)]
    assert count[1] - count[0] == 31 * 16
    assert float(model.token.weight.detach().std()) == pytest.approx(0.02, rel=0.15)


def test_shapes_of_the_classifiers() -> None:
    head = ClassHead(num_classes=7)
    shapes = {path: tuple(p.shape) for path, p in head.named_parameters()}
    assert shapes == {
        "backbone.0.weight": (1024, 256),
        "backbone.0.bias": (1024,),
        "backbone.2.weight": (512, 1024),
        "backbone.2.bias": (512,),
        "head.weight": (7, 512),
        "head.bias": (7,),
    }
    images_model = ImageClassifier(num_classes=7, channels=3, width=4, depth=6)
    assert images_model.head.weight.shape == (7, 16)
    loss, logits = images_model(torch.randn(1, 3, 8, 8))
    assert (loss, logits.shape) == (None, (1, 7))
