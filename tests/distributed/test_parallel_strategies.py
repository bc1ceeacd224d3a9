"""Every nesting of strategies computes what one device would, on models nobody adapted.

One line a case: a model, a strategy graph, devices. Losses, gradient norms and updated parameters
of four steps against `strategy=single`, with SGD and with AdamW.
"""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from tests.distributed.cases import OPTIMIZERS, TOLERANCE, hardware
from tests.distributed.equality import Arrays, JobFailed, Jobs, assert_equal, save
from tests.distributed.equality_table import fewest, shown_by_nesting

STEPS, GLOBAL_BATCH, SEQUENCE, SAMPLES = 4, 8, 12, 16

# --- Models: (the arrays it reads, overrides) ----------------------------------------------------

_TINY = "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4, num_attention_heads: 4"
_LM = f"vocab_size: 67, {_TINY}, max_position_embeddings: 16"


def hf(architecture: str, config: str) -> tuple[str, ...]:
    return ("model=hf", f"model.architecture={architecture}", f"model.config={{{config}}}")


MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "gpt2": (
        "tokens",
        hf(
            "GPT2LMHeadModel",
            "vocab_size: 67, n_positions: 16, n_embd: 32, n_layer: 4, n_head: 4, resid_pdrop: 0.0, "
            "embd_pdrop: 0.0, attn_pdrop: 0.0, bos_token_id: 0, eos_token_id: 0",
        ),
    ),
    "llama": ("tokens", hf("LlamaForCausalLM", f"{_LM}, num_key_value_heads: 4")),
    "qwen3": ("tokens", hf("Qwen3ForCausalLM", f"{_LM}, num_key_value_heads: 2, head_dim: 8")),
    "bert": (
        "masked",
        hf("BertForMaskedLM", f"{_LM}, hidden_dropout_prob: 0, attention_probs_dropout_prob: 0"),
    ),
    "t5": (
        "tokens",
        hf(
            "T5ForConditionalGeneration",
            "vocab_size: 67, d_model: 32, d_ff: 48, num_layers: 2, num_heads: 4, d_kv: 8, "
            "dropout_rate: 0.0, decoder_start_token_id: 0, pad_token_id: 0, use_cache: false",
        ),
    ),
    "vit": (
        "pictures",
        hf(
            "ViTForImageClassification",
            f"{_TINY}, image_size: 16, patch_size: 4, num_labels: 10, hidden_dropout_prob: 0.0, "
            "attention_probs_dropout_prob: 0.0",
        ),
    ),
    "resnet": (
        "pictures",
        hf(
            "ResNetForImageClassification",
            "hidden_sizes: [8, 16], depths: [2, 2], embedding_size: 8, layer_type: basic, "
            "num_labels: 10",
        ),
    ),
    "mixtral": (
        "tokens",
        hf(
            "MixtralForCausalLM",
            f"{_LM}, num_key_value_heads: 2, num_local_experts: 4, num_experts_per_tok: 2",
        ),
    ),
    "torch_transformer": (
        "sequences",
        ("model._target_=parallel_models.Transformer", "model.loss=cross_entropy"),
    ),
    "picks": (
        "sequences",
        ("model._target_=parallel_models.Picks", "model.loss=cross_entropy"),
    ),
    "in_place": (
        "sequences",
        ("model._target_=parallel_models.InPlace", "model.loss=cross_entropy"),
    ),
    "gpt": (
        "tokens",
        ("model=gpt", "model.vocab_size=67", "model.sequence_length=12", "model.width=32",
         "model.depth=4", "model.heads=4", "model.tied=true"),
    ),
    "moe_gpt": (
        "tokens",
        ("model=moe_gpt", "model.vocab_size=67", "model.sequence_length=12", "model.width=32",
         "model.ffn=48", "model.experts=6"),
    ),
}  # fmt: skip

# --- Strategies ----------------------------------------------------------------------------------

_SPLIT2 = "{split: {degree: 2}}"
_ONE = "{stage: {}}"
_HYBRID = "[{replicate: {}}, {split: {modules: head}}]"


