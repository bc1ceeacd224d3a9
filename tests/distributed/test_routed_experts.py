"""Experts spread over the devices that share the samples compute what one device would.

Losses, gradient norms and updated parameters of four steps against `strategy=single`, on mixtures
nobody adapted, whose tokens go to their experts and come back.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed import test_parallel_strategies as strategies
from tests.distributed.cases import OPTIMIZERS, TOLERANCE, hardware
from tests.distributed.equality import JobFailed, Jobs, assert_equal
from tests.distributed.served import Served
from tests.distributed.test_rehearse import rehearsed
from tests.pairs import covering, some

from whale_train.models.grouped_product import grouped_mm
from whale_train.rehearsal import Rehearsal
from whale_train.runtime.graph.expert_loads import MixtureLoad, PendingLoads
from whale_train.runtime.kernels.grouped_experts import own_grouped_mm

_MIXTURE = (
    "vocab_size: 67, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, "
    "max_position_embeddings: 16, num_key_value_heads: 2"
)
MODELS = {
    "moe_gpt": (
        *("model=moe_gpt", "model.vocab_size=67", "model.sequence_length=12", "model.width=32"),
        *("model.ffn=48", "model.experts=8", "model.depth=2"),
    ),
    "mixtral": strategies.hf(
        "MixtralForCausalLM",
        f"{_MIXTURE}, intermediate_size: 48, num_local_experts: 8, num_experts_per_tok: 2",
    ),
    # With an expert that all tokens go to, beside the others.
    "qwen2_moe": strategies.hf(
        "Qwen2MoeForCausalLM",
        f"{_MIXTURE}, intermediate_size: 48, moe_intermediate_size: 32, num_experts: 8, "
        "shared_expert_intermediate_size: 40, num_experts_per_tok: 2, decoder_sparse_step: 1",
    ),
    "olmoe": strategies.hf(
        "OlmoeForCausalLM",
        f"{_MIXTURE}, intermediate_size: 32, num_experts: 8, num_experts_per_tok: 2",
    ),
    # Scores by sigmoid, experts in groups, one shared, a dense layer first, latent attention.
    "deepseek_v3": strategies.hf(
        "DeepseekV3ForCausalLM",
        f"{_MIXTURE.replace('heads: 2', 'heads: 4')}, intermediate_size: 48, "
        "moe_intermediate_size: 32, n_routed_experts: 8, num_experts_per_tok: 2, n_group: 2, "
        "topk_group: 1, n_shared_experts: 1, first_k_dense_replace: 1, q_lora_rank: 16, "
        "kv_lora_rank: 16, qk_rope_head_dim: 8, qk_nope_head_dim: 8, v_head_dim: 16",
    ),
}
# What of a mixture is made of the whole batch, or of a sample's other tokens.
LIMITED = {
    "moe_gpt": (
        *("model.balance=0.5", "model.z_loss=0.1", "model.capacity_factor=0.8"),
        "model.bias_rate=0.01",
    ),
    "mixtral": ("output_router_logits: true, router_aux_loss_coef: 0.5",),
    "qwen2_moe": ("output_router_logits: true, router_aux_loss_coef: 0.5",),
    "olmoe": ("output_router_logits: true, router_aux_loss_coef: 0.5",),
}

# In a run of some of the tests: a mixture of ours and one of transformers over unlike devices, and
# stages of it.
_SOME_LIMITED = {
    *((model, "over3_unlike") for model in ("moe_gpt", "mixtral")),
    ("moe_gpt", "pipeline_whole"),
}
_LIMITED_CASES = some(
    [
        *(
            (model, name)
            for model in ("moe_gpt", "mixtral", "qwen2_moe")
            for name in ("over2", "over4", "zero1", "over3_unlike", "pipeline_whole")
        ),
        ("olmoe", "over2"),
        ("moe_gpt", "two_of_2"),
        ("moe_gpt", "streamed"),
        ("moe_gpt", "copies"),
        ("mixtral", "copies"),
        ("qwen2_moe", "copies_split"),
    ],
    _SOME_LIMITED,
)


def beside(copies: str = "{}") -> str:
    """Experts over the devices of copies that keep what they have in common as `copies` says."""
    return f'[{{replicate: {copies}}}, {{split: {{modules: "*.experts", dim: experts}}}}]'


_ON_HOSTS = "{zero: 3, offload: {optimizer: cpu, parameters: cpu}}"
_STAGE = '{stage: {of: [{replicate: {degree: 2}}, {split: {modules: "*.experts", dim: experts}}]}}'
STRATEGIES: dict[str, tuple[int, str, tuple[float, ...]]] = {
    "over2": (2, beside(), ()),
    "over4": (4, beside(), ()),
    "zero1": (2, beside("{zero: 1}"), ()),
    "zero3": (2, beside("{zero: 3}"), ()),
    "two_of_2": (4, f"{{replicate: {{degree: 2, of: {beside()}}}}}", ()),
    "two_of_2_zero1": (4, f"{{replicate: {{degree: 2, of: {beside('{zero: 1}')}}}}}", ()),
    "over3_unlike": (3, beside(), (5, 2, 1)),
    # Of experts, whose copies are fewer, no more than the optimizer is partitioned.
    "offload": (2, beside("{zero: 1, offload: {optimizer: cpu}}"), ()),
    "two_of_2_offload": (
        4,
        f"{{replicate: {{degree: 2, of: {beside('{zero: 2, offload: {optimizer: cpu}}')}}}}}",
        (),
    ),
    # Weights of the only copy of an expert come from the host when they are read.
    "streamed": (2, beside(_ON_HOSTS), ()),
    "streamed_unlike": (3, beside(_ON_HOSTS), (5, 2, 1)),
    "two_of_2_on_hosts": (4, f"{{replicate: {{degree: 2, of: {beside(_ON_HOSTS)}}}}}", ()),
    "pipeline": (4, strategies.pipeline(f"[{_STAGE}, {_STAGE}]"), ()),
    "pipeline_zero1": (
        8,
        "{replicate: {degree: 2, zero: 1, of: "
        + strategies.pipeline(f"[{_STAGE}, {_STAGE}]", micro_batches=2)
        + "}}",
        (),
    ),
    "widths_1_3_2": (
        6,
        strategies.pipeline(
            f"[{{stage: {{}}}}, {_STAGE.replace('2', '3')}, {_STAGE}]", micro_batches=2
        ),
        (),
    ),
    "zero_bubble": (4, strategies.pipeline(f"[{_STAGE}, {_STAGE}]", "zero_bubble", 2), ()),
    "interleaved": (4, strategies.pipeline(f"[{_STAGE}, {_STAGE}]", "interleaved_1f1b", 2), ()),
}
_AGAIN = _STAGE.replace("stage: {", "stage: {recompute: full, ")
STRATEGIES["recompute"] = (4, strategies.pipeline(f"[{_AGAIN}, {_AGAIN}]", micro_batches=2), ())
# Of which nothing is made of samples of several micro-batches.
STRATEGIES |= {
    "pipeline_whole": (4, strategies.pipeline(f"[{_STAGE}, {_STAGE}]", micro_batches=1), ()),
    "copies": (3, "{replicate: {zero: 1}}", (5, 2, 1)),
    "copies_of_stages": (4, f"{{replicate: {{degree: 2, of: {strategies.pipeline(2)}}}}}", ()),
    "copies_split": (4, "{replicate: {of: {split: {degree: 2}}}}", ()),
}
# In a run of some of the tests: uneven shares, experts that have copies whose optimizer is
# partitioned on the host, stages of unlike widths, and what delays or repeats products. The others
# are parts of these, or are shown below with more: deepseek_v3 and `streamed` by the biases of its
# routers, `zero3` by a layer in all places, `pipeline_zero1` by sequences in micro-batches.
_SOME_STRATEGIES = {
    *("over3_unlike", "two_of_2_offload", "streamed_unlike"),
    *("widths_1_3_2", "zero_bubble", "recompute"),
}
CASES = covering(
    [
        *((model, name, "sgd") for model in MODELS for name in ("over2", "over4", "over3_unlike")),
        *((model, "zero1", "momentum") for model in ("moe_gpt", "mixtral", "qwen2_moe")),
        *(("moe_gpt", name, "sgd") for name in ("zero3", "two_of_2", "two_of_2_zero1")),
        ("mixtral", "two_of_2", "adamw"),
        ("moe_gpt", "over2", "adamw"),
        ("qwen2_moe", "offload", "sgd"),
        ("mixtral", "two_of_2_offload", "sgd"),
        ("moe_gpt", "streamed", "adamw"),
        ("mixtral", "streamed_unlike", "momentum"),
        ("qwen2_moe", "streamed", "sgd"),
        ("deepseek_v3", "streamed", "sgd"),
        ("moe_gpt", "two_of_2_on_hosts", "sgd"),
        *((model, "pipeline", "sgd") for model in ("moe_gpt", "mixtral", "qwen2_moe")),
        ("mixtral", "pipeline_zero1", "adamw"),
        ("qwen2_moe", "widths_1_3_2", "sgd"),
        ("moe_gpt", "zero_bubble", "momentum"),
        ("qwen2_moe", "recompute", "sgd"),  # whose rows come back under products, and again
    ],
    lambda case: {case[1]} & _SOME_STRATEGIES,
)


def overrides(
    arrays: Path, model: str, strategy: str, optimizer: str, *extra: str
) -> tuple[list[str], list[str]]:
    """Return the job, and the same on one device."""
    devices, graph, speeds = STRATEGIES[strategy]
    common = [
        *MODELS[model],
        *("data=arrays", f"data.path={arrays / 'tokens'}.npz", "data.shuffle=false"),
        *OPTIMIZERS[optimizer],
        *(f"train.steps={strategies.STEPS}", f"train.global_batch={strategies.GLOBAL_BATCH}"),
        *extra,
    ]
    spread = [*common, f"strategy.graph={graph}", *hardware(devices, speeds)]
    return spread, [*common, "strategy=single", *hardware(1, ())]


@pytest.mark.parametrize(("model", "strategy", "optimizer"), CASES)
def test_equals_one_device(
    model: str, strategy: str, optimizer: str, jobs: Jobs, arrays: Path
) -> None:
    spread, single = overrides(arrays, model, strategy, optimizer)
    assert_equal(jobs.run(spread), jobs.run(single), TOLERANCE)


@pytest.mark.full
def test_a_stage_of_several_parts_of_the_model(jobs: Jobs, arrays: Path) -> None:
    spread, single = overrides(arrays, "moe_gpt", "interleaved", "sgd", "model.depth=4")
    assert_equal(jobs.run(spread), jobs.run(single), TOLERANCE)


@pytest.mark.parametrize(("model", "strategy"), _LIMITED_CASES)
def test_what_is_made_of_the_whole_batch_is(
    model: str, strategy: str, jobs: Jobs, arrays: Path
) -> None:
    """Losses that balance experts, over the batch; room for some of a sequence's tokens; a bias."""
    spread, single = overrides(arrays, model, strategy, "sgd")
    found, expected = (jobs.run(limited(model, each)) for each in (spread, single))
    assert_equal(found, expected, TOLERANCE)
    # Every row is counted once, by whoever sorts it.
    first, one = (x.lines[0]["experts"] for x in (found, expected))
    assert first == one
    rows = sum(map(sum, one["load"]))
    assert rows + sum(one["dropped"]) == 2 * 2 * 12 * strategies.GLOBAL_BATCH
    assert (sum(one["dropped"]) > 0) == (model == "moe_gpt")


