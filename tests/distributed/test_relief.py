"""Means against running out of memory, combined: what one process computes.

The bytes of the same combinations are the matter of `benchmarks/memory_relief.py`.
"""

import pytest
from tests.distributed.cases import OPTIMIZERS, TOLERANCE, hardware
from tests.distributed.equality import Jobs, assert_equal
from tests.distributed.test_parallel_strategies import hf

# Sequences are long enough for what blocks save to be sent to the host (`SENT_BYTES`).
MODELS = {
    "gpt": (
        *("model=gpt", "model.vocab_size=257", "model.sequence_length=512", "model.width=32"),
        *("model.depth=3", "model.heads=4"),
    ),
    "llama": hf(
        "LlamaForCausalLM",
        "vocab_size: 257, hidden_size: 32, intermediate_size: 128, num_hidden_layers: 3, "
        "num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 512",
    ),
    "moe_gpt": (
        *("model=moe_gpt", "model.vocab_size=257", "model.sequence_length=512", "model.width=32"),
        *("model.depth=3", "model.heads=4", "model.ffn=64", "model.experts=4"),
    ),
}
SENT = "offload: {activations: cpu}"
STATE = "offload: {optimizer: cpu, parameters: cpu}"
COMBINED = {
    "recompute_activations": (2, f"{{replicate: {{recompute: full, {SENT}}}}}"),
    "recompute_zero3": (2, "{replicate: {zero: 3, recompute: full}}"),
    "recompute_parameters": (2, f"{{replicate: {{zero: 3, recompute: full, {STATE}}}}}"),
    "activations_zero3": (2, f"{{replicate: {{zero: 3, {SENT}}}}}"),
    "everything": (
        2,
        "{replicate: {zero: 3, recompute: full, "
        "offload: {activations: cpu, optimizer: cpu, parameters: cpu}}}",
    ),
    "recompute_split_zero1": (
        4,
        "{replicate: {degree: 2, zero: 1, of: {split: {dim: tensor, recompute: full}}}}",
    ),
    "activations_split_zero1": (
        4,
        f"{{replicate: {{degree: 2, zero: 1, {SENT}, of: {{split: {{dim: tensor}}}}}}}}",
    ),
    "recompute_pipeline_zero1": (
        4,
        "{replicate: {degree: 2, zero: 1, recompute: full, "
        "of: {pipeline: {stages: 2, micro_batches: 2}}}}",
    ),
}
_QUICK = {
    ("recompute_activations", "moe_gpt"),
    ("recompute_zero3", "llama"),
    ("activations_zero3", "moe_gpt"),
    ("everything", "llama"),
    ("activations_split_zero1", "gpt"),
    ("recompute_pipeline_zero1", "moe_gpt"),
}


@pytest.mark.parametrize(
    ("combined", "model"),
    [
        pytest.param(c, m, marks=() if (c, m) in _QUICK else pytest.mark.full)
        for c in COMBINED
        for m in MODELS
    ],
)
def test_combined_means_are_one_process(combined: str, model: str, jobs: Jobs) -> None:
    devices, graph = COMBINED[combined]
    shared = [
        *MODELS[model],
        *("data=text", "data.sequence_length=512", "train.steps=3", "train.global_batch=8"),
        *OPTIMIZERS["sgd" if combined.endswith("zero3") else "adamw"],
    ]
    found = jobs.run([*shared, f"strategy.graph={graph}", *hardware(devices, ())])
    single = jobs.run([*shared, "strategy=single", *hardware(1, ())])
    assert_equal(found, single, TOLERANCE)
    assert ("recompute:" in graph) == ("'recomputed': ['" in str(found.plan))
    assert (SENT[:-6] in graph) == ("'offloaded': ['" in str(found.plan))
