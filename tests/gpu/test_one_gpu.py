"""One GPU: plans are one process, nothing waits for the device, and memory is what was planned."""

import json
import re
from pathlib import Path

import pytest
import torch
from tests.gpu.commands import AS_A_GRAPH, LLAMA, MODELS, of_a_rank, verdict, whale_train

from whale_train.runtime.kernels.scaled_products import scaled_product

OFFLOADED = ("zero2_offload", "zero3_offload")  # one GPU has nobody to share state with
PRECISIONS = ("fp32", "bf16", "fp16")
CELLS = [
    *(("gpt", f"strategy={strategy}", "bf16") for strategy in ("dp", *OFFLOADED)),
    *(("gpt", f"strategy={x}", p) for x in ("dp", *OFFLOADED) for p in ("fp32", "fp16")),
    *(("llama", f"strategy={x}", p) for x in ("dp", "zero3_offload") for p in PRECISIONS),
    *((model, AS_A_GRAPH, precision) for model in MODELS for precision in PRECISIONS),
    *(("moe", "strategy=dp", precision) for precision in PRECISIONS),
]
FUSED = re.compile(r"flash|fmha|sdpa|cudnn.*attn", re.IGNORECASE)  # names of fused attention
ON_THE_GPU = ("strategy=dp", AS_A_GRAPH)
# Wide enough that what is fixed counts little.
WIDE = ("model=gpt", "model.width=1024", "model.depth=8", "model.heads=16")


@pytest.mark.parametrize(("model", "strategy", "precision"), CELLS)
def test_a_plan_is_one_process(model: str, strategy: str, precision: str, tmp_path: Path) -> None:
    overrides = (*MODELS[model], strategy, f"train.precision={precision}")
    assert not verdict(tmp_path / "run", *overrides)


@pytest.mark.parametrize("strategy", OFFLOADED)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_offloaded_gradients_are_clipped(strategy: str, precision: str, tmp_path: Path) -> None:
    overrides = (f"strategy={strategy}", f"train.precision={precision}", "train.grad_clip=0.1")
    assert not verdict(tmp_path / "run", *MODELS["gpt"], *overrides)


@pytest.mark.parametrize("strategy", ["strategy=dp", "strategy=zero3_offload", AS_A_GRAPH])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_compiled_is_one_process(strategy: str, precision: str, tmp_path: Path) -> None:
    overrides = (strategy, f"train.precision={precision}", "train.compile=true")
    assert not verdict(tmp_path / "run", *LLAMA, *overrides)


@pytest.mark.parametrize("strategy", ON_THE_GPU)
@pytest.mark.parametrize("model", MODELS)
def test_attention_is_fused(model: str, strategy: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    overrides = (*MODELS[model], strategy, "train.precision=bf16", "train.profile=[3,4]")
    done = whale_train(run_dir, *overrides)
    assert done.returncode == 0, done.stderr[-4000:]
    events = json.loads((run_dir / "profile" / "rank_0.json").read_text())["traceEvents"]
    kernels = {event["name"] for event in events if event.get("cat") == "kernel"}
    assert kernels
    assert any(FUSED.search(name) for name in kernels), sorted(kernels)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", ON_THE_GPU)
def test_a_step_waits_for_nothing(strategy: str, precision: str, tmp_path: Path) -> None:
    of_a_rank(tmp_path, *MODELS["gpt"], strategy, f"train.precision={precision}")


@pytest.mark.parametrize("strategy", [*ON_THE_GPU, *(f"strategy={x}" for x in OFFLOADED)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_is_what_was_planned_and_rehearsed(
    strategy: str, precision: str, tmp_path: Path
) -> None:
    overrides = (*WIDE, strategy, f"train.precision={precision}", "train.global_batch=32")
    # What is offloaded is waited for.
    found = of_a_rank(tmp_path, *overrides, may_wait=strategy.endswith("offload"))
    run_dir = tmp_path / "rehearsed"
    done = whale_train(run_dir, "mode=rehearse", *overrides)
    assert done.returncode == 0, done.stderr[-4000:]
    (kind,) = json.loads((run_dir / "rehearsal.json").read_text())["kinds"]
    assert found["peak_bytes"] == pytest.approx(found["planned_bytes"], rel=0.10)
    assert found["peak_bytes"] == pytest.approx(sum(kind["peak_bytes"].values()), rel=0.10)


@pytest.fixture
def fp8_units() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8 units")


@pytest.mark.usefixtures("fp8_units")
@pytest.mark.parametrize(("rows", "out", "width"), [(64, 256, 128), (5, 24, 40), (1, 16, 16)])
def test_products_in_8_bits_are_those_of_a_cpu(rows: int, out: int, width: int) -> None:
    """Codes and scales are the same bits; sums may have another order."""
    torch.manual_seed(0)
    left, right, bias = (torch.randn(x).bfloat16() for x in ((rows, width), (out, width), (out,)))
    eye = torch.eye(width).bfloat16()
    assert torch.equal(scaled_product(left.cuda(), eye.cuda()).cpu(), scaled_product(left, eye))
    product = scaled_product(left.cuda(), right.cuda(), bias.cuda()).cpu()
    torch.testing.assert_close(product, scaled_product(left, right, bias))


@pytest.mark.usefixtures("fp8_units")
@pytest.mark.parametrize("strategy", ON_THE_GPU)
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_fp8_is_one_process(strategy: str, compiled: str, tmp_path: Path) -> None:
    overrides = (strategy, "train.precision=fp8", f"train.compile={compiled}")
    assert not verdict(tmp_path / "run", *LLAMA, *overrides)


SENT = "strategy.graph={replicate: {offload: {activations: cpu}}}"


def test_what_is_saved_travels_beside_the_work(tmp_path: Path) -> None:
    """Copies to the host and back are of pinned memory, on a stream without kernels, in a step that
    waits for nothing and needs the memory that was planned."""
    overrides = (*WIDE, SENT, "train.precision=bf16", "train.global_batch=32")
    found = of_a_rank(tmp_path, *overrides)
    assert found["peak_bytes"] == pytest.approx(found["planned_bytes"], rel=0.10)
    run_dir = tmp_path / "run"
    done = whale_train(run_dir, *overrides, "train.profile=[3,4]")
    assert done.returncode == 0, done.stderr[-4000:]
    events = json.loads((run_dir / "profile" / "rank_0.json").read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    computing = {event["args"]["stream"] for event in kernels}
    for way in ("DtoH", "HtoD"):
        copies = [
            event
            for event in events
            if event.get("cat") == "gpu_memcpy"
            and way in event["name"]
            and event["args"]["bytes"] >= 1_000_000
        ]
        assert copies
        assert all("Pinned" in event["name"] for event in copies)
        assert computing.isdisjoint(event["args"]["stream"] for event in copies)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_offloaded_activations_are_one_process(precision: str, tmp_path: Path) -> None:
    overrides = (*WIDE, SENT, f"train.precision={precision}")
    assert not verdict(tmp_path / "run", *overrides)
