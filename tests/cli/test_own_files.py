"""Config files of the user's own that have the names of built-in ones: what their names mean."""

import json
from pathlib import Path

import pytest
from tests.cli.command import Answer, whale_train

CPU = ("mode=plan", "hardware=cpu", "hardware.devices=2", "train.global_batch=4")
FIRST = "files of your own are read first"
FILES = {
    "strategy/dp.yaml": "graph:\n  replicate: {zero: 1}\nbalance: even\n",
    "strategy/mine.yaml": "defaults: [dp]\ndevices: 2\n",
    "optimizer/adamw.yaml": "name: adamw\nlr: 0.5\n",
    "experiment/smoke.yaml": "# @package _global_\ntrain: {steps: 7}\n",
}


def plan(folder: Path, *arguments: str) -> tuple[Answer, dict[str, object], dict[str, object]]:
    """Return the answer, the plan and the request of a command in `folder`."""
    answer = whale_train([*CPU, *arguments, "hydra.run.dir=run"], folder)
    assert (answer.status, answer.stderr) == (0, "")
    texts = ((folder / "run" / f"{name}.json").read_text() for name in ("plan", "request"))
    return answer, *map(json.loads, texts)


def write(folder: Path, name: str = "conf") -> None:
    for path, text in FILES.items():
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_text(text)


def of_files(made: dict[str, object]) -> list[tuple[str, str, str, str]]:
    rows = (tuple(decision.values()) for decision in made["decisions"])
    return [row for row in rows if "conf" in row[1] + row[2]]


@pytest.mark.parametrize("by", ["--config-dir=conf", "hydra.searchpath=[file://{here}/conf]"])
def test_a_file_of_your_own_is_what_its_name_means(by: str, tmp_path: Path) -> None:
    write(tmp_path)
    found = plan(tmp_path, by.format(here=tmp_path), "strategy=mine", "experiment=smoke")
    answer, made, request = found
    assert made["task_graphs"][0]["zero"] == 1
    assert (request["optimizer"]["lr"], request["train"]["steps"]) == (0.5, 7)
    assert of_files(made) == [
        ("strategy", "conf/strategy/dp.yaml", "the built-in strategy=dp", FIRST),
        ("optimizer", "conf/optimizer/adamw.yaml", "the built-in optimizer=adamw", FIRST),
        ("experiment", "conf/experiment/smoke.yaml", "the built-in experiment=smoke", FIRST),
    ]
    assert "conf/strategy/dp.yaml (instead of the built-in strategy=dp)" in answer.stdout


def test_what_is_not_chosen_is_not_spoken_of(tmp_path: Path) -> None:
    write(tmp_path)
    _, made, _ = plan(tmp_path, "--config-dir", "conf", "strategy=zero2", "optimizer=sgd")
    assert of_files(made) == []


def test_a_primary_config_is_not_read_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("train: {steps: 3}\n")
    _, made, request = plan(tmp_path, "--config-dir", "conf")
    assert request["train"]["steps"] == 100
    (said,) = of_files(made)
    assert said[:3] == ("config", "the built-in config.yaml", "conf/config.yaml")


def test_the_first_of_two_folders_is_read(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, "conf2")
    (tmp_path / "conf2" / "strategy" / "dp.yaml").write_text("graph: {replicate: {zero: 2}}\n")
    _, made, _ = plan(tmp_path, "--config-dir=conf", "hydra.searchpath=[conf2]", "optimizer=sgd")
    assert made["task_graphs"][0]["zero"] == 1
    assert [row[1:3] for row in of_files(made)] == [
        ("conf/strategy/dp.yaml", "the built-in strategy=dp"),
        ("conf/strategy/dp.yaml", "conf2/strategy/dp.yaml"),
    ]
