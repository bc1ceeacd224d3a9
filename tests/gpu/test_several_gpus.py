"""Two GPUs or more: every strategy that ships is one process over NCCL."""

from pathlib import Path

import pytest
from tests.gpu.commands import MODELS, verdict

DEEP = ("model.depth=8",)
CELLS = [
    *(
        (f"strategy={name}", gpus)
        for name in ("dp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
        for gpus in (2,)
    ),
    *(
        (f"strategy={name}", gpus)
        for name in ("split", "split_sequence", "hybrid_split_dp")
        for gpus in (2, 4)
    ),
    ("strategy.graph={pipeline: {stages: 2, micro_batches: 4}}", 2),
    ("strategy.graph={pipeline: {stages: 2, micro_batches: 4, schedule: zero_bubble}}", 2),
    ("strategy.graph={pipeline: {stages: 2, micro_batches: 4, schedule: interleaved_1f1b}}", 2),
    ("strategy.graph={pipeline: {stages: 2, micro_batches: 3, schedule: gpipe}}", 2),
    *((f"strategy={name}", 4) for name in ("split_dp", "split_zero3", "pipeline")),
    *((f"strategy={name}", 8) for name in ("3d", "zero1_pipeline", "interleaved", "zero_bubble")),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("strategy", "gpus"),
    [pytest.param(*cell, marks=pytest.mark.needs_gpus(cell[1])) for cell in CELLS],
)
def test_a_plan_is_one_process(strategy: str, gpus: int, precision: str, tmp_path: Path) -> None:
    overrides = (*MODELS["gpt"], *DEEP, strategy, f"train.precision={precision}")
    assert not verdict(tmp_path / "run", *overrides, gpus=gpus)


@pytest.mark.needs_gpus(2)
@pytest.mark.parametrize("strategy", ["dp", "split"])
def test_what_is_compiled_is_one_process(strategy: str, tmp_path: Path) -> None:
    overrides = (*MODELS["llama"], f"strategy={strategy}", "train.compile=true")
    assert not verdict(tmp_path / "run", *overrides, gpus=2)
