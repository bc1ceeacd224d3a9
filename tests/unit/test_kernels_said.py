"""What is said before DeepSpeed's CPU optimizer is compiled, once a machine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from whale_train.kernel_cache import ASYNC_IO, CPU_ADAM, VARIABLE
from whale_train.launcher.ui.show_resolved import said_of_kernels


def said(optimizer: str, where: str) -> str:
    request = SimpleNamespace(optimizer=SimpleNamespace(name=optimizer))
    task_graphs = [SimpleNamespace(offload={"optimizer": place}) for place in ("none", where)]
    plan = SimpleNamespace(task_graphs=task_graphs)
    return said_of_kernels(cast(Any, request), cast(Any, plan))


def test_a_kernel_is_spoken_of_where_it_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    line = "compiling DeepSpeed's CPU optimizer before the first step: a minute to several, by its "
    assert said("adamw", "cpu") == line + "cores, once a machine"
    assert said("adamw", "none") == said("sgd", "cpu") == ""
    (tmp_path / CPU_ADAM).mkdir()
    (tmp_path / CPU_ADAM / f"{CPU_ADAM}.so").touch()
    assert said("adamw", "cpu") == ""


def test_the_library_for_files_is_spoken_of_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert "DeepSpeed's CPU optimizer and library for files before" in said("adamw", "nvme")
    assert said("sgd", "nvme").startswith("compiling DeepSpeed's library for files before the")
    (tmp_path / ASYNC_IO).mkdir()
    (tmp_path / ASYNC_IO / f"{ASYNC_IO}.so").touch()
    assert said("sgd", "nvme") == ""
