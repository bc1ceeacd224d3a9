"""Modules split beside copies of the rest compute what one device would.

Losses, gradient norms and updated parameters of four steps against `strategy=single`, on models
nobody adapted: MLPs, attention and tables whose weights the devices that share the samples divide.
"""

from pathlib import Path

import pytest
from tests.distributed import test_parallel_strategies as strategies
from tests.distributed import test_routed_experts as mixtures
from tests.distributed.cases import OPTIMIZERS, TOLERANCE, hardware
from tests.distributed.equality import Jobs, assert_equal
from tests.distributed.served import Served
from tests.distributed.test_rehearse import rehearsed

from whale_train.rehearsal import Rehearsal

MODELS = strategies.MODELS | {name: ("tokens", x) for name, x in mixtures.MODELS.items()}
# What of a model is split, one entry a split.
PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": {
        "mlp": ('modules: "*.mlp"',),
        "attention": ('modules: "*.attn", dim: tensor',),
        "both": ('modules: "*.mlp"', 'modules: "*.attn"'),
        "table": ("modules: transformer.wte",),  # which is the head as well
        "all": ("dim: tensor",),
        "all_but": ("modules: head, dim: vocabulary", 'modules: ["*.mlp", "*.attn"]'),
    },
    "llama": {
        "mlp": ('modules: "*.mlp"',),
        "both": ('modules: ["*.mlp", "*.self_attn"]',),
        "table": ("modules: model.embed_tokens, dim: vocabulary",),
        "all": ("dim: tensor",),
        "head": ("modules: head", 'modules: "*.mlp"'),
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


CASES = [
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
    ("gpt2", "all_but", "two_of_2_zero1", "sgd"),
    ("llama", "mlp", "on_hosts", "sgd"),
    ("llama", "both", "pipeline_unlike", "sgd"),
    ("llama", "mlp", "zero_bubble", "sgd"),
    ("llama", "both", "recompute", "sgd"),
    ("bert", "encoder", "over3_unlike", "adamw"),
    ("t5", "all", "over4", "sgd"),
    ("vit", "all", "over3_unlike", "sgd"),
    ("qwen3", "attention", "one_stage", "sgd"),
    ("mixtral", "with_experts", "over3_unlike", "sgd"),
    ("qwen2_moe", "with_experts", "zero1", "sgd"),
    ("moe_gpt", "with_experts", "pipeline", "sgd"),
    ("moe_gpt", "with_experts", "on_hosts", "sgd"),
]


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
        ("train.accumulate=2",),
        ("train.grad_clip=0.05",),
        ("train.evaluate_every=2", "data.evaluation_fraction=0.5"),
    ],
    ids=lambda extra: extra[0],
)
def test_steps_in_parts_clipped_or_evaluated(
    extra: tuple[str, ...], jobs: Jobs, arrays: Path
) -> None:
    split, single = overrides(arrays, "llama", "both", "over3_unlike", "sgd", *extra)
    assert_equal(jobs.run(split), jobs.run(single), TOLERANCE)


MEMORY = 0.05  # how far a plan's memory may be from that of the rehearsed rank


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("copies", "parts"),
    [
        ("{}", ('modules: ["*.expand", "*.contract"]',)),
        ("{zero: 1}", ("dim: tensor",)),
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
