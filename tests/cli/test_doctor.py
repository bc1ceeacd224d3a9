"""`whale-train doctor`: what an installation and a machine have, and what is missing for what."""

import tomllib
from email.message import Message
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console
from tests.cli.command import whale_train_process

from whale_train.launcher.doctor import checks
from whale_train.launcher.doctor.checks import Check, all_checks, compilers, features, folders
from whale_train.launcher.doctor.doctor import report


def test_a_whole_installation(tmp_path: Path) -> None:
    answer = whale_train_process(["doctor"], tmp_path)
    assert answer.status == 0, answer
    lines = [line.split() for line in answer.stdout.splitlines()]
    for package in ("torch", "deepspeed", "hydra-core"):
        assert ["ok", package, version(package)] in lines
    assert list(tmp_path.iterdir()) == []


def test_every_extra_that_runs_may_need_is_reported_by_its_features() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    of_runs = [extra for extra in extras if extra not in ("dev", "docs")]
    names = [check.name for check in features()]
    assert len(names) == len(of_runs)
    assert {"optimizer=adamw8bit", "model.quantize=nf4", "checkpoint.to"} <= set(names)
    assert not [name for name in names if name.startswith("whale-train[")]


def test_an_extra_whose_features_have_no_name_is_reported_by_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Message()
    told["Provides-Extra"] = "sounds"
    monkeypatch.setattr(checks, "metadata", lambda name: told)
    monkeypatch.setattr(checks, "requires", lambda name: ["no-such-package; extra == 'sounds'"])
    remedy = "pip install 'no-such-package'"
    assert list(features()) == [Check("features", "whale-train[sounds]", "", remedy=remedy)]


def test_what_is_missing_is_named_with_what_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ["torch>=99", "no-such-package>=2; extra == 'peft'", "numpy>=1; extra == 'ray'"]
    monkeypatch.setattr(checks, "requires", lambda name: wanted)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WHALE_TRAIN_CACHE", str(tmp_path / "file" / "cache"))
    torch = next(check for check in checks.packages() if check.name == "torch")
    assert torch.is_broken
    assert (torch.found, torch.remedy) == (version("torch"), "pip install 'torch>=99'")
    assert list(features()) == [
        Check("features", "model.adapters", "", remedy="pip install 'no-such-package>=2'"),
        Check("features", "launcher=ray", f"numpy {version('numpy')}"),
    ]
    said = {check.name: check.remedy for check in (*compilers(), *folders())}
    assert said["g++"] == "install g++, for offload: {optimizer: cpu}, train.compile"
    assert said["kept tokens"] == "make it writable for this user"
    console = Console(width=80, record=True)
    console.print(report(all_checks()))
    assert console.export_text().splitlines()[-1] == "runs will fail: torch"
