"""Modules split beside copies of the rest compute what one device would.

Losses, gradient norms and updated parameters of four steps against `strategy=single`, on models
nobody adapted: MLPs, attention and tables whose weights the devices that share the samples divide.
"""

from pathlib import Path

import pytest
from tests.distributed import test_parallel_strategies as strategies
from tests.distributed import test_routed_experts as mixtures
from tests.distributed.cases import OPTIMIZERS, TOLERANCE, hardware
from tests.distributed.equality import JobFailed, Jobs, assert_equal
from tests.distributed.served import Served
from tests.distributed.test_rehearse import rehearsed
from tests.pairs import covering, some

from whale_train.rehearsal import Rehearsal

MODELS = strategies.MODELS | {name: ("tokens", x) for name, x in mixtures.MODELS.items()}
# What of a model is split, one entry a split.
PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": {
        "mlp": ('modules: "*.mlp"',),
        "attention": ('modules: "*.attn", dim: tensor',),
        "both": ('modules: "*.mlp"', 'modules: "*.attn"'),
        "table": ("modules: transformer.wte",),  # which is the head as well
        "positions": ("modules: transformer.wpe",),  # that no sample has a part in
        "all": ("dim: tensor",),
        "all_but": ("modules: head, dim: vocabulary", 'modules: ["*.mlp", "*.attn"]'),
    },
    "llama": {
        "mlp": ('modules: "*.mlp"',),
        "both": ('modules: ["*.mlp", "*.self_attn"]',),
        "table": ("modules: model.embed_tokens, dim: vocabulary",),
        "all": ("dim: tensor",),
        "head": ("modules: head", 'modules: "*.mlp"'),
        "head_row": ("modules: head, patterns: [{weight: lm_head.weight, pattern: row}]",),
        "by_hand": (
            'modules: "*.mlp", patterns: {model.layers.1.mlp.down_proj.weight: replicate}',
        ),
    },
    "qwen3": {"attention": ('modules: "*.self_attn"',)},
    "bert": {"encoder": ("modules: bert.encoder",), "table": ("modules: bert.embeddings",)},
    "t5": {"mlp": ('modules: "*.DenseReluDense"',), "all": ("dim: tensor",)},
    "vit": {"all": ("dim: tensor",)},
    "torch_transformer": {"all": ("dim: tensor",)},
    "mixtral": {
        "attention": ('modules: "*.self_attn", dim: tensor',),
        "with_experts": ('modules: "*.experts"', 'modules: "*.self_attn"'),
    },
    "qwen2_moe": {
        "with_experts": (
            'modules: "*.experts"',
            'modules: "*.shared_expert"',
            "modules: model.embed_tokens",
        ),
    },
    "moe_gpt": {"with_experts": ("dim: experts", 'modules: "blocks.*.attention"')},
}


def beside(parts: tuple[str, ...], copies: str = "{}") -> str:
    splits = "".join(f", {{split: {{{part}}}}}" for part in parts)
    return f"[{{replicate: {copies}}}{splits}]"


_ON_HOSTS = "{zero: 3, offload: {optimizer: cpu, parameters: cpu}}"


def graph(strategy: str, parts: tuple[str, ...]) -> tuple[int, str, tuple[float, ...]]:
    """Return devices, the strategy's graph, and the speeds of unlike devices."""
    stage = f"{{stage: {{of: {beside(parts, '{degree: 2}')}}}}}"
    return {
        "over2": (2, beside(parts), ()),
        "over4": (4, beside(parts), ()),
        "over3_unlike": (3, beside(parts), (5, 2, 1)),
        "zero1": (2, beside(parts, "{zero: 1}"), ()),
        "zero2": (2, beside(parts, "{zero: 2}"), ()),
        "zero3": (2, beside(parts, "{zero: 3}"), ()),
        "offload": (2, beside(parts, "{zero: 1, offload: {optimizer: cpu}}"), ()),
        "on_hosts": (2, beside(parts, _ON_HOSTS), ()),
        "two_of_2": (4, f"{{replicate: {{degree: 2, of: {beside(parts)}}}}}", ()),
        "two_of_2_zero1": (
            4,
            f"{{replicate: {{degree: 2, of: {beside(parts, '{zero: 1}')}}}}}",
            (),
        ),
        "pipeline": (4, strategies.pipeline(f"[{stage}, {stage}]", micro_batches=2), ()),
        "pipeline_unlike": (
            4,
            strategies.pipeline(f"[{stage}, {stage}]", micro_batches=2),
            (3, 2, 1, 1),
        ),
        "last_stage": (3, strategies.pipeline(f"[{{stage: {{}}}}, {stage}]", micro_batches=2), ()),
        "one_stage": (3, strategies.pipeline(f"[{stage}, {{stage: {{}}}}]", micro_batches=2), ()),
        "interleaved": (4, strategies.pipeline(f"[{stage}, {stage}]", "interleaved_1f1b", 2), ()),
        "zero_bubble": (4, strategies.pipeline(f"[{stage}, {stage}]", "zero_bubble", 2), ()),
        "recompute": (
            4,
            strategies.pipeline(
                f"[{stage}, {stage}]".replace("stage: {", "stage: {recompute: full, "),
                micro_batches=2,
            ),
            (),
        ),
    }[strategy]