@pytest.mark.parametrize(
    "strategy",
    some(["over2", "streamed", "copies", "copies_of_stages"], ["streamed"]),
)
def test_biases_of_routers_follow_the_loads(strategy: str, jobs: Jobs, arrays: Path) -> None:
    rate = 0.001
    more = f"train.router_bias_rate={rate}"
    spread, single = overrides(arrays, "deepseek_v3", strategy, "sgd", more)
    found, expected = jobs.run(spread), jobs.run(single)
    assert_equal(found, expected, TOLERANCE)
    loads = [np.array(line["experts"]["load"][0]) for line in found.lines]
    assert [line["experts"] for line in found.lines] == [x["experts"] for x in expected.lines]
    (path,) = found.plan["router_biases"].values()
    moved = sum(rate * np.sign(load.mean() - load) for load in loads)
    assert np.abs(moved).max() > 0
    for held in found.values[path]:
        np.testing.assert_allclose(held, moved, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "more", "said"),
    [
        (
            "mixtral",
            (),
            "train.router_bias_rate=0.1 moves the biases by which routers choose experts, and the "
            "model has no such buffers; use null, or a model that has, as DeepseekV3ForCausalLM",
        ),
        (
            "deepseek_v3",
            ("train.compile=true",),
            "train.router_bias_rate=0.1 goes by loads that train.compile=true hides in a model "
            "that runs as it is; use train.compile=false, or strategy=experts_dp",
        ),
    ],
)
def test_biases_that_cannot_be_moved(
    model: str, more: tuple[str, ...], said: str, jobs: Jobs, arrays: Path
) -> None:
    spread, _ = overrides(arrays, model, "copies", "sgd", "train.router_bias_rate=0.1", *more)
    with pytest.raises(JobFailed) as refused:
        jobs.run(spread)
    assert said in str(refused.value)


