"""What a profile says that autograd keeps, against what it does keep."""

from typing import Any

import pytest
import torch
from torch import Tensor

from whale_train.models.build import build_model
from whale_train.models.loss_module import LossModule
from whale_train.models.options import HUGGING_FACE, ModelOptions
from whale_train.models.profile.measure import profile_model
from whale_train.strategies.graph.operation_graph import InputField
from whale_train.strategies.graph.saved_tensors import on_cpus

TOKENS = tuple(InputField(name, (16,), "int64", 31) for name in ("input_ids", "labels"))
SMALL = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
         "num_hidden_layers": 2}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"_target_": "whale_train.models.gpt.GPT", "width": 32, "depth": 2, "vocab_size": 31},
    "llama": {
        **{"_target_": HUGGING_FACE, "architecture": "LlamaForCausalLM"},
        "config": {**SMALL, "num_key_value_heads": 1},
    },
    # With dropout, for which a CPU has no fused attention.
    "bert": {
        **{"_target_": HUGGING_FACE, "architecture": "BertForMaskedLM"},
        "config": {**SMALL, "max_position_embeddings": 16},
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_kept_of_a_sample_is_what_a_cpu_keeps(name: str) -> None:
    pytest.importorskip("transformers")
    options = ModelOptions.from_mapping({**MODELS[name], "loss": "model"})
    profile = on_cpus(profile_model(options, name, TOKENS))
    assert profile.graph is not None
    module = LossModule(build_model(options), options).train()
    held = {x.untyped_storage().data_ptr() for x in (*module.parameters(), *module.buffers())}
    saved: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    batch = {field.name: torch.randint(31, (5, 16)) for field in TOKENS}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(**batch)
    # What does not follow the batch (positions, rotary angles) counts with every sample.
    assert profile.activation_bytes * 5 == pytest.approx(sum(saved.values()), rel=0.02)
