"""The run directory: one run each, whole files only."""

import json
import platform
import sys
from pathlib import Path

import pytest

from whale_train.errors import ConfigError
from whale_train.launcher.ranks import run_dir as rd


def test_hydra_may_have_been_there_first(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "cli.log").write_text("")
    assert rd.create_run_dir(tmp_path) == tmp_path
    assert (tmp_path / "logs").is_dir()


def test_parents_are_made_and_the_path_is_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert rd.create_run_dir(Path("a/b")) == tmp_path / "a" / "b"
    assert list((tmp_path / "a" / "b").iterdir()) == [tmp_path / "a" / "b" / "logs"]


def test_a_request_refused_before_its_plan_may_be_tried_again(tmp_path: Path) -> None:
    rd.create_run_dir(tmp_path)
    rd.create_run_dir(tmp_path)


@pytest.mark.parametrize(
    "file", ["request.json", "plan.json", "metrics.jsonl", "failure.json", "plans"]
)
def test_another_runs_directory_is_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError) as caught:
        rd.create_run_dir(tmp_path)
    assert str(caught.value) == (
        f"hydra.run.dir={tmp_path} already holds a run ({file}); "
        "name one that does not exist yet, or go on with its run by train.resume=auto"
    )
    assert not (tmp_path / "logs").exists()


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        rd.create_run_dir(tmp_path / "file")
    (fault,) = caught.value.faults
    assert fault.key == "hydra.run.dir"
    assert fault.rule == "cannot be made a run directory (Not a directory)"


def test_json_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    rd.write_json(path, {"a": 1})
    rd.write_json(path, {"b": [2, None]})
    assert json.loads(path.read_text()) == {"b": [2, None]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        rd.write_json(path, {"b": float("nan")})
    assert json.loads(path.read_text()) == {"b": [2, None]}
    assert list(tmp_path.iterdir()) == [path]


def test_ready_is_a_file(tmp_path: Path) -> None:
    rd.mark_ready(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["ready"]


def test_the_environment_is_written_down(tmp_path: Path) -> None:
    rd.write_environment(tmp_path)
    written = json.loads((tmp_path / "environment.json").read_text())
    assert written["python"] == ".".join(map(str, sys.version_info[:3]))
    assert written["hostname"] == platform.node()
    assert written["cpu_count"] >= 1
    import pydantic

    assert written["packages"]["pydantic"] == pydantic.VERSION
    assert {"torch", "deepspeed", "numpy"} <= written["packages"].keys()


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert rd.installed_version("no-such-distribution-here") is None
