"""Optimizers whose moments are in 8 bits: a plain loop with the library's class, or a refusal.

Of the model here, the matrices of the feed-forward blocks (4,096 elements) have moments in 8 bits,
and all other parameters have moments in 32 bits.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.distributed.cases import UNEVEN, Case, Run
from tests.distributed.equality import Computed, JobFailed, assert_equal, run_job
from tests.distributed.served import Served
from tests.distributed.test_any_optimizer import planned, tried

from whale_train.checkpoints.checkpoint_files import folder_of, stored_tensors
from whale_train.checkpoints.safetensors_files import whole_shape
from whale_train.models.build import build_model

pytest.importorskip("torchao")

TORCHAO = (
    *("optimizer=adamw8bit", "optimizer.lr=2e-3", "optimizer.eps=1e-3"),
    "optimizer.weight_decay=0.1",
)
BITSANDBYTES = (
    *("optimizer._target_=bitsandbytes.optim.AdamW8bit", "optimizer.lr=2e-3"),
    *("optimizer.eps=1e-3", "optimizer.weight_decay=0.1"),
)
GRAPHS = {
    "pipeline": ("pipeline", 2, (), ("strategy.graph={pipeline: {stages: 2, micro_batches: 2}}",)),
    "dp": ("dp", 2, UNEVEN, ()),
    "split": ("split", 2, (), ()),
    "zero1": ("zero1", 2, (), ()),
    "zero3": ("zero3", 2, (), ()),
}
# A sum in another order changes the last bit of a gradient; where the moment then falls to the
# other side between two codes, it changes by a code, a hundredth of it.
TOLERANCE = 2e-4


def case_of(optimizer: tuple[str, ...], plan: str) -> Case:
    strategy, devices, speeds, graph = GRAPHS[plan]
    return Case("gpt", strategy, devices, "none", speeds, (*optimizer, *graph))


def single(optimizer: tuple[str, ...]) -> Case:
    return Case("gpt", "single", 1, "none", (), optimizer)


def test_one_process_is_the_library_by_hand(run: Run) -> None:
    """To the last bit, so that no tolerance hides another state."""
    plainly = run(single(TORCHAO), plainly=True)
    assert_equal(run(single(TORCHAO)), plainly, 1e-6, 1e-6)
    in_32_bits = ("optimizer._target_=torch.optim.AdamW", *TORCHAO[1:])
    with pytest.raises(AssertionError, match="expand"):
        assert_equal(run(single(in_32_bits)), plainly, TOLERANCE)


@pytest.mark.parametrize("plan", ["dp", "pipeline"])
def test_plans_that_keep_parameters_whole_are_the_library_by_hand(run: Run, plan: str) -> None:
    assert_equal(run(case_of(TORCHAO, plan)), run(single(TORCHAO), plainly=True), TOLERANCE)


def test_bitsandbytes_is_itself_by_hand(run: Run) -> None:
    pytest.importorskip("bitsandbytes")
    found = run(case_of(BITSANDBYTES, "dp"))
    assert_equal(found, run(single(BITSANDBYTES), plainly=True), TOLERANCE)


@pytest.mark.parametrize("plan", ["zero1", "zero3", "split"])
def test_parts_of_parameters_are_refused(run: Run, plan: str) -> None:
    with pytest.raises(JobFailed) as raised:
        run(case_of(TORCHAO, plan))
    said = str(raised.value)
    assert "optimizer._target_=torchao.optim.AdamW8bit" in said
    assert "the update of a parameter that is cut in two along its dimension 1 differs by" in said
    assert "as strategy=dp" in said


def test_a_plan_goes_on_with_the_codes_that_another_saved(
    run: Run, served: Served, tmp_path: Path
) -> None:
    """Codes and scales are in the checkpoint as they are, so that nothing is rounded again."""
    job = _jobs(run, served, tmp_path)
    saved = job("saved", case_of(TORCHAO, "pipeline"), "checkpoint.every=2")
    checkpoint = folder_of(saved, 2)
    stored = stored_tensors(checkpoint / "optimizer")
    name = "state.blocks.1.expand.weight.exp_avg"
    shapes = {x: (stored[f"{name}:{x}"][0].dtype, whole_shape(stored[f"{name}:{x}"])) for x in KEPT}
    assert shapes == {"codes": ("U8", (128, 32)), "scale": ("F32", (16,)), "qmap": ("F32", (256,))}
    on = Computed.read(job("on", case_of(TORCHAO, "dp"), f"train.resume={checkpoint}"))
    plainly = run(single(TORCHAO), plainly=True)
    assert on.losses == pytest.approx(plainly.losses[2:], rel=TOLERANCE)
    again = Computed.read(job("again", case_of(TORCHAO, "pipeline"), f"train.resume={checkpoint}"))
    whole = Computed.read(saved)
    assert again.losses == whole.losses[2:]
    for path, copies in whole.values.items():
        assert (again.values[path][0] == copies[0]).all(), path


KEPT = ("codes", "scale", "qmap")


def _jobs(run: Run, served: Served, tmp_path: Path) -> Callable[..., Path]:
    def job(name: str, case: Case, *more: str) -> Path:
        wanted = [*case.overrides(run.folder), *more]
        said = served.ask(run_job, overrides=wanted, plainly=False, run_dir=str(tmp_path / name))
        assert not said, said
        return tmp_path / name

    return job


@pytest.mark.parametrize("name", ["AdamW8bit", "Adam4bit", "AdamWFp8"])
def test_the_plan_has_the_bytes_of_the_states(name: str, tmp_path: Path) -> None:
    """Those of the tensors that the class keeps after a step of the whole model."""
    from torchao import optim

    wide = ("model.width=64", "model.vocab_size=65")  # 4,160 elements are no multiple of 128
    chosen = (f"optimizer._target_=torchao.optim.{name}", "optimizer.lr=0.01", *wide)
    resolved, request = planned(tmp_path, *chosen)
    model = build_model(request.model)
    optimizer = getattr(optim, name)(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    kept = [x for state in optimizer.state.values() for x in state.values()]
    plain = [
        inner
        for x in kept
        for inner in (getattr(x, key, None) for key in KEPT)
        if hasattr(x, "codes") and inner is not None
    ]
    plain += [x for x in kept if not hasattr(x, "codes") and x.dim()]
    assert resolved.plan.ranks[0].memory_bytes.optimizer == sum(x.nbytes for x in plain)
    assert json.loads(resolved.plan.to_json())["optimizers"][0]["large"]["2"]["at_least"] == 4096


def test_trying_finds_which_parameters_are_large() -> None:
    found = tried("torchao.optim.AdamW8bit", block_size=512)
    assert (found.large["2"].at_least, found.large["2"].multiple_of) == (4096, 512)
    assert found.state_bytes((64, 64)) == 2 * (4096 + 4 * 8 + 4 * 256)
    assert found.state_bytes((63, 65)) == 8 * 63 * 65
