"""Bounds of what strategies take, on a model that sends more than one value between stages."""

from dataclasses import replace

import pytest
from tests.distributed.test_folding import HUGGING_FACE_MODELS, TOKENS
from tests.unit.plan_requests import training
from tests.unit.test_auto import cluster, everything

from whale_train.models.options import HUGGING_FACE, ModelOptions
from whale_train.models.profile import profile_model
from whale_train.strategies.cluster import Device, Link

DEVICES = [[Device(name, {"fp32": rate}, 1e9, rate / 20)] * 2 for name, rate in
           (("fast", 2e12), ("slow", 1e12))]  # fmt: skip


@pytest.mark.parametrize("bandwidth_bytes_s", [1e7, 1e10])
def test_no_bound_is_above_what_an_encoder_and_a_decoder_take(bandwidth_bytes_s: float) -> None:
    pytest.importorskip("transformers")
    name = "T5ForConditionalGeneration"
    options = ModelOptions.from_mapping(
        {
            **{"_target_": HUGGING_FACE, "architecture": name, "loss": "model"},
            "config": {**HUGGING_FACE_MODELS[name], "num_layers": 2, "num_decoder_layers": 2},
        }
    )
    profile = profile_model(options, "m", TOKENS, by_folding=False)
    devices = replace(cluster(*DEVICES), network=Link("network", bandwidth_bytes_s, 1e-5))
    tried = list(everything(profile, devices, training(8)))
    assert len(tried) > 100
    for candidate, least, seconds in tried:
        assert 0 < least <= seconds * (1 + 1e-9), candidate.described
