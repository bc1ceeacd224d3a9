"""Going on with a run, as a user does: in its directory, in another, and where it cannot be."""

import json
import shutil
import signal
import subprocess
import sys
import time
from math import prod
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tests.cli.command import Answer, environment_for, processes_of, whale_train
from tests.pairs import IS_FULL

from whale_train.checkpoints.checkpoint_files import check, stored_tensors
from whale_train.checkpoints.safetensors_files import whole_shape
from whale_train.quantities import in_bytes

RUN = ("experiment=smoke", "train.steps=6", "checkpoint.every=2", "checkpoint.keep=2")


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").open()]


def train(folder: Path, name: str, *more: str) -> Answer:
    return whale_train([*RUN, f"hydra.run.dir={name}", *more], folder)


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    """A folder with a run of six steps in `whole`, and what was said of it."""
    folder = tmp_path_factory.mktemp("resume")
    answer = train(folder, "whole", "strategy=dp")
    assert answer.status == 0, answer
    return folder, answer


@pytest.fixture(scope="module")
def run(trained: tuple[Path, Answer]) -> Path:
    """The folder with that run."""
    return trained[0]


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """One's own folder with that run."""
    shutil.copytree(run / "whole", tmp_path / "whole")
    return tmp_path


def test_checkpoints_are_told_of_and_kept(trained: tuple[Path, Answer]) -> None:
    run, answer = trained
    kept = sorted(path.name for path in (run / "whole" / "checkpoints").iterdir())
    assert kept == ["step_4", "step_6"]
    assert (run / "whole" / "model" / "model.safetensors").exists()
    for step in (2, 4, 6):
        assert f"checkpoint: {run}/whole/checkpoints/step_{step} (" in answer.stdout
    assert f"the trained model: {run}/whole/model (" in answer.stdout
    tensors = [
        found
        for folder in ("model", "optimizer")
        for found in stored_tensors(run / "whole" / "checkpoints" / "step_6" / folder).values()
    ]
    copied = sum(4 * prod(whole_shape(found)) for found in tensors)
    assert f"checkpoint.async: a copy of {in_bytes(copied)} of state: " in answer.stdout


def test_the_same_command_goes_on_where_it_was(copied: Path) -> None:
    """As a queue starts a job again that it took from its node: here between two steps' lines."""
    folder = copied / "whole"
    shutil.rmtree(folder / "checkpoints" / "step_6")
    before = losses(folder)
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 7, "lo')
    (folder / "checkpoints" / ".unfinished_step_6" / "model").mkdir(parents=True)
    answer = train(copied, "whole", "strategy=zero3", "train.resume=auto")
    assert answer.status == 0, answer
    assert f"going on after step 4, from {folder}/checkpoints/step_4\n" in answer.stdout
    assert losses(folder) == pytest.approx(before, rel=1e-5)
    assert (folder / "attempts" / "1" / "plan.json").exists()
    assert not (folder / "checkpoints" / ".unfinished_step_6").exists()


def test_a_run_that_died_after_its_last_step_gets_its_weights(copied: Path) -> None:
    model = copied / "whole" / "model"
    again = train(copied, "whole", "train.resume=auto")
    assert again.status == 0
    assert again.stdout.endswith("step_6, which is the end\n")
    model.rename(copied / "before")
    again = train(copied, "whole", "train.resume=auto")
    assert again.status == 0
    assert f"the trained model: {model} (" in again.stdout
    assert bytes_in(model) == bytes_in(copied / "before")


def test_a_checkpoint_is_exported(run: Path) -> None:
    answer = whale_train(["mode=export", "checkpoint=whole", "hydra.run.dir=newest"], run)
    assert answer.status == 0, answer
    assert "exporting step 6, from whole/checkpoints/step_6\n" in answer.stdout
    assert f"the trained model: {run}/newest/model (" in answer.stdout
    assert bytes_in(run / "newest" / "model") == bytes_in(run / "whole" / "model")
    one = "checkpoint=whole/checkpoints/step_4"
    answer = whale_train(["mode=export", one, "hydra.run.dir=earlier"], run)
    assert answer.status == 0, answer
    earlier, last = (
        load_file(run / name / "model" / "model.safetensors") for name in ("earlier", "whole")
    )
    assert earlier.keys() == last.keys()
    assert not all((earlier[name] == last[name]).all() for name in last)


def test_an_export_takes_nothing_but_a_whole_checkpoint(copied: Path) -> None:
    for path in (copied / "whole" / "checkpoints").glob("*/state.json"):
        path.unlink()
    answer = whale_train(["mode=export", "checkpoint=whole", "hydra.run.dir=new"], copied)
    assert answer.status == 2
    assert "checkpoint=whole finds no whole checkpoint in whole" in answer.stderr
    assert not (copied / "new").exists()


