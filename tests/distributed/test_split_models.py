"""Whole models that nobody adapted, split over two members and over three of unlike speed.

Each is exported on the meta device as the product does; the loss and every gradient are those of
the model whole, and the collectives in its blocks are the fewest there can be.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers
from tests.distributed.harness import run_ranks
from tests.distributed.splitting import Outcome, Split, assert_equal, compare, exported
from tests.pairs import some
from torch import Tensor, fx, nn
from torch import distributed as dist
from torch.nn import functional

from whale_train.models.gpt import GPT
from whale_train.models.moe_gpt import MoEGPT

BATCH, TOKENS, VOCABULARY, WIDTH, LAYERS = 4, 16, 128, 64, 2
TOLERANCE = 2e-5
SPEEDS = {"two": (1.0, 1.0), "uneven": (2.0, 1.0, 1.0)}


def hugging_face(architecture: str, **config: Any) -> nn.Module:
    model = getattr(transformers, architecture)
    found: nn.Module = model(model.config_class(**config))
    return found


class TorchEncoder(nn.Module):
    """torch's own encoder, packed `in_proj_weight` and all, with a head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.encoder(features))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FALCON = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
SPEECH = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH, "max_source_positions": 16, "max_target_positions": 32,
    "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "num_mel_bins": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """`forward` and `backward` are the collectives over two members (None: not looked at): two
    all-reduces a block each way, one more forward for the embedding (an all-gather where no head is
    tied to it) and one more backward for the head."""

    build: Callable[[], nn.Module]
    inputs: str = "tokens"
    forward: int | None = None
    backward: int | None = None
    on_meta: bool = True
    dims: tuple[str, ...] = ("auto",)


BLOCKS = 2 * LAYERS
DECODER = {"forward": BLOCKS + 1, "backward": BLOCKS + 1}
BOTH = ("auto", "sequence")

MODELS = {
    "llama": Case(partial(hugging_face, "LlamaForCausalLM", **GROUPED), **DECODER, dims=BOTH),
    "gpt2": Case(
        partial(hugging_face, "GPT2LMHeadModel", vocab_size=VOCABULARY, n_embd=WIDTH,
                n_layer=LAYERS, n_head=4, n_positions=32, resid_pdrop=0, embd_pdrop=0,
                attn_pdrop=0),
        **DECODER, dims=BOTH,
    ),
    # Norms of each head's query and key: their weights are whole, beside heads that are not.
    "qwen3": Case(partial(hugging_face, "Qwen3ForCausalLM", **GROUPED, head_dim=16),
                  forward=BLOCKS + 1, backward=BLOCKS + 1 + 2 * LAYERS),
    # One more product, before the head.
    "bert": Case(partial(hugging_face, "BertForMaskedLM", **COMMON, **NO_DROPOUT,
                         max_position_embeddings=32), forward=BLOCKS + 1, backward=BLOCKS + 2,
                 dims=BOTH),
    # Three sums in a decoder's block; encoder and decoder each look tokens up.
    "t5": Case(partial(hugging_face, "T5ForConditionalGeneration", vocab_size=VOCABULARY,
                       d_model=WIDTH, d_ff=2 * WIDTH, num_layers=LAYERS, num_heads=4, d_kv=16,
                       dropout_rate=0, decoder_start_token_id=0, pad_token_id=0),
               forward=5 * LAYERS + 2, backward=5 * LAYERS + 2),
    "vit": Case(partial(hugging_face, "ViTForImageClassification", **NO_DROPOUT, hidden_size=WIDTH,
                        intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
                        num_attention_heads=4, image_size=32, patch_size=8, num_labels=10),
                "images", forward=BLOCKS, backward=BLOCKS + 1),
    "resnet": Case(partial(hugging_face, "ResNetForImageClassification", num_labels=10,
                           hidden_sizes=[16, 32, 64], depths=[1, 1, 1], embedding_size=16),
                   "images"),
    # By expert; routing weights meet sums of experts' rows, once a block.
    "mixtral": Case(partial(hugging_face, "MixtralForCausalLM", **GROUPED, num_local_experts=4),
                    forward=BLOCKS + 1, backward=BLOCKS + 1 + LAYERS),
    "torch_encoder": Case(TorchEncoder, "features", forward=BLOCKS, backward=BLOCKS),
    "gpt": Case(partial(GPT, VOCABULARY, TOKENS, WIDTH, LAYERS, 4), **DECODER),
    "moe_gpt": Case(partial(MoEGPT, VOCABULARY, TOKENS, WIDTH, LAYERS, 4, 2 * WIDTH, 4),
                    forward=BLOCKS + 1, backward=BLOCKS + 1 + LAYERS),
    "opt": Case(partial(hugging_face, "OPTForCausalLM", vocab_size=VOCABULARY, hidden_size=WIDTH,
                        ffn_dim=2 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4,
                        dropout=0, word_embed_proj_dim=WIDTH, max_position_embeddings=32),
                **DECODER),
    "whisper": Case(partial(hugging_face, "WhisperForConditionalGeneration", **SPEECH), "speech"),
    "phi3": Case(partial(hugging_face, "Phi3ForCausalLM", **GROUPED, pad_token_id=0), **DECODER),
    # Attention and MLP side by side, summed before they are reduced.
    "gpt_neox": Case(partial(hugging_face, "GPTNeoXForCausalLM", **COMMON), forward=LAYERS + 1,
                     backward=BLOCKS + 1),
    "bloom": Case(partial(hugging_face, "BloomForCausalLM", vocab_size=VOCABULARY, n_layer=LAYERS,
                          hidden_size=WIDTH, n_head=4, hidden_dropout=0, attention_dropout=0),
                  **DECODER),
    "falcon": Case(partial(hugging_face, "FalconForCausalLM", **FALCON, vocab_size=VOCABULARY,
                           hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4),
                   on_meta=False),
    "falcon_grouped": Case(
        partial(hugging_face, "FalconForCausalLM", **FALCON, vocab_size=VOCABULARY,
                hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4, num_kv_heads=2,
                new_decoder_architecture=True),
        forward=LAYERS + 1, backward=BLOCKS + 1, on_meta=False,
    ),
}  # fmt: skip


def batch_of(inputs: str) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (BATCH, TOKENS), generator=draw)
    if inputs == "images":
        labels = torch.tensor([0, 1, 5, 3])
        return {"pixel_values": torch.randn(BATCH, 3, 32, 32, generator=draw), "labels": labels}
    if inputs == "features":
        return {"features": torch.randn(BATCH, TOKENS, WIDTH, generator=draw), "labels": ids}
    if inputs == "speech":
        return {"input_features": torch.randn(BATCH, 8, 32, generator=draw), "labels": ids}
    labels = ids.clone()
    labels[0, 3:7] = -100
    return {"input_ids": ids, "labels": labels}


# The first ones are split three ways as well.
MEMBERS = {"two": list(MODELS), "uneven": list(MODELS)[: list(MODELS).index("gpt") + 1]}
RUNS = [
    (members, name, dim)
    for members, names in MEMBERS.items()
    for name in names
    for dim in MODELS[name].dims
]

# In a run of some of the tests: a decoder, split along the sequence as well; experts of both ways
# to write them; weights that are packed; attention beside an MLP; heads in groups, no meta device;
# convolutions and statistics of a batch.
SOME = {"llama", "mixtral", "moe_gpt", "torch_encoder", "gpt_neox", "falcon_grouped", "resnet"}


def graph_of(name: str) -> fx.GraphModule:
    case = MODELS[name]
    return exported(case.build, batch_of(case.inputs), on_meta=case.on_meta)


def split_as_all(graph: fx.GraphModule, name: str) -> dict[tuple[str, str], Outcome]:
    """What a rank sees of a model, by the members it is split over and the dimension."""
    case, found = MODELS[name], {}
    two = dist.new_group([0, 1])
    for members, model, dim in RUNS:
        if model != name or (members == "two" and dist.get_rank() > 1):
            continue
        found[members, dim] = compare(
            case.build,
            batch_of(case.inputs),
            Split(SPEEDS[members], dim=dim),
            on_meta=case.on_meta,
            graph=graph,
            group=two if members == "two" else dist.group.WORLD,
        )
    return found


@cache
def outcomes(name: str) -> list[dict[tuple[str, str], Outcome]]:
    """What each rank sees of a model."""
    size = 3 if name in MEMBERS["uneven"] else 2
    return run_ranks(split_as_all, size, name, prepare=graph_of, deadline_s=280)


@pytest.mark.parametrize(
    ("members", "name", "dim"), some(RUNS, (run for run in RUNS if run[1] in SOME))
)
def test_a_split_model_is_equal_to_the_whole(members: str, name: str, dim: str) -> None:
    mine = [found[members, dim] for found in outcomes(name) if (members, dim) in found]
    assert len(mine) == len(SPEEDS[members])
    assert_equal(mine, TOLERANCE)
    left = sum(outcome.held for outcome in mine) - 1
    assert left < 0.05 * (len(mine) - 1), left  # norms, some biases, routers


COUNTED = [n for n, case in MODELS.items() if case.forward is not None]


@pytest.mark.parametrize("name", some(COUNTED, SOME.intersection(COUNTED)))
def test_blocks_have_the_fewest_collectives(name: str) -> None:
    case, outcome = MODELS[name], outcomes(name)[0]["two", "auto"]
    assert outcome.casts.get("reduce", 0) + outcome.casts.get("gather", 0) == case.forward
    assert outcome.casts.get("gather", 0) <= 1  # of a table that no head is tied to
    assert outcome.casts.get("enter", 0) == case.backward


def test_between_the_products_a_sequence_is_cut() -> None:
    casts = outcomes("llama")[0]["two", "sequence"].casts
    assert casts.keys() == {"reduce_scatter", "gather_enter", "enter"}
    assert (casts["reduce_scatter"], casts["gather_enter"]) == (BLOCKS + 1, BLOCKS + 1)
    assert casts["enter"] == BLOCKS + 1  # the norms' weights


def test_patterns_of_a_block() -> None:
    patterns = outcomes("llama")[0]["two", "auto"].patterns
    block = {k.removeprefix("model.layers.1."): v for k, v in patterns.items() if "layers.1." in k}
    assert block == {
        "self_attn.q_proj.weight": "column",
        "self_attn.k_proj.weight": "column",
        "self_attn.v_proj.weight": "column",
        "self_attn.o_proj.weight": "row",
        "mlp.gate_proj.weight": "column",
        "mlp.up_proj.weight": "column",
        "mlp.down_proj.weight": "row",
    }
    assert patterns["model.embed_tokens.weight"] == "column"
    assert patterns["lm_head.weight"] == "vocabulary"
    experts = outcomes("mixtral")[0]["two", "auto"].patterns
    assert experts["model.layers.0.mlp.experts.gate_up_proj"] == "experts"
    assert experts["model.layers.0.mlp.experts.down_proj"] == "experts"
    assert experts["model.layers.0.mlp.gate.weight"] == "replicate"
    ours = outcomes("moe_gpt")[0]["two", "auto"].patterns
    assert [ours[f"blocks.1.experts.{name}"] for name in ("expand", "contract")] == ["experts"] * 2
