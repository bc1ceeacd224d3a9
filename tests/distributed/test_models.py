"""The models as torch modules: exported against eager, their first weights, and what is refused."""

import copy
import sys
from collections.abc import Callable
from importlib.util import find_spec
from math import log, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from whale_train.errors import ConfigError
from whale_train.models.build import build_model, load_class
from whale_train.models.class_head import ClassHead
from whale_train.models.gpt import GPT
from whale_train.models.image_classifier import ImageClassifier
from whale_train.models.loss import MODEL_PREFIX, LossModule, forward_fields
from whale_train.models.options import HUGGING_FACE, ModelOptions
from whale_train.strategies.operations import InputField

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


@pytest.mark.parametrize("samples", [1, 3])
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


# The losses of LossModule


class Returns(nn.Module):
    """A user's model that returns what it was told to, made from its one weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        logits = self.layer(x)
        loss = logits.square().mean()
        return {
            "mapping": {"logits": logits, "loss": loss},
            "tuple": (None, loss, logits),
            "scalar": loss,
            "logits": logits,
            "logits_mapping": {"logits": logits},
            "text": "nothing",
        }[self.kind]


USERS = ModelOptions.from_mapping({"_target_": "users.Returns", "kind": "any"})
USERS_CROSS_ENTROPY = USERS.model_copy(update={"loss": "cross_entropy"})


@pytest.mark.parametrize("kind", ["mapping", "tuple", "scalar"])
def test_the_models_own_loss_is_found(kind: str) -> None:
    model = Returns(kind)
    x = torch.randn(5, 4)
    expected = (x @ model.layer.weight.T + model.layer.bias).pow(2).sum() / 15
    torch.testing.assert_close(LossModule(model, USERS)(x=x), expected)


@pytest.mark.parametrize("kind", ["logits", "logits_mapping"])
@pytest.mark.parametrize("shape", [(5,), (5, 2)])
def test_cross_entropy_of_the_logits(kind: str, shape: tuple[int, ...]) -> None:
    model = Returns(kind)
    x, labels = torch.randn(*shape, 4), torch.randint(3, shape)
    labels.view(-1)[1] = -100
    logits = (x @ model.layer.weight.T + model.layer.bias).reshape(-1, 3)
    each = [
        torch.logsumexp(row, dim=0) - row[label]
        for row, label in zip(logits, labels.flatten().tolist(), strict=True)
        if label != -100
    ]
    loss = LossModule(model, USERS_CROSS_ENTROPY)(x=x, labels=labels)
    torch.testing.assert_close(loss, torch.stack(each).mean())


def test_cross_entropy_leaves_the_labels_to_the_loss() -> None:
    """A model that could use labels is not given them; one that needs them is."""

    class Optional(nn.Module):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            assert labels is None
            return x

    class Needed(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            assert labels is not None
            return x

    for model in (Optional(), Needed()):
        LossModule(model, USERS_CROSS_ENTROPY)(x=torch.randn(2, 3), labels=torch.tensor([0, 1]))


def test_paths_have_the_prefix() -> None:
    model = Returns("scalar")
    paths = [path for path, _ in LossModule(model, USERS).named_parameters()]
    assert [path.removeprefix(MODEL_PREFIX) for path in paths] == ["layer.weight", "layer.bias"]
    assert all(path.startswith(MODEL_PREFIX) for path in paths)


def test_a_copy_computes_with_its_own_weights() -> None:
    module = LossModule(Returns("scalar"), USERS)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.model.layer.weight.zero_()
        twin.model.layer.bias.fill_(2.0)
    x = torch.randn(5, 4)
    assert twin(x=x).item() == 4.0
    assert module(x=x).item() != 4.0


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (
            "logits",
            USERS,
            "model.loss=model finds no loss in what Returns returns (Tensor); return it as .loss, "
            "or use model.loss=cross_entropy",
        ),
        (
            "logits_mapping",
            USERS,
            "model.loss=model finds no loss in what Returns returns (dict); return it as .loss, "
            "or use model.loss=cross_entropy",
        ),
        (
            "text",
            USERS_CROSS_ENTROPY,
            "model.loss=cross_entropy finds no logits in what Returns returns (str); return it "
            "as .logits, or use model.loss=model",
        ),
    ],
)
def test_no_loss(kind: str, options: ModelOptions, expected: str) -> None:
    batch = {"x": torch.randn(2, 4), "labels": torch.tensor([0, 1])}
    if options.loss == "model":
        del batch["labels"]
    with pytest.raises(ConfigError) as caught:
        LossModule(Returns(kind), options)(**batch)
    assert str(caught.value) == expected


# The data's fields and forward's arguments


def fields(*names: str) -> tuple[InputField, ...]:
    return tuple(InputField(name, (4,), "float32") for name in names)


def forward_faults(model: nn.Module, options: ModelOptions, *names: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        forward_fields(model, options, fields(*names))
    return [str(fault) for fault in caught.value.faults]


class TakesTwo(nn.Module):
    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        return features * mask


class TakesAny(nn.Module):
    def forward(self, **named: Tensor) -> Tensor:
        return torch.stack(list(named.values())).sum()


def test_fields_that_fit() -> None:
    head, names = ClassHead(3), ("labels", "features")
    assert forward_fields(head, USERS, fields(*names)) == names
    assert forward_fields(head, USERS_CROSS_ENTROPY, fields(*names)) == names
    assert forward_fields(TakesTwo(), USERS, fields("mask", "features")) == ("mask", "features")
    three = ("mask", "labels", "features")
    assert forward_fields(TakesTwo(), USERS_CROSS_ENTROPY, fields(*three)) == three
    assert forward_fields(TakesAny(), USERS, fields("any", "labels")) == ("any", "labels")


def test_all_fields_that_do_not_fit_together() -> None:
    assert forward_faults(TakesTwo(), USERS, "feature", "labels") == [
        "data.feature is not an argument of the forward of TakesTwo; did you mean features? "
        "One of: features, mask",
        "model.loss=model needs a forward that takes labels, and that of TakesTwo takes none; "
        "use model.loss=cross_entropy",
        "model._target_=users.Returns needs features in its forward, and the fields of the data "
        "are feature, labels; name one of the data's fields features, or give it a default",
        "model._target_=users.Returns needs mask in its forward, and the fields of the data are "
        "feature, labels; name one of the data's fields mask, or give it a default",
    ]


def test_cross_entropy_without_labels() -> None:
    assert forward_faults(ClassHead(3), USERS_CROSS_ENTROPY, "features") == [
        "model.loss=cross_entropy needs labels, and the fields of the data are features; "
        "name the field of the labels labels, or use model.loss=model"
    ]


# Building

USERS_NETS = """
import torch
from torch import nn

