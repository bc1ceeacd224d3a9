"""The named models of conf/model have the sizes they are named for, without a byte of weights."""

import pytest
import torch
from omegaconf import OmegaConf

from whale_train.launcher.compose import composed
from whale_train.models.build import build_model
from whale_train.models.options import ModelOptions


@pytest.mark.parametrize(
    ("name", "billions"),
    [("bert_large", 0.335), ("t5_large", 0.738), ("gpt3_175b", 174.6), ("llama3_405b", 405.9)],
)
def test_a_named_model_has_its_size(name: str, billions: float) -> None:
    pytest.importorskip("transformers")
    mapping = OmegaConf.to_container(composed([f"model={name}"]).model)
    assert isinstance(mapping, dict)
    options = ModelOptions.from_mapping({str(key): value for key, value in mapping.items()})
    with torch.device("meta"):
        model = build_model(options)
    elements = sum(p.numel() for p in model.parameters())
    assert elements / 1e9 == pytest.approx(billions, rel=5e-3)
