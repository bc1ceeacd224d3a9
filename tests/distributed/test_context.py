"""Devices that divide the positions of every sample compute what one device would.

Losses, gradient norms and updated parameters of four steps against `strategy=single`, on models
nobody adapted: attention by heads, in a ring, and with gathered keys, causal and not, with windows
and masks, with keys that query heads share.
"""

from pathlib import Path

import numpy as np
import pytest
from tests.distributed import test_dense_parts as dense
from tests.distributed import test_parallel_strategies as strategies
from tests.distributed.cases import OPTIMIZERS, TOLERANCE, hardware
from tests.distributed.equality import JobFailed, Jobs, assert_equal, save
from tests.distributed.served import Served
from tests.distributed.test_parallel_strategies import hf, pipeline
from tests.distributed.test_rehearse import rehearsed
from tests.pairs import some

from whale_train.config import read_request
from whale_train.launcher.compose.command_line import composed, rewritten
from whale_train.launcher.planning.plan_request import resolve_request
from whale_train.rehearsal import Rehearsal

_GROUPED = strategies._LM.replace("layers: 4", "layers: 2") + ", num_key_value_heads: 2"
MODELS = {
    **strategies.MODELS,
    "grouped": ("tokens", hf("LlamaForCausalLM", _GROUPED)),
    # Documents of a sample do not see each other: positions begin anew at each.
    "documents": ("documents", hf("LlamaForCausalLM", _GROUPED)),
    # Scores are capped between two products, and every second layer has a window.
    "gemma2": (
        "tokens",
        hf("Gemma2ForCausalLM", f"{_GROUPED}, head_dim: 8, sliding_window: 4"),
    ),
}
_TWO = "{split: {dim: context, degree: 2}}"
_STAGE = f"{{stage: {{of: {_TWO}}}}}"
# name: (devices, graph, speeds of unlike devices)
STRATEGIES: dict[str, tuple[int, str, tuple[int, ...]]] = {
    "over2": (2, _TWO, ()),
    "over4": (4, "{split: {dim: context}}", ()),
    "over3_unlike": (3, "{split: {dim: context}}", (2, 1, 1)),
    "two_of_2": (4, f"{{replicate: {{of: {_TWO}}}}}", ()),
    "zero1": (4, f"{{replicate: {{zero: 1, of: {_TWO}}}}}", ()),
    "zero2": (2, f"{{replicate: {{zero: 2, of: {_TWO}}}}}", ()),
    "zero3": (4, f"{{replicate: {{zero: 3, of: {_TWO}}}}}", ()),
    "pipeline": (4, pipeline(f"[{_STAGE}, {_STAGE}]", micro_batches=2), ()),
    "last_stage": (3, pipeline(f"[{{stage: {{}}}}, {_STAGE}]", micro_batches=2), ()),
    "first_stage": (3, pipeline(f"[{_STAGE}, {{stage: {{}}}}]", "zero_bubble", 2), ()),
    "ring2": (2, _TWO.replace("degree", "attention: ring, degree"), ()),
    "ring3_unlike": (3, "{split: {dim: context, attention: ring}}", (2, 1, 1)),
    "ring4_zero1": (
        4,
        "{replicate: {zero: 1, of: {split: {dim: context, attention: ring, degree: 4}}}}",
        (),
    ),
    "gathered3_unlike": (3, "{split: {dim: context, attention: gathered}}", (2, 1, 1)),
    "recompute": (2, _TWO.replace("degree", "recompute: full, degree"), ()),
}
_ALL = [
    ("gpt", "over2", "sgd"),
    ("gpt", "over4", "adamw"),
    ("gpt", "zero3", "adamw"),
    ("gpt", "pipeline", "sgd"),
    ("gpt2", "over4", "sgd"),
    ("gpt2", "zero1", "adamw"),
    ("gpt2", "recompute", "sgd"),
    ("gpt", "ring2", "sgd"),
    ("gpt2", "gathered3_unlike", "sgd"),
    ("grouped", "ring3_unlike", "sgd"),
    ("grouped", "ring4_zero1", "adamw"),
    ("bert", "ring3_unlike", "sgd"),
    ("documents", "ring3_unlike", "sgd"),
    ("documents", "over4", "sgd"),
    ("grouped", "over2", "sgd"),
    ("grouped", "over3_unlike", "adamw"),
    ("grouped", "zero3", "sgd"),
    ("grouped", "first_stage", "sgd"),
    ("gemma2", "over3_unlike", "sgd"),
    ("gemma2", "two_of_2", "adamw"),
    ("qwen3", "zero2", "sgd"),
    ("qwen3", "last_stage", "momentum"),
    ("bert", "over2", "sgd"),
    ("t5", "over2", "sgd"),
    ("vit", "over2", "sgd"),
    ("mixtral", "over2", "sgd"),
    ("torch_transformer", "over2", "sgd"),
]
_SOME = {
    ("gpt", "over4", "adamw"),
    ("gpt2", "zero1", "adamw"),
    ("grouped", "over3_unlike", "adamw"),
    ("grouped", "zero3", "sgd"),
    ("grouped", "first_stage", "sgd"),
    ("grouped", "ring4_zero1", "adamw"),
    ("documents", "ring3_unlike", "sgd"),
    ("gpt2", "gathered3_unlike", "sgd"),
    ("gemma2", "over3_unlike", "sgd"),
    ("gpt2", "recompute", "sgd"),
    ("bert", "over2", "sgd"),
}


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arrays")
    strategies.write_arrays(folder)
    with np.load(folder / "tokens.npz") as held:
        tokens = held["input_ids"]
    length = tokens.shape[1]
    first = np.arange(len(tokens))[:, None] % (length - 4) + 2  # tokens of the first document
    places = np.arange(length)[None]
    positions = np.where(places < first, places, places - first)
    labels = np.where(positions == 0, -100, tokens)
    documents = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    save(folder / "documents.npz", documents)
    return folder


