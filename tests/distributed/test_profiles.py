"""Profiles of real models: what is kept of them is what was measured."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.pairs import some
from torch import Tensor, nn

from whale_train.launcher.planning.profile_cache import keep_profile, kept_profile
from whale_train.models.options import HUGGING_FACE, ModelOptions
from whale_train.models.profile.cache_key import profile_key
from whale_train.models.profile.measure import profile_model
from whale_train.strategies.graph.operation_graph import InputField

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


@pytest.mark.parametrize("name", some(MODELS, ["gpt", "bert"]))
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
    keep_profile(key, profile)
    assert kept_profile(key) == profile
    assert kept_profile(key) == profile_model(options, name, fields, by_folding=True)


class MeanOfWords(nn.Module):
    """Reads as many words of a batch as are not padding: a number torch.export cannot know."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(31, 16)
        self.head = nn.Linear(16, 31)

    def forward(self, input_ids: Tensor) -> Tensor:
        longest = int((input_ids != 0).sum(1).max())
        if longest == 0:
            raise ValueError("a batch of padding")
        logits: Tensor = self.head(self.words(input_ids[:, :longest]).mean(1))
        return logits


@pytest.mark.parametrize("count", [1, 3])
def test_a_model_that_looks_at_values_is_measured_on_samples(count: int) -> None:
    """Six words of twelve: the product's FLOPs, and what the embedding and the mean keep."""
    options = ModelOptions.from_mapping(
        {"_target_": f"{__name__}.MeanOfWords", "loss": "cross_entropy"}
    )
    fields = (TOKENS[0], InputField("labels", (), "int64", 31))
    words = np.repeat([[1] * 6 + [0] * 6], count, axis=0)

    def samples(most: int) -> dict[str, Any]:
        return {"input_ids": words[:most], "labels": np.zeros(len(words[:most]), np.int64)}

    profile = profile_model(options, "words", fields, samples)
    assert profile.graph is None
    assert profile.forward_flops == 2 * 16 * 31
    assert profile.perhaps_unused == ()
    with pytest.raises(ValueError, match="a batch of padding"):
        profile_model(options, "words", fields)