def test_a_run_that_saved_no_checkpoint_is_told_from_a_broken_one(copied: Path) -> None:
    def refused(*arguments: str) -> str:
        answer = whale_train([*arguments, "hydra.run.dir=new"], copied)
        assert answer.status == 2
        assert not (copied / "new").exists()
        return answer.stderr

    checkpoints = copied / "whole" / "checkpoints"
    (checkpoints / "step_6" / "manifest.json").unlink()
    said = refused(*RUN, "train.resume=whole/checkpoints/step_6")
    assert "is no whole checkpoint: whole/checkpoints/step_6/manifest.json is missing" in said
    shutil.rmtree(checkpoints)
    none = "is of a run that saved no checkpoint; set checkpoint.every in that run, or name another"
    assert refused(*RUN, "train.resume=whole") == f"error: train.resume=whole {none}\n"
    assert refused("mode=export", "checkpoint=whole") == f"error: checkpoint=whole {none}\n"
    for folder in ("whole/model", "."):
        assert refused(*RUN, f"train.resume={folder}") == (
            f"error: train.resume={folder} has no checkpoint; name a run directory or a checkpoint "
            "in one, as runs/MY_RUN/checkpoints/step_100\n"
        )


SIGNALS = [signal.SIGUSR1, *((signal.SIGINT, signal.SIGTERM) if IS_FULL else ())]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_run_that_is_told_to_end_saves_first(number: signal.Signals, tmp_path: Path) -> None:
    wanted = ["experiment=smoke", "train.steps=1000000", "checkpoint.every=10h"]
    command = [sys.executable, "-m", "whale_train.launcher.cli", *wanted, "hydra.run.dir=run"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment_for(tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run/metrics.jsonl").exists() or len(losses(tmp_path / "run")) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    steps = len(losses(tmp_path / "run"))
    assert process.returncode == 130
    assert f"checkpoint: {tmp_path}/run/checkpoints/step_{steps} (" in out
    assert err == (
        f"interrupted after step {steps}, which is saved; "
        f"go on with hydra.run.dir={tmp_path}/run train.resume=auto\n"
    )
    assert check(tmp_path / "run" / "checkpoints" / f"step_{steps}").step == steps
    assert processes_of(tmp_path) == ()


def test_a_broken_checkpoint_is_named_and_passed_over(copied: Path) -> None:
    broken = copied / "whole" / "checkpoints" / "step_6" / "state.json"
    broken.write_bytes(broken.read_bytes()[:-3])
    answer = train(copied, "other", "strategy=split", "train.resume=whole", "train.steps=7")
    assert answer.status == 0, answer
    assert "warning: a checkpoint is passed over: whole/checkpoints/step_6/state.json has" in (
        answer.stdout
    )
    assert "going on after step 4, from whole/checkpoints/step_4\n" in answer.stdout
    assert losses(copied / "other")[:2] == pytest.approx(losses(copied / "whole")[4:], rel=1e-5)


def test_what_cannot_be_written_is_told_and_training_goes_on(tmp_path: Path) -> None:
    """Not even a folder for checkpoints can be made: there is a file in its place."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("")
    answer = train(tmp_path, "run", "strategy=dp")
    assert answer.status == 0
    for step in (2, 4, 6):
        said = f"warning: no checkpoint after step {step}: rank 0: Not a directory\n"
        assert said in answer.stdout
    assert len(losses(tmp_path / "run")) == 6
    assert load_file(tmp_path / "run" / "model" / "model.safetensors")


def test_a_run_that_has_no_checkpoint_begins(tmp_path: Path) -> None:
    answer = train(tmp_path, "new", "train.resume=auto", "checkpoint.final=false")
    assert answer.status == 0, answer
    assert "train.resume=auto: there is no checkpoint yet; from step 0\n" in answer.stdout
    assert not (tmp_path / "new" / "model").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ("optimizer=sgd", "seed=4"),
            (
                "optimizer=sgd without momentum has no state in whole, which was saved with adam, "
                "adamw or lamb; use optimizer=adamw",
                "seed=4 is not that of whole, which has seen a part of other data; use seed=0",
            ),
        ),
        (
            ("train.resume=nowhere",),
            (
                "train.resume=nowhere is not a folder; name a run directory or a checkpoint in "
                "one, as runs/MY_RUN/checkpoints/step_100",
            ),
        ),
        (
            ("model.depth=5", "train.steps=9"),
            (
                "train.resume=whole/checkpoints/step_6 has no blocks.4.attention_norm.weight, "
                "blocks.4.attention_norm.bias, blocks.4.attention.qkv.weight and 9 more; train "
                "the model that it was saved of, with model.depth=4",
            ),
        ),
        (
            ("data.path=more", "train.steps=9"),
            (
                "train.resume=whole/checkpoints/step_6 has seen a part of 112,500 samples, and the "
                "data has 281; use the data as it was, or begin anew with the weights of "
                "mode=export",
            ),
        ),
        (
            ("checkpoint.evry=3",),
            ("checkpoint.evry=3 is not a key of the config; did you mean checkpoint.every?",),
        ),
    ],
)
def test_what_cannot_go_on_is_refused(run: Path, more: tuple[str, ...], said: tuple[str]) -> None:
    (run / "more").write_text(20_000 * "x")
    answer = train(run, "refused", "strategy=dp", "train.resume=whole", *more)
    assert answer.status == 2, answer
    for fault in said:
        assert fault in " ".join(answer.stderr.split())
    assert not (run / "refused").exists()