def overrides(
    arrays: Path, model: str, strategy: str, optimizer: str, *extra: str
) -> tuple[list[str], list[str]]:
    """Return the job, and the same on one device."""
    devices, written, speeds = STRATEGIES[strategy]
    kind, chosen = MODELS[model]
    common = [
        *chosen,
        *("data=arrays", f"data.path={arrays / kind}.npz", "data.shuffle=false"),
        *OPTIMIZERS[optimizer],
        *(f"train.steps={strategies.STEPS}", f"train.global_batch={strategies.GLOBAL_BATCH}"),
        *extra,
    ]
    shared = [*common, f"strategy.graph={written}", *hardware(devices, speeds)]
    return shared, [*common, "strategy=single", *hardware(1, ())]


@pytest.mark.parametrize(("model", "strategy", "optimizer"), some(_ALL, _SOME))
def test_equals_one_device(
    model: str, strategy: str, optimizer: str, jobs: Jobs, arrays: Path
) -> None:
    shared, single = overrides(arrays, model, strategy, optimizer)
    assert_equal(jobs.run(shared), jobs.run(single), TOLERANCE)


@pytest.mark.parametrize(
    "extra",
    [
        ("train.accumulate=2", "train.grad_clip=0.05"),
        ("train.evaluate_every=2", "data.evaluation_fraction=0.5"),
    ],
    ids=lambda extra: extra[0],
)
def test_steps_in_parts_or_evaluated(extra: tuple[str, ...], jobs: Jobs, arrays: Path) -> None:
    shared, single = overrides(arrays, "grouped", "two_of_2", "sgd", *extra)
    assert_equal(jobs.run(shared), jobs.run(single), TOLERANCE)


def test_a_ring_without_dropout_alone(jobs: Jobs, arrays: Path) -> None:
    shared, _ = overrides(arrays, "gpt", "ring2", "sgd", "model.dropout=0.1")
    with pytest.raises(
        JobFailed, match=r"attention=ring cannot compute the attention of blocks\.0"
    ):
        jobs.run(shared)


MEMORY = 0.05  # how far a plan's memory may be from that of the rehearsed rank


