"""Optimizer and parameters in files: the same numbers, checkpoints of any plan, nothing left."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.command import whale_train
from tests.distributed.jobs import COMMAND, Job, metrics_in
from torch import Tensor

from whale_train.launcher.planning.nvme_tools import missing_for_files
from whale_train.runtime.engines.swap_folder import SwapFolder, remove_unowned

MISSING = missing_for_files()
needs_libaio = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {MISSING}, to compile DeepSpeed's library"
)
# Weights of 512 x 2048, whose part on each of two ranks is 2 MB; DeepSpeed uses files from 1 MB.
SMALL = (
    *("hardware=cpu", "hardware.devices=2", "model.width=512", "model.depth=2", "data=text"),
    *("train.steps=4", "train.global_batch=8", "model.sequence_length=16", "seed=3"),
    *("data.sequence_length=16", "checkpoint.async=false", "train.grad_clip=1.0"),
)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder whose files can be read without the page cache."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        os.close(os.open(folder / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        pytest.skip("the temporary folder has no direct reads")
    (folder / "probe").unlink()
    return folder


def in_files(disk: Path) -> str:
    offload = f"{{optimizer: nvme, parameters: nvme, path: {disk}}}"
    return f"strategy.graph={{replicate: {{zero: 3, offload: {offload}}}}}"


def trained(folder: Path, name: str, *overrides: str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the weights of a run called `name`."""
    answer = whale_train([*SMALL, f"hydra.run.dir={name}", *overrides], folder)
    assert answer.status == 0, answer.stderr
    losses = [x["loss"] for x in metrics_in(folder / name)]
    files = (folder / name / "model").glob("*.safetensors")
    return losses, {path: x for file in files for path, x in load_file(file).items()}


@pytest.mark.full  # the library is compiled for minutes where it was not used before
@needs_libaio
def test_numbers_and_checkpoints_are_those_of_copies(tmp_path: Path, disk: Path) -> None:
    copies = "strategy.graph={replicate: {}}"
    losses, weights = trained(tmp_path, "plain", copies, "checkpoint.every=1")
    whole, values = trained(tmp_path, "files", in_files(disk), "checkpoint.every=2")
    into, _ = trained(tmp_path, "into", in_files(disk), "train.resume=plain/checkpoints/step_2")
    out_of, found = trained(tmp_path, "out", copies, "train.resume=files/checkpoints/step_2")
    assert whole == pytest.approx(losses, rel=1e-5)
    assert into == pytest.approx(losses[2:], rel=1e-5)
    assert out_of == pytest.approx(losses[2:], rel=1e-5)
    for others in (values, found):
        assert others.keys() == weights.keys()
        for path, value in weights.items():
            torch.testing.assert_close(others[path], value, rtol=1e-3, atol=1e-4)
    plan = json.loads((tmp_path / "files" / "plan.json").read_text())
    assert plan["task_graphs"][0]["offload"] == {"optimizer": "nvme", "parameters": "nvme"}
    assert [*disk.iterdir()] == []


@pytest.mark.full
@needs_libaio
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_one_process_that_recomputes_trains_as_without_files(
    micro_batches: int, tmp_path: Path, disk: Path
) -> None:
    """With one micro-batch gradients go to files, with two they are added up in memory."""
    alone = ("hardware.devices=1", f"train.accumulate={micro_batches}")
    losses, weights = trained(tmp_path, "plain", "strategy.graph={replicate: {}}", *alone)
    graph = in_files(disk).replace("zero: 3", "zero: 3, recompute: full")
    of_files, values = trained(tmp_path, "files", graph, *alone)
    assert of_files == pytest.approx(losses, rel=1e-5)
    for path, value in weights.items():
        torch.testing.assert_close(values[path], value, rtol=1e-3, atol=1e-4)
    plan = json.loads((tmp_path / "files" / "plan.json").read_text())
    (config,) = plan["ranks"][0]["deepspeed"].values()
    assert config["managed_gradient_accumulation"] is (micro_batches == 1)


@pytest.mark.full
@needs_libaio
@pytest.mark.parametrize("ended_by", ["interrupt", "killed rank"])
def test_nothing_is_left_however_a_run_ends(ended_by: str, tmp_path: Path, disk: Path) -> None:
    job = Job(tmp_path)
    job.start(*COMMAND, in_files(disk), "strategy=zero3", "model.width=512", "train.steps=100000")
    job.wait_for_step(2)
    assert len([*disk.iterdir()]) == 2
    assert [*disk.rglob("*.swp")]
    if ended_by == "interrupt":
        os.killpg(job.started[0].pid, signal.SIGINT)
    else:
        os.kill(job.member(1), signal.SIGKILL)
    assert job.wait() == [130 if ended_by == "interrupt" else 1]
    job.assert_nothing_left()
    assert [*disk.iterdir()] == []


def test_folders_of_living_ranks_stay(disk: Path) -> None:
    """Nor is anything removed that no rank has made."""
    own = SwapFolder(disk)
    others = {"others", "whale-train-data", f"{own.path.name}-of-a-user"}
    for name in others:
        (disk / name).mkdir()
        (disk / name / "file").write_text("x")
    left = shutil.copytree(own.path, disk / f"{own.path.name}x")
    remove_unowned(disk)
    assert not left.exists()
    assert {path.name for path in disk.iterdir()} == {own.path.name, *others}
    own.remove()
    assert {path.name for path in disk.iterdir()} == others


@needs_libaio
def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    answer = whale_train([*SMALL, in_files(tmp_path / "none")], tmp_path)
    assert answer.status == 2
    assert (
        f"strategy.graph.replicate.offload.path={tmp_path}/none is no folder that this user can "
        "write to; make it, or name another one of a local disk"
    ) in answer.stderr