SCALE = torch.tensor([2.0])

class Net(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        if width < 0:
            raise ValueError("width\\n  is negative")
        self.layer = nn.Linear(width, width)
        self.eval()

def number():
    return 3
"""


@pytest.fixture
def users_nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_nets.py").write_text(USERS_NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "users_nets", raising=False)


def build_faults(options: ModelOptions) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build_model(options)
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.usefixtures("users_nets")
def test_a_users_model_on_the_meta_device() -> None:
    """Its parameters are on meta, the constants of its module are not; it is in train mode."""
    with torch.device("meta"):
        model = build_model(options_of("users_nets.Net", width=3))
    assert model.training
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert sys.modules["users_nets"].SCALE.tolist() == [2.0]


@pytest.mark.usefixtures("users_nets")
def test_a_constructor_that_raises() -> None:
    assert build_faults(options_of("users_nets.Net", width=-1)) == [
        "model._target_=users_nets.Net cannot be built: Net raised ValueError: width is negative; "
        "correct its arguments or its code"
    ]


@pytest.mark.usefixtures("users_nets")
def test_a_factory_of_something_else() -> None:
    assert build_faults(options_of("users_nets.number")) == [
        "model._target_=users_nets.number gives an object of type int, not a torch.nn.Module; "
        "name a torch.nn.Module class, or a function that returns a module"
    ]


def test_heads_that_do_not_divide_the_width() -> None:
    assert build_faults(options_of("whale_train.models.gpt.GPT", width=10, heads=4)) == [
        "model._target_=whale_train.models.gpt.GPT cannot be built: GPT raised ValueError: "
        "width=10 does not divide into heads=4; correct its arguments or its code"
    ]


# Hugging Face


@needs_transformers
def test_hugging_face_model_is_what_transformers_builds() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    options = hugging_face_options("LlamaForCausalLM", config=LLAMA)
    torch.manual_seed(7)
    model = build_model(options)
    torch.manual_seed(7)
    theirs = LlamaForCausalLM(LlamaConfig(**LLAMA))
    assert type(model) is LlamaForCausalLM
    assert model.training
    assert model.config.use_cache is False
    weights = model.state_dict()
    for path, weight in theirs.state_dict().items():
        assert torch.equal(weights[path], weight)


@needs_transformers
def test_old_and_common_names_of_settings_are_known() -> None:
    """Translated by transformers: they must not be taken for typing errors."""
    config = {"hidden_size": 8, "n_layer": 1, "num_attention_heads": 2, "num_labels": 5}
    model = build_model(hugging_face_options("GPT2ForSequenceClassification", config=config))
    assert model.score.weight.shape == (5, 8)
    llama = {**LLAMA, "rope_theta": 123.0}
    assert load_class(hugging_face_options("LlamaForCausalLM", config=llama))
    # Read by the model, declared by no config class.
    undeclared = {"decoder_start_token_id": 0}
    assert load_class(hugging_face_options("T5ForConditionalGeneration", config=undeclared))


@needs_transformers
def test_pretrained_weights(tmp_path: Path) -> None:
    options = hugging_face_options("LlamaForCausalLM", config=LLAMA)
    saved = build_model(options)
    saved.save_pretrained(tmp_path)
    loaded = hugging_face_options(
        "LlamaForCausalLM", pretrained=str(tmp_path), config={"attention_dropout": 0.25}
    )
    model = build_model(loaded)
    assert model.training
    assert model.config.attention_dropout == 0.25
    assert model.config.hidden_size == 16
    assert model.config.use_cache is False
    weights = model.state_dict()
    for path, weight in saved.state_dict().items():
        assert torch.equal(weights[path], weight)
    with torch.device("meta"):
        empty = build_model(loaded)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert {k: v.shape for k, v in empty.state_dict().items()} == {
        k: v.shape for k, v in weights.items()
    }
    typo = loaded.model_copy(update={"config": {"hiden_size": 3}})
    assert build_faults(typo)[0].startswith(
        "model.config.hiden_size=3 is not a setting of LlamaConfig; did you mean hidden_size? "
    )


@needs_transformers
def test_half_precision_weights_are_read_in_fp32(tmp_path: Path) -> None:
    build_model(hugging_face_options("LlamaForCausalLM", config=LLAMA)).half().save_pretrained(
        tmp_path
    )
    model = build_model(hugging_face_options("LlamaForCausalLM", pretrained=str(tmp_path)))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@needs_transformers
def test_settings_that_are_not() -> None:
    options = hugging_face_options("ResNetForImageClassification", config={"hidden_sises": [1]})
    (fault,) = build_faults(options)
    assert fault.startswith(
        "model.config.hidden_sises=[1] is not a setting of ResNetConfig; did you mean "
        "hidden_sizes? One of: "
    )
    options = hugging_face_options("LlamaForCausalLM", config={**LLAMA, "use_cache": True})
    assert build_faults(options) == [
        "model.config.use_cache=True cannot be served: training keeps no cache; leave it out"
    ]


@needs_transformers
def test_settings_the_config_refuses() -> None:
    (fault,) = build_faults(
        hugging_face_options("LlamaForCausalLM", config={"hidden_size": "wide"})
    )
    assert fault == (
        "model.config={'hidden_size': 'wide'} is refused by LlamaConfig: "
        "StrictDataclassFieldValidationError: Validation error for field 'hidden_size': "
        "TypeError: Field 'hidden_size' expected int, got str (value: 'wide'); "
        "correct the value it names"
    )


@needs_transformers
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("LlamaForCausalML", "did you mean LlamaForCausalLM or "),
        ("LlamaConfig", "write model.architecture=LlamaForCausalLM or the like"),
        ("AutoModelForCausalLM", "did you mean "),
        ("Zzz", "write model.architecture=LlamaForCausalLM or the like"),
    ],
)
def test_architectures_that_are_not(name: str, remedy: str) -> None:
    (fault,) = build_faults(hugging_face_options(name))
    assert fault.startswith(
        f"model.architecture={name} is not a model class of transformers; {remedy}"
    )


@needs_transformers
def test_pretrained_folders_that_are_not(tmp_path: Path) -> None:
    """Together with a wrong architecture: both are found."""
    absent = tmp_path / "absent"
    assert build_faults(hugging_face_options("Zzz", pretrained=str(absent))) == [
        "model.architecture=Zzz is not a model class of transformers; "
        "write model.architecture=LlamaForCausalLM or the like",
        f"model.pretrained={absent} is not a folder; name a folder written by save_pretrained()",
    ]
    assert build_faults(hugging_face_options("LlamaModel", pretrained=str(tmp_path))) == [
        f"model.pretrained={tmp_path} is a folder without a config.json; "
        "name a folder written by save_pretrained()"
    ]


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert build_faults(hugging_face_options("LlamaForCausalLM")) == [
        "model.architecture=LlamaForCausalLM needs transformers, which is not installed; "
        "install whale-train[hf]"
    ]


@needs_transformers
def test_a_hugging_face_constructor_that_raises() -> None:
    config = {**LLAMA, "hidden_act": "squares"}
    assert build_faults(hugging_face_options("LlamaForCausalLM", config=config)) == [
        "model.architecture=LlamaForCausalLM cannot be built: LlamaForCausalLM raised KeyError: "
        "'squares'; correct model.config"
    ]