def limited(model: str, job: list[str]) -> list[str]:
    """Return a job whose mixture is `LIMITED`."""
    more = LIMITED[model]
    if model == "moe_gpt":
        return [*job, *more]
    return [f"{x.removesuffix('}')}, {more[0]}}}" if "model.config=" in x else x for x in job]


def test_a_head_is_split_beside_a_loss_over_the_batch(jobs: Jobs, arrays: Path) -> None:
    """Copies exchange its sums, of samples of their own; the head sees those of all."""
    spread, single = overrides(arrays, "moe_gpt", "over2", "sgd", "model.balance=0.5")
    graph = "strategy.graph=[{replicate: {}}, {split: {modules: head}}]"
    job = [graph if x.startswith("strategy.graph=") else x for x in spread]
    assert_equal(jobs.run(job), jobs.run(single), TOLERANCE)


def test_loads_that_nobody_saw_are_not_told() -> None:
    """As of a model whose products are called in a way of its own."""
    seen = torch.tensor([2, 1, 4, 0, 0, 0])
    assert PendingLoads(seen, None, {"a": 2, "b": 2}).read() == []
    assert PendingLoads(seen[:3], None, {"a": 2}).read() == [MixtureLoad((2, 1), 4)]


@pytest.mark.parametrize(
    "strategy",
    some(["over3_unlike", "zero3", "copies_of_stages", "copies_split"], ["zero3"]),
)
def test_one_layers_weights_in_all_places(strategy: str, jobs: Jobs, arrays: Path) -> None:
    spread, single = overrides(arrays, "moe_gpt", strategy, "momentum", "model.share_layers=true")
    found = jobs.run(spread)
    assert not any("blocks.1." in path for x in found.plan["task_graphs"] for path in x["trained"])
    assert_equal(found, jobs.run(single), TOLERANCE)