def pipeline(stages: object, schedule: str = "1f1b", micro_batches: int = 4) -> str:
    return (
        f"{{pipeline: {{stages: {stages}, schedule: {schedule}, micro_batches: {micro_batches}}}}}"
    )


# name: (devices, graph), and the speeds of unlike devices in TFLOP/s
STRATEGIES: dict[str, tuple[int, str] | tuple[int, str, tuple[float, ...]]] = {
    "hybrid": (2, "[{replicate: {}}, {split: {modules: head}}]"),
    "split2": (2, "{split: {}}"),
    "split3_uneven": (3, "{split: {}}", (2, 1, 1)),
    "split2_sequence": (2, "{split: {dim: sequence}}"),
    "pipeline2": (2, pipeline(2)),
    "pipeline4": (4, pipeline(4)),
    "pipeline_uneven": (2, pipeline(2), (3, 1)),
    "gpipe": (2, pipeline(2, "gpipe")),
    "interleaved": (2, pipeline(2, "interleaved_1f1b")),
    "zero_bubble": (3, pipeline(3, "zero_bubble")),
    "split2_pipeline2": (4, pipeline(f"[{_SPLIT2}, {_SPLIT2}]")),
    "replicate2_pipeline2_split2": (
        8,
        f"{{replicate: {{of: {pipeline(f'[{_SPLIT2}, {_SPLIT2}]', micro_batches=2)}}}}}",
    ),
    "widths_1_2": (3, pipeline("[{stage: {}}, {replicate: {degree: 2}}]")),
    "widths_2_1": (3, pipeline("[{replicate: {degree: 2}}, {stage: {}}]")),
    "replicate3_split2": (5, pipeline("[{replicate: {degree: 3}}, {split: {degree: 2}}]")),
    "split_in_one_stage": (3, pipeline(f"[{_ONE}, {_SPLIT2}]")),
    "replicate2_split2": (4, "{replicate: {of: {split: {degree: 2}}}}"),
    "zero1_pipeline": (4, f"{{replicate: {{degree: 2, zero: 1, of: {pipeline(2)}}}}}"),
    "zero1_offload_pipeline": (
        4,
        "{replicate: {degree: 2, zero: 1, offload: {optimizer: cpu}, of: " + pipeline(2) + "}}",
    ),
    "zero2_split2": (4, "{replicate: {zero: 2, of: {split: {degree: 2}}}}"),
    "zero3_split2": (4, "{replicate: {zero: 3, of: {split: {degree: 2}}}}"),
    "zero1_split2": (4, "{replicate: {zero: 1, of: {split: {degree: 2}}}}"),
    "replicate2_hybrid": (4, f"{{replicate: {{degree: 2, of: {_HYBRID}}}}}"),
    "pipeline_hybrid": (3, pipeline(f"[{_ONE}, {{stage: {{of: {_HYBRID}}}}}]", micro_batches=2)),
    "pipeline_hybrid_zero1": (
        3,
        pipeline(f"[{_ONE}, {{stage: {{of: {_HYBRID.replace('{}', '{zero: 1}')}}}}}]"),
    ),
    "pipeline_hybrid_uneven": (
        3,
        pipeline(f"[{_ONE}, {{stage: {{of: {_HYBRID}}}}}]", micro_batches=2),
        (1, 3, 1),
    ),
    "recompute": (2, pipeline("[{stage: {recompute: full}}, {stage: {recompute: full}}]")),
    "copies_again": (2, "{replicate: {recompute: full}}"),
    "zero3_again": (2, "{replicate: {zero: 3, recompute: full}}"),
    "split_again": (2, "{split: {recompute: full}}"),
    "hybrid_again": (2, "[{replicate: {recompute: full}}, {split: {modules: head}}]"),
    "partly": (2, "{replicate: {zero: 2, recompute: {memory: 0.6}}}"),
    "stages_by_device": (
        4,
        "{replicate: {of: "
        + pipeline("[{stage: {device: gpu_1}}, {stage: {device: gpu_0}}]", micro_batches=2)
        + "}}",
        (1, 3),
    ),
    "split3_split2": (5, pipeline(f"[{{split: {{degree: 3}}}}, {_SPLIT2}]")),
}