_ALL = [
    *((model, part, "over2", "sgd") for model, parts in PARTS.items() for part in parts),
    *(("gpt2", "both", name, "sgd") for name in ("zero1", "zero2", "zero3", "two_of_2")),
    ("gpt2", "mlp", "pipeline", "momentum"),
    ("gpt2", "table", "zero1", "adamw"),
    ("llama", "both", "over4", "adamw"),
    ("llama", "both", "over3_unlike", "sgd"),
    ("llama", "all", "two_of_2_zero1", "momentum"),
    ("llama", "table", "over3_unlike", "momentum"),
    ("llama", "mlp", "offload", "sgd"),
    ("llama", "head", "last_stage", "sgd"),
    ("llama", "head_row", "over3_unlike", "adamw"),
    ("gpt2", "all_but", "two_of_2_zero1", "sgd"),
    ("llama", "mlp", "on_hosts", "sgd"),
    ("llama", "both", "pipeline_unlike", "sgd"),
    ("llama", "mlp", "zero_bubble", "sgd"),
    ("llama", "both", "recompute", "sgd"),
    ("llama", "both", "interleaved", "sgd"),
    ("bert", "encoder", "over3_unlike", "adamw"),
    ("t5", "all", "over4", "sgd"),
    ("vit", "all", "over3_unlike", "sgd"),
    ("qwen3", "attention", "one_stage", "sgd"),
    ("mixtral", "with_experts", "over3_unlike", "sgd"),
    ("qwen2_moe", "with_experts", "zero1", "sgd"),
    ("moe_gpt", "with_experts", "pipeline", "sgd"),
    ("moe_gpt", "with_experts", "on_hosts", "sgd"),
]


# In a run of some of the tests: uneven shares of each kind of weight (tables, a head by a pattern,
# attention beside experts), what has no samples, what is left of a model, stages of each kind, and
# weights that come from the host. All weights of a model are split below, and an encoder's beside
# a decoder's.
_SOME_CASES = {
    ("gpt2", "positions", "over2"),
    ("gpt2", "all_but", "two_of_2_zero1"),
    ("llama", "table", "over3_unlike"),
    ("llama", "head_row", "over3_unlike"),
    ("mixtral", "with_experts", "over3_unlike"),
    ("llama", "mlp", "on_hosts"),
    ("llama", "head", "last_stage"),
    ("llama", "both", "pipeline_unlike"),
    ("llama", "mlp", "zero_bubble"),
    ("llama", "both", "interleaved"),
}
CASES = covering(_ALL, lambda case: {case[:3]} & _SOME_CASES)

# --- Models of other kinds, all of whose weights but the head's are split ---