@pytest.mark.parametrize(
    ("way", "hardware", "precision"),
    [
        ("heads", ("hardware=cpu", "hardware.devices=4"), "fp32"),
        ("ring", ("hardware=cpu", "hardware.devices=4"), "fp32"),
        ("gathered", ("hardware=cpu", "hardware.devices=4"), "fp32"),
        ("heads", ("hardware=dgx_a100",), "bf16"),
        ("ring", ("hardware=dgx_a100",), "bf16"),
        ("gathered", ("hardware=dgx_a100",), "bf16"),
    ],
)
@pytest.mark.parametrize("model", ["llama", pytest.param("gpt", marks=pytest.mark.full)])
def test_ranks_need_what_was_planned(
    way: str, hardware: tuple[str, ...], precision: str, model: str, served: Served
) -> None:
    """Llama's queries, keys and values are of products of their own, and GPT's of one."""
    graph = f"{{split: {{dim: context, attention: {way}}}}}"
    sizes = "hidden_size: 512, intermediate_size: 1024, num_hidden_layers: 4, vocab_size: 257"
    llama = f"{sizes}, num_attention_heads: 8, num_key_value_heads: 2"
    gpt = ("model=gpt", "model.width=512", "model.heads=8", "model.sequence_length=1024")
    job = [
        *(hf("LlamaForCausalLM", llama) if model == "llama" else gpt),
        *(*hardware, f"train.precision={precision}"),
        *("data=text", "data.sequence_length=1024", "train.global_batch=4"),
        f"strategy.graph={graph}",
    ]
    found = Rehearsal.from_json(served.ask(rehearsed, overrides=job))
    assert found.is_clean
    for kind in found.kinds:
        assert kind.peak == pytest.approx(kind.planned, rel=MEMORY)


def test_four_devices_hold_four_times_as_many_positions() -> None:
    def needed(positions: int, devices: int, graph: str) -> float:
        sizes = ("model=gpt", "model.width=128", "model.depth=2", "model.heads=4")
        length = (f"model.sequence_length={positions}", f"data.sequence_length={positions}")
        job = [*sizes, *length, "train.global_batch=1", f"strategy.graph={graph}"]
        config = composed(rewritten([*job, *hardware(devices, ()), "mode=plan"]))
        plan = resolve_request(read_request(config, {"hardware": "h", "strategy": "s"})).plan
        return max(rank.memory_bytes.total for rank in plan.ranks)

    one = needed(4096, 1, "{replicate: {}}")
    graph = "{replicate: {zero: 1, of: {split: {dim: context, degree: 4}}}}"
    assert needed(16384, 4, graph) == pytest.approx(one, rel=0.15)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(dense.SWEPT.keys() - {"ConvNextForImageClassification"}))
def test_any_model(name: str, jobs: Jobs, arrays: Path) -> None:
    kind, config = dense.SWEPT[name]
    common = [
        *hf(name, config),
        *("data=arrays", f"data.path={arrays / kind}.npz", "data.shuffle=false"),
        *OPTIMIZERS["sgd"],
        *("train.steps=3", f"train.global_batch={strategies.GLOBAL_BATCH}"),
    ]
    shared = [*common, f"strategy.graph={_TWO}", *hardware(2, ())]
    assert_equal(
        jobs.run(shared), jobs.run([*common, "strategy=single", *hardware(1, ())]), TOLERANCE
    )


@pytest.mark.parametrize(
    ("model", "graph", "devices", "said"),
    [
        ("resnet", _TWO, 2, r"split\.dim=context divides positions, over all of which resnet\."),
        (
            "gpt",
            "{split: {dim: context}}",
            13,
            r"finds no sequence of at least 13 positions in .*; use fewer devices",
        ),
    ],
)
def test_models_without_positions_are_refused(
    model: str, graph: str, devices: int, said: str, jobs: Jobs, arrays: Path
) -> None:
    kind, chosen = MODELS[model]
    data = ("data=arrays", f"data.path={arrays / kind}.npz")
    with pytest.raises(JobFailed, match=said):
        jobs.run([*chosen, *data, f"strategy.graph={graph}", *hardware(devices, ())])
