"""Profiles of real models: what is kept of them is what was measured."""

from pathlib import Path
from typing import Any

import pytest

from whale_train.launcher.profiles import keep, kept
from whale_train.models.options import HUGGING_FACE, ModelOptions
from whale_train.models.profile import profile_model
from whale_train.models.profile_key import profile_key
from whale_train.strategies.operations import InputField

TOKENS = tuple(InputField(name, (12,), "int64", 31) for name in ("input_ids", "labels"))
IMAGES = (InputField("pixel_values", (1, 8, 8), "float32"), InputField("labels", (), "int64", 4))
VECTORS = (InputField("features", (6,), "float32"), InputField("labels", (), "int64", 4))
SMALL = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
MODELS: dict[str, tuple[dict[str, Any], tuple[InputField, ...]]] = {
    "gpt": ({"_target_": "whale_train.models.gpt.GPT", "width": 16, "depth": 6}, TOKENS),
    "head": (
        {
            **{"_target_": "whale_train.models.class_head.ClassHead", "loss": "cross_entropy"},
            **{"num_features": 6, "num_classes": 4},
        },
        VECTORS,
    ),
    "images": (
        {"_target_": "whale_train.models.image_classifier.ImageClassifier", "num_classes": 4},
        IMAGES,
    ),
    "llama": (
        {
            **{"_target_": HUGGING_FACE, "architecture": "LlamaForCausalLM"},
            "config": {**SMALL, "num_hidden_layers": 1, "num_key_value_heads": 1},
        },
        TOKENS,
    ),
    "bert": (
        {
            **{"_target_": HUGGING_FACE, "architecture": "BertForMaskedLM"},
            "config": {**SMALL, "num_hidden_layers": 1},
        },
        TOKENS,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_kept_is_what_was_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHALE_TRAIN_CACHE", str(tmp_path))
    mapping, fields = MODELS[name]
    if mapping["_target_"] == HUGGING_FACE:
        pytest.importorskip("transformers")
    options = ModelOptions.from_mapping(mapping)
    key = profile_key(options, fields, by_folding=True)
    assert key is not None
    profile = profile_model(options, name, fields, by_folding=True)
    assert profile.graph is not None
    assert profile_key(options, fields, by_folding=True) == key  # measuring changes nothing
    keep(key, profile)
    assert kept(key) == profile
    assert kept(key) == profile_model(options, name, fields, by_folding=True)