_WIDTHS = (
    "vocab_size: 67, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, "
    "max_position_embeddings: 16, intermediate_size: 48"
)
_GROUPED = _WIDTHS + ", num_key_value_heads: 2"
_OFF = ", hidden_dropout: 0.0, attention_dropout: 0.0"
SWEPT = {
    "BloomForCausalLM": ("tokens", "vocab_size: 67, hidden_size: 32, n_layer: 2, n_head: 4" + _OFF),
    "OPTForCausalLM": (
        "tokens",
        "vocab_size: 67, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, "
        "max_position_embeddings: 16, ffn_dim: 48, word_embed_proj_dim: 32, dropout: "
        "0.0, pad_token_id: 0",
    ),
    "GPTNeoXForCausalLM": ("tokens", _WIDTHS),
    "GPTJForCausalLM": (
        "tokens",
        "vocab_size: 67, n_embd: 32, n_layer: 2, n_head: 4, n_positions: 16, rotary_dim: "
        "4, resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0",
    ),
    "PhiForCausalLM": ("tokens", _GROUPED + ", pad_token_id: 0"),
    "Phi3ForCausalLM": ("tokens", _GROUPED + ", pad_token_id: 0"),
    "Gemma2ForCausalLM": ("tokens", _GROUPED + ", head_dim: 8, pad_token_id: 0"),
    "FalconForCausalLM": (
        "tokens",
        "vocab_size: 67, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4" + _OFF,
    ),
    "StableLmForCausalLM": ("tokens", _GROUPED),
    "Starcoder2ForCausalLM": (
        "tokens",
        _GROUPED + ", residual_dropout: 0.0, embedding_dropout: 0.0, attention_dropout: 0.0",
    ),
    "CohereForCausalLM": ("tokens", _GROUPED),
    "Olmo2ForCausalLM": ("tokens", _GROUPED),
    "GraniteForCausalLM": ("tokens", _GROUPED),
    "MptForCausalLM": (
        "tokens",
        "vocab_size: 67, d_model: 32, n_layers: 2, n_heads: 4, max_seq_len: 16",
    ),
    "MambaForCausalLM": (
        "tokens",
        "vocab_size: 67, hidden_size: 32, num_hidden_layers: 2, state_size: 4",
    ),
    "BartForConditionalGeneration": (
        "tokens",
        "vocab_size: 67, d_model: 32, encoder_layers: 2, decoder_layers: 2, "
        "encoder_attention_heads: 4, decoder_attention_heads: 4, encoder_ffn_dim: 48, "
        "decoder_ffn_dim: 48, max_position_embeddings: 16, dropout: 0.0, "
        "attention_dropout: 0.0, activation_dropout: 0.0, use_cache: false",
    ),
    "ElectraForMaskedLM": (
        "masked",
        _WIDTHS + ", embedding_size: 32, hidden_dropout_prob: 0, attention_probs_dropout_prob: 0",
    ),
    "AlbertForMaskedLM": (
        "masked",
        _WIDTHS + ", embedding_size: 32, hidden_dropout_prob: 0, attention_probs_dropout_prob: 0",
    ),
    "DistilBertForMaskedLM": (
        "masked",
        "vocab_size: 67, dim: 32, n_layers: 2, n_heads: 4, hidden_dim: 48, "
        "max_position_embeddings: 16, dropout: 0.0, attention_dropout: 0.0",
    ),
    "RobertaForMaskedLM": (
        "masked",
        _WIDTHS.replace("embeddings: 16", "embeddings: 20")
        + ", hidden_dropout_prob: 0, attention_probs_dropout_prob: 0, pad_token_id: 0",
    ),
    "SwinForImageClassification": (
        "pictures",
        "image_size: 16, patch_size: 2, embed_dim: 16, depths: [1, 1], num_heads: [2, "
        "4], window_size: 4, num_labels: 10, hidden_dropout_prob: 0.0, "
        "attention_probs_dropout_prob: 0.0, drop_path_rate: 0.0",
    ),
    "ConvNextForImageClassification": (
        "pictures",
        "patch_size: 2, hidden_sizes: [8, 16], depths: [1, 1], num_stages: 2, num_labels: 10",
    ),
    "Qwen2MoeForCausalLM": (
        "tokens",
        _GROUPED + ", moe_intermediate_size: 32, num_experts: 8, shared_expert_intermediate_size: "
        "40, num_experts_per_tok: 2, decoder_sparse_step: 1",
    ),
    "DeepseekV3ForCausalLM": (
        "tokens",
        _WIDTHS + ", num_key_value_heads: 4, moe_intermediate_size: 32, n_routed_experts: 8, "
        "num_experts_per_tok: 2, n_group: 2, topk_group: 1, n_shared_experts: 1, "
        "first_k_dense_replace: 1, q_lora_rank: 16, kv_lora_rank: 16, qk_rope_head_dim: "
        "8, qk_nope_head_dim: 8, v_head_dim: 16",
    ),
}
# In a run of some of the tests: windows, whose rows are in another order.
_SOME = ("SwinForImageClassification",)


def overrides(
    arrays: Path, model: str, part: str, strategy: str, optimizer: str, *extra: str
) -> tuple[list[str], list[str]]:
    """Return the job, and the same on one device."""
    devices, written, speeds = graph(strategy, PARTS[model][part])
    kind, chosen = MODELS[model]
    common = [
        *chosen,
        *("data=arrays", f"data.path={arrays / kind}.npz", "data.shuffle=false"),
        *OPTIMIZERS[optimizer],
        *(f"train.steps={strategies.STEPS}", f"train.global_batch={strategies.GLOBAL_BATCH}"),
        *extra,
    ]
    split = [*common, f"strategy.graph={written}", *hardware(devices, speeds)]
    return split, [*common, "strategy=single", *hardware(1, ())]


@pytest.mark.parametrize(("model", "part", "strategy", "optimizer"), CASES)
def test_equals_one_device(
    model: str, part: str, strategy: str, optimizer: str, jobs: Jobs, arrays: Path
) -> None:
    split, single = overrides(arrays, model, part, strategy, optimizer)
    assert_equal(jobs.run(split), jobs.run(single), TOLERANCE)