@pytest.mark.parametrize("prototypes", some([1, 2, 4], [2]))
def test_sequences_balanced_in_micro_batches(prototypes: int, jobs: Jobs, arrays: Path) -> None:
    more = (
        *("model.balance=0.5", "model.balance_over=sequence", "model.capacity_factor=0.8"),
        *(f"model.prototypes={prototypes}", "model.top_k=1"),
    )
    spread, single = overrides(arrays, "moe_gpt", "pipeline_zero1", "sgd", *more)
    assert_equal(jobs.run(spread), jobs.run(single), TOLERANCE)


@pytest.mark.parametrize(
    "extra",
    [
        # Evaluations are shown by test_dense_parts too, steps in parts by test_heads. The norm that
        # clips has to count each expert once, wherever it is.
        pytest.param(("train.accumulate=2",), marks=pytest.mark.full),
        ("train.grad_clip=0.05",),
        pytest.param(
            ("train.evaluate_every=2", "data.evaluation_fraction=0.5"), marks=pytest.mark.full
        ),
    ],
    ids=lambda extra: extra[0],
)
@pytest.mark.parametrize("strategy", some(["over2", "streamed"], ["streamed"]))
def test_steps_in_parts_clipped_or_evaluated(
    strategy: str, extra: tuple[str, ...], jobs: Jobs, arrays: Path
) -> None:
    spread, single = overrides(arrays, "mixtral", strategy, "sgd", *extra)
    assert_equal(jobs.run(spread), jobs.run(single), TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_expert_without_rows_gives_what_others_do(dtype: torch.dtype) -> None:
    """An all-to-all has one dtype, and all take part in it, whoever has nothing to send."""
    rows = torch.zeros(0, 16, dtype=dtype, requires_grad=True)
    weight = torch.ones(2, 16, 8, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        made = own_grouped_mm(grouped_mm, rows, weight, torch.zeros(2, dtype=torch.int32))
        some = grouped_mm(
            torch.ones(2, 16, dtype=dtype), weight, torch.tensor([1, 2], dtype=torch.int32)
        )
    assert (made.dtype, made.shape) == (some.dtype, (0, 8))
    made.sum().backward()
    assert weight.grad is not None
    assert rows.grad is not None


MEMORY = 0.05  # how far a plan's memory may be from that of the rehearsed rank


@pytest.mark.parametrize("copies", some(["{}", "{zero: 1}", _ON_HOSTS], [_ON_HOSTS]))
def test_rehearsed_rows_are_those_computed(copies: str, served: Served) -> None:
    """Once a mixture numbers are exchanged, and rows go and come back, and their gradients."""
    depth, batch, tokens, width, top_k, ranks = 2, 16, 64, 256, 2, 8
    found = Rehearsal.from_json(
        served.ask(
            rehearsed,
            overrides=[
                *("model=moe_gpt", f"model.depth={depth}", f"model.width={width}"),
                *(
                    "model.ffn=1024",
                    "data=text",
                    f"data.sequence_length={tokens}",
                    f"train.global_batch={batch}",
                ),
                *("hardware=dgx_a100", "train.precision=fp32", f"strategy.graph={beside(copies)}"),
            ],
        )
    )
    assert found.is_clean
    rows = batch // ranks * tokens * top_k * width * 4
    numbers = 8 * 8  # int64, of 8 experts
    for kind in found.kinds:
        (exchanged,) = (each for each in kind.traffic if each.kind == "all-to-all")
        assert exchanged.count == depth * 5
        assert exchanged.num_bytes == depth * (4 * rows + numbers)
        assert kind.peak == pytest.approx(kind.planned, rel=MEMORY)