def write_arrays(folder: Path) -> None:
    draw = np.random.default_rng(11)
    tokens = draw.integers(1, 67, (SAMPLES, SEQUENCE))
    lengths = draw.integers(SEQUENCE // 2, SEQUENCE + 1, (SAMPLES, 1))
    wanted = np.resize([1, 12, 3, 1, 7, 1, 12, 5], SAMPLES)
    ranks = draw.random((SAMPLES, SEQUENCE)).argsort(1)
    arrays: dict[str, Arrays] = {
        "tokens": {"input_ids": tokens, "labels": tokens},
        "masked": {
            "input_ids": tokens,
            "attention_mask": (np.arange(SEQUENCE) < lengths).astype(np.int64),
            "labels": np.where(ranks < wanted[:, None], tokens, -100),
        },
        "pictures": {
            "pixel_values": draw.normal(size=(SAMPLES, 3, 16, 16)),
            "labels": draw.integers(0, 10, SAMPLES),
        },
        "sequences": {
            "points": draw.normal(size=(SAMPLES, 6, 32)),
            "labels": draw.integers(0, 11, SAMPLES),
        },
    }
    for name, found in arrays.items():
        save(folder / f"{name}.npz", found)


@dataclass(frozen=True)
class Case:
    model: str
    strategy: str
    optimizer: str
    extra: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join((self.model, self.strategy, self.optimizer, *self.extra))

    def overrides(self, arrays: Path) -> list[str]:
        kind, model = MODELS[self.model]
        if self.strategy == "single":
            strategy: Sequence[str] = ("strategy=single", *hardware(1, ()))
        else:
            devices, graph, *speeds = STRATEGIES[self.strategy]
            unlike = speeds[0] if speeds else ()
            strategy = (f"strategy.graph={graph}", *hardware(devices, unlike))
        return [
            *model,
            *("data=arrays", f"data.path={arrays / kind}.npz", "data.shuffle=false"),
            *strategy,
            *OPTIMIZERS[self.optimizer],
            *(f"train.steps={STEPS}", f"train.global_batch={GLOBAL_BATCH}"),
            *self.extra,
        ]


BATCH_NORM = (
    "cuts the batch, over all of which resnet.embedder.embedder.normalization takes its "
    "statistics (model.sync_batchnorm=true); use micro_batches: 1, or model.sync_batchnorm=false "
    "for those of a micro-batch"
)


TIED = "whose weight another stage holds as well; untie it, or split whole stages"


def refusal(model: str, strategy: str) -> str:
    """What is said to a pair without a meaning: BatchNorm wants the whole batch, and a head that
    is the embedding of another stage is not its own to split."""
    if model == "resnet" and "pipeline" in STRATEGIES[strategy][1]:
        return BATCH_NORM
    if model == "picks" and strategy.endswith(("_again", "partly")):
        return "finds no list of blocks in Picks; name the modules, as recompute: [first]"
    return TIED if strategy.startswith("pipeline_hybrid") and model in TIES else ""


TIES = ("gpt", "gpt2", "bert", "t5")


EVALUATED = ("train.evaluate_every=2", "data.evaluation_fraction=0.5")


CASES = [
    *(
        Case(model, strategy, optimizer)
        for strategy, optimizer, model in product(STRATEGIES, ("sgd", "adamw"), MODELS)
    ),
    Case("bert", "replicate2_pipeline2_split2", "sgd", ("train.grad_clip=0.05",)),
    Case("qwen3", "widths_2_1", "momentum", ("train.grad_clip=0.05",)),
    Case("gpt", "zero1_pipeline", "adamw", ("train.grad_clip=0.05",)),
    Case("t5", "zero3_split2", "sgd", ("train.grad_clip=0.05",)),
    Case("gpt", "split2_pipeline2", "sgd", EVALUATED),
    Case("bert", "replicate2_split2", "sgd", EVALUATED),
    Case("t5", "interleaved", "adamw", EVALUATED),
]


def shown(case: Case) -> set[Hashable]:
    graph, said = STRATEGIES[case.strategy][1], refusal(case.model, case.strategy)
    return shown_by_nesting(case.model, case.strategy, case.optimizer, case.extra, graph, said)


@pytest.mark.parametrize("case", fewest(CASES, shown), ids=str)
def test_equals_one_device(case: Case, jobs: Jobs, arrays: Path) -> None:
    said = refusal(case.model, case.strategy)
    if said:
        with pytest.raises(JobFailed, match=re.escape(said)):
            jobs.run(case.overrides(arrays))
        return
    single = replace(case, strategy="single")
    assert_equal(jobs.run(case.overrides(arrays)), jobs.run(single.overrides(arrays)), TOLERANCE)


def test_micro_batches_have_statistics_of_their_own_where_asked(jobs: Jobs, arrays: Path) -> None:
    """BatchNorm in a pipeline is possible without the promise, and then differs."""
    case = Case("resnet", "pipeline2", "sgd", ("model.sync_batchnorm=false",))
    found = jobs.run(case.overrides(arrays))
    one = jobs.run(replace(case, strategy="single").overrides(arrays))
    assert all(np.isfinite(found.losses))
    assert abs(found.losses[0] / one.losses[0] - 1) > TOLERANCE


def test_a_pipeline_of_one_micro_batch_has_the_whole_batch(jobs: Jobs, arrays: Path) -> None:
    graph = pipeline(2, micro_batches=1)
    case = Case("resnet", "single", "sgd")
    overrides = case.overrides(arrays)
    place = overrides.index("strategy=single")
    overrides[place : place + 3] = [f"strategy.graph={graph}", *hardware(2, ())]
    assert_equal(jobs.run(overrides), jobs.run(case.overrides(arrays)), TOLERANCE)


MEETING = "lets the samples of a batch meet: {0} in its own forward ({0})"


@pytest.mark.parametrize(
    ("name", "operation", "graph"),
    [
        ("Contrastive", "matmul", "{replicate: {}}"),
        pytest.param("Contrastive", "matmul", pipeline(2), marks=pytest.mark.full),
        ("Contrastive", "matmul", _HYBRID),
        ("Balanced", "mul", pipeline(2, micro_batches=2)),
    ],
)
def test_samples_that_meet_are_not_shared(
    name: str, operation: str, graph: str, jobs: Jobs, arrays: Path
) -> None:
    with pytest.raises(JobFailed, match=re.escape(f"model={name} {MEETING.format(operation)}")):
        jobs.run(meeting(name, arrays, graph, 2))


def test_a_head_is_not_split_where_samples_meet_in_it(jobs: Jobs, arrays: Path) -> None:
    said = r"split sees the samples of all its devices, and copies exchange mean_1, a sum over"
    with pytest.raises(JobFailed, match=said):
        jobs.run(meeting("Balanced", arrays, _HYBRID, 2))


@pytest.mark.parametrize(
    ("name", "graph"),
    [
        ("Contrastive", "{split: {}}"),
        pytest.param("Balanced", "{split: {}}", marks=pytest.mark.full),
        ("Contrastive", pipeline(2, micro_batches=1)),
        pytest.param("Balanced", pipeline(2, micro_batches=1), marks=pytest.mark.full),
        # Whose samples meet in sums over the batch.
        pytest.param("Balanced", "{replicate: {}}", marks=pytest.mark.full),
        ("Balanced", "{replicate: {zero: 3}}"),
    ],
)
def test_samples_that_meet_in_one_place_are_one_device(
    name: str, graph: str, jobs: Jobs, arrays: Path
) -> None:
    single = jobs.run(meeting(name, arrays, "{replicate: {}}", 1))
    assert_equal(jobs.run(meeting(name, arrays, graph, 2)), single, TOLERANCE)


def meeting(name: str, arrays: Path, graph: str, devices: int) -> list[str]:
    return [
        f"model._target_=parallel_models.{name}",
        *("data=arrays", f"data.path={arrays / 'sequences'}.npz", "data.shuffle=false"),
        *(f"strategy.graph={graph}", *hardware(devices, ())),
        *OPTIMIZERS["sgd"],
        *(f"train.steps={STEPS}", f"train.global_batch={GLOBAL_BATCH}"),
    ]
