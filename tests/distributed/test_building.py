"""Models built of their options, and what is refused."""

import sys
from pathlib import Path

import pytest
import torch
from tests.distributed.test_models import (
    LLAMA,
    hugging_face_options,
    needs_transformers,
    options_of,
)

from whale_train.errors import ConfigError
from whale_train.models.build import build_model, load_class
from whale_train.models.options import ModelOptions

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

def number() -> nn.Module:
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
        "name a torch.nn.Module class, or a function annotated to return one (-> nn.Module)"
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


@needs_transformers
def test_settings_that_a_model_reads_though_no_config_declares_them() -> None:
    undeclared = {"decoder_start_token_id": 0}
    assert load_class(hugging_face_options("T5ForConditionalGeneration", config=undeclared))
    deberta = {
        **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 30},
        **{"num_attention_heads": 2, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    }
    # With it the projections of positions are those of the content (getattr(config, ..., False)).
    paths = []
    for shared in (False, True):
        config = {**deberta, "share_att_key": shared}
        model = build_model(hugging_face_options("DebertaV2ForMaskedLM", config=config))
        paths.append({path for path, _ in model.named_parameters()})
    assert {path.split(".")[-2] for path in paths[0] - paths[1]} == {
        "pos_key_proj",
        "pos_query_proj",
    }


@needs_transformers
@pytest.mark.parametrize(
    ("architecture", "key", "remedy"),
    [
        ("DebertaV2ForMaskedLM", "share_at_key", "did you mean share_att_key? "),
        ("DebertaV2ForMaskedLM", "hiden_size", "did you mean hidden_size? "),
        # Only other models, and what all models share, act upon these.
        ("LlamaForCausalLM", "share_att_key", ""),
        ("LlamaForCausalLM", "attention_chunk_size", ""),
    ],
)
def test_settings_that_a_model_does_not_read(architecture: str, key: str, remedy: str) -> None:
    (fault,) = build_faults(hugging_face_options(architecture, config={key: 8}))
    config = architecture.replace("ForMaskedLM", "").replace("ForCausalLM", "") + "Config"
    assert fault.startswith(f"model.config.{key}=8 is not a setting of {config}; {remedy}")


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
        "pip install 'transformers<6,>=5'"
    ]


@needs_transformers
def test_a_hugging_face_constructor_that_raises() -> None:
    config = {**LLAMA, "hidden_act": "squares"}
    assert build_faults(hugging_face_options("LlamaForCausalLM", config=config)) == [
        "model.architecture=LlamaForCausalLM cannot be built: LlamaForCausalLM raised KeyError: "
        "'squares'; correct model.config"
    ]
