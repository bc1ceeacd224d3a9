"""Models are measured without a byte of what they would keep, however long their sequences."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.distributed.test_models import needs_transformers
from tests.pairs import some

from whale_train.models.profile.measure import _small_on_cpu

TOKENS = 131_072
# A mask of one byte an element, of the three samples of an export, has 52 GB. What the process maps
# without it is less than half of this.
LIMIT_BYTES = 24 << 30

PROGRAM = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({LIMIT_BYTES}, {LIMIT_BYTES}))
from whale_train.models.options import ModelOptions
from whale_train.models.profile.measure import profile_model
from whale_train.strategies.graph.operation_graph import InputField

fields = tuple(InputField(n, ({TOKENS},), "int64", 300) for n in ("input_ids", "labels"))
options = ModelOptions.from_mapping(eval(sys.argv[1]))
profile = profile_model(options, "long", fields)
attention = [op for op in profile.graph if "scaled_dot_product_attention" in op.target]
print(len(attention), sum(op.flops for op in attention))
"""

_LLAMA = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 300},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": TOKENS},
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {
        **{"_target_": "whale_train.models.gpt.GPT", "vocab_size": 300, "width": 64, "heads": 4},
        **{"depth": 2, "sequence_length": TOKENS},
    },
    "llama": {
        "_target_": "whale_train.models.build.hugging_face",
        **{"architecture": "LlamaForCausalLM", "config": _LLAMA},
    },
}


@needs_transformers
@pytest.mark.parametrize("name", some(MODELS, ["llama"]))
def test_nothing_is_allocated_by_size(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, repr(MODELS[name])],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    layers, flops = ran.stdout.split()
    # Of a layer: scores and values, each T x T x width products of two operations.
    assert (int(layers), float(flops)) == (2, 2 * 2 * 2 * TOKENS**2 * 64)


FLASH = torch.nn.attention.SDPBackend.FLASH_ATTENTION.value
LONG = 700  # above what is made smaller


def heads(count: int, length: int, width: int = 8) -> torch.Tensor:
    """As models make them: of [batch, length, heads, width]."""
    return torch.randn(3, length, count, width, requires_grad=True).transpose(1, 2)


CASES: dict[str, tuple[Any, ...]] = {
    "plain": (heads(4, LONG), heads(4, LONG), heads(4, LONG)),
    "across": (heads(4, LONG), heads(4, 900), heads(4, 900)),
    "grouped": (heads(4, LONG), heads(2, LONG), heads(2, LONG)),
    "a mask": (*[heads(4, LONG)] * 3, torch.ones(3, 1, LONG, LONG, dtype=torch.bool)),
    "a mask of all": (*[heads(4, LONG)] * 3, torch.ones(1, 1, LONG, 1).expand(3, 4, LONG, LONG)),
    "a mask of other lengths": (*[heads(4, LONG)] * 3, torch.ones(3, 1, LONG, 900)),
    "dropout": (*[heads(4, LONG)] * 3, None, 0.1),
    "other widths": (heads(4, LONG), heads(4, LONG), heads(4, LONG, 16)),
    "three dimensions": tuple(torch.randn(3, LONG, 8) for _ in range(3)),
    "every other number": (*[heads(4, LONG, 16)[..., ::2]] * 3,),
    "a wide head": (*[heads(2, 4, LONG)] * 3,),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("grouped", [True, False])
def test_the_kernel_is_that_of_the_tensors_themselves(name: str, grouped: bool) -> None:
    arguments = CASES[name]
    small, named = _small_on_cpu((arguments, {"enable_gqa": grouped}))
    tensors = [x for x in small if isinstance(x, torch.Tensor)]
    assert max(extent for x in tensors for extent in x.shape) < LONG
    chosen = torch._fused_sdp_choice(*arguments, enable_gqa=grouped)
    assert torch._fused_sdp_choice(*small, **named) == chosen


def test_cases_are_of_both_kinds() -> None:
    chosen = {torch._fused_sdp_choice(*arguments) == FLASH for arguments in CASES.values()}
    assert chosen == {True, False}