@pytest.mark.parametrize(
    "extra",
    [
        # Steps in parts are shown by test_heads too, clipped ones by test_routed_experts.
        pytest.param(("train.accumulate=2",), marks=pytest.mark.full),
        pytest.param(("train.grad_clip=0.05",), marks=pytest.mark.full),
        ("train.evaluate_every=2", "data.evaluation_fraction=0.5"),
    ],
    ids=lambda extra: extra[0],
)
def test_steps_in_parts_clipped_or_evaluated(
    extra: tuple[str, ...], jobs: Jobs, arrays: Path
) -> None:
    split, single = overrides(arrays, "llama", "both", "over3_unlike", "sgd", *extra)
    assert_equal(jobs.run(split), jobs.run(single), TOLERANCE)


@pytest.mark.parametrize("name", some(SWEPT, _SOME))
def test_all_weights_of_any_model(name: str, jobs: Jobs, arrays: Path) -> None:
    kind, config = SWEPT[name]
    common = [
        *strategies.hf(name, config),
        *("data=arrays", f"data.path={arrays / kind}.npz", "data.shuffle=false"),
        *OPTIMIZERS["sgd"],
        *("train.steps=3", f"train.global_batch={strategies.GLOBAL_BATCH}"),
    ]
    split = [*common, f"strategy.graph={beside(('dim: tensor',))}", *hardware(2, ())]
    single = [*common, "strategy=single", *hardware(1, ())]
    assert_equal(jobs.run(split), jobs.run(single), TOLERANCE)


def test_statistics_of_all_samples_are_not_those_of_a_copy(jobs: Jobs, arrays: Path) -> None:
    kind, resnet = MODELS["resnet"]
    graph = beside(("dim: tensor",))
    said = r"cannot be split beside copies of the rest: batch_norm.* normalises over the batch"
    with pytest.raises(JobFailed, match=said):
        jobs.run(
            [
                *resnet,
                *("data=arrays", f"data.path={arrays / kind}.npz", f"strategy.graph={graph}"),
                *hardware(2, ()),
            ]
        )


MEMORY = 0.05  # how far a plan's memory may be from that of the rehearsed rank


@pytest.mark.parametrize("precision", some(["fp32", "bf16"], ["bf16"]))
@pytest.mark.parametrize(
    ("copies", "parts"),
    [
        pytest.param("{}", ('modules: ["*.expand", "*.contract"]',), marks=pytest.mark.full),
        pytest.param("{zero: 1}", ("dim: tensor",), marks=pytest.mark.full),
        ("{zero: 1}", ("modules: token", 'modules: "*.attention"')),
        ("{}", ("modules: head", 'modules: "*.expand"')),
    ],
)
def test_ranks_need_what_was_planned(
    copies: str, parts: tuple[str, ...], precision: str, served: Served
) -> None:
    found = Rehearsal.from_json(
        served.ask(
            rehearsed,
            overrides=[
                *("model=gpt", "model.depth=4", "model.width=1024", "model.heads=8"),
                *("model.vocab_size=8192", "data=text", "data.sequence_length=128"),
                *("train.global_batch=32", f"train.precision={precision}", "hardware=dgx_a100"),
                f"strategy.graph={beside(parts, copies)}",
            ],
        )
    )
    assert found.is_clean
    for kind in found.kinds:
        assert kind.peak == pytest.approx(kind.planned, rel=MEMORY)


def test_the_encoder_is_copied_and_the_decoder_split(jobs: Jobs, arrays: Path) -> None:
    """Whale's own example: both parts are named, over four devices and two of them."""
    data, settings = MODELS["t5"]
    common = [*settings, "data=arrays", f"data.path='{arrays / data}.npz'", "train.steps=3"]
    common += ["train.global_batch=8", "optimizer=sgd", "optimizer.lr=0.1"]
    graph = "[{replicate: {degree: 4, modules: encoder}}, {split: {degree: 2, modules: decoder}}]"
    four = ("hardware=cpu", "hardware.devices=4", f"strategy.graph={graph}")
    parts = jobs.run([*common, *four])
    rest, split = parts.plan["task_graphs"]
    assert all(path.startswith("decoder.") for path in split["parameters"])
    assert any(path.startswith("encoder.") for path in rest["parameters"])
    assert (len(rest["replicas"]), len(split["replicas"])) == (4, 2)
    one = jobs.run([*common, "hardware=cpu", "hardware.devices=1", "strategy=single"])
    assert_equal(parts, one, TOLERANCE, 2e-4)
