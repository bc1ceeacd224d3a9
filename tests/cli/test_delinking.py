"""Layers that share their weights for a time: in one run, across checkpoints and plans."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tests.cli.command import Answer, whale_train

RUN = (
    *("model=moe_gpt", "model.depth=3", "model.width=32", "model.heads=2", "model.ffn=32"),
    *("model.sequence_length=16", "data.sequence_length=16", "model.share_layers=true"),
    *("optimizer=adamw", "train.steps=6", "train.global_batch=8", "checkpoint.every=3"),
    *("hardware=cpu", "hardware.devices=2"),
)


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [x["step"] for x in lines] == list(range(lines[0]["step"], lines[-1]["step"] + 1))
    return [x["loss"] for x in lines]


def train(folder: Path, name: str, *more: str) -> Answer:
    return whale_train([*RUN, f"hydra.run.dir={name}", *more], folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run whose layers share their weights to the end, `shared`, and one in which
    they part after step 3, `parted`."""
    made = tmp_path_factory.mktemp("delinking")
    assert train(made, "shared", "strategy=experts_dp").status == 0
    answer = train(made, "parted", "strategy=experts_dp", "train.delink_at=3")
    assert answer.status == 0, answer
    assert "going on after step 3" in answer.stdout
    assert "layers that shared their weights go on by themselves" in answer.stdout
    return made


def test_the_loss_is_the_same_where_they_part(folder: Path) -> None:
    shared, parted = losses(folder / "shared"), losses(folder / "parted")
    assert len(parted) == 6
    assert parted[:4] == pytest.approx(shared[:4], rel=1e-6)
    assert all(abs(one - other) > 1e-5 for one, other in zip(parted[4:], shared[4:], strict=True))
    plans = [
        json.loads((folder / "parted" / where / "plan.json").read_text())
        for where in ("attempts/1", ".")
    ]
    held = [{path for x in plan["task_graphs"] for path in x["parameters"]} for plan in plans]
    assert not any(path.startswith("blocks.1.") for path in held[0])
    assert sum(path.startswith("blocks.2.") for path in held[1]) == 11


PIPELINE = "strategy.graph={pipeline: {stages: 2, micro_batches: 2}}"


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("strategy=zero1", marks=pytest.mark.full),
        pytest.param("strategy=split", marks=pytest.mark.full),
        PIPELINE,  # whose stages have layers of their own
    ],
)
def test_under_another_plan_they_part_the_same(strategy: str, folder: Path, tmp_path: Path) -> None:
    apart = (f"train.resume={folder}/shared/checkpoints/step_3", "model.share_layers=false")
    answer = train(tmp_path, "on", strategy, *apart)
    assert answer.status == 0, answer
    assert losses(tmp_path / "on") == pytest.approx(losses(folder / "parted")[3:], rel=2e-5)


def test_a_run_goes_on_with_layers_of_their_own(folder: Path) -> None:
    more = ("strategy=dp", "train.delink_at=3", "train.steps=7", "train.resume=auto")
    answer = train(folder, "parted", *more)
    assert answer.status == 0, answer
    assert "go on by themselves" not in answer.stdout
    assert len(losses(folder / "parted")) == 7
    made = load_file(folder / "parted" / "model" / "model.safetensors")
    blocks = [made[f"blocks.{i}.router.score.weight"] for i in range(3)]
    assert abs(blocks[0] - blocks[1]).max() > 0
    # They have been apart for four steps of Adam at 0.001.
    assert abs(blocks[0] - blocks[1]).max() < 0.01


def test_until_the_loss_no_longer_falls(tmp_path: Path) -> None:
    """At a learning rate of nearly nothing: two windows of 50 steps, a vote, and a step more."""
    more = ("train.delink_at=plateau", "train.steps=110", "optimizer.lr=1e-9", "strategy=dp")
    answer = train(tmp_path, "run", *more, "checkpoint.every=null", "model.depth=2")
    assert answer.status == 0, answer
    steps = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert len(steps) == 1
    assert 100 <= int(steps[0].removeprefix("step_")) <= 104
    assert len(losses(tmp_path / "run")) == 110


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ("model.share_layers=false", "train.delink_at=3"),
            "train.delink_at=3 parts layers that share no weights (model.share_layers=false)",
        ),
        (("train.delink_at=6",), "train.delink_at=6 is not before the end of the run"),
        (
            ("train.delink_at=soon",),
            "train.delink_at=soon is not a whole number; use one, such as 8, or plateau\n",
        ),
        (
            ("checkpoint.every=soon",),
            "checkpoint.every=soon is not a whole number; use one, such as 8, or 30min\n",
        ),
        (("train.delink_at=3", "launcher.kind=slurm"), "train.delink_at=3 starts ranks anew"),
    ],
)
def test_what_cannot_part_is_refused(given: tuple[str, ...], said: str, tmp_path: Path) -> None:
    answer = train(tmp_path, "run", *given)
    assert answer.status == 2
    assert said in answer.stderr
    assert not (tmp_path / "run").exists()


def test_what_has_parted_is_not_joined(folder: Path, tmp_path: Path) -> None:
    answer = train(tmp_path, "on", "strategy=dp", f"train.resume={folder}/parted")
    assert answer.status == 2
    assert "model.share_layers=true is not so of" in answer.stderr
