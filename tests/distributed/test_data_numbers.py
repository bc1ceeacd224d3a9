"""Rows and classes that data numbers: those that a model has not are refused before anything
starts, and what it leaves out or never reads is not."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whale_train.config import read_request
from whale_train.errors import RequestError
from whale_train.launcher.compose.command_line import composed, rewritten
from whale_train.launcher.planning.plan_request import resolve_request

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.arange(8) % 3
IDS = np.stack([Y, Y + 40, Y - 5], 1)
ROW = "(in row 3, from 0 on)"


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def answer(path: Path, model: str, *more: str) -> str:
    """Return why the request is refused, or "" for a plan."""
    target, _, argument = model.partition(" ")
    overrides = [
        *("mode=plan", f"model._target_=label_models.{target}", *argument.split()),
        *("train.global_batch=4", "hardware=cpu", "hardware.devices=2", *more),
    ]
    if not any(x.startswith("data=") for x in more):
        overrides += ["data=arrays", f"data.path={path}"]
    config = composed(rewritten(overrides))
    try:
        resolve_request(read_request(config, {"data": "arrays"}))
    except RequestError as error:
        return str(error)
    return ""


def changed(labels: np.ndarray[Any, Any], value: int) -> np.ndarray[Any, Any]:
    return np.where(np.arange(8) == 3, value, labels)


CE = ("model.loss=cross_entropy",)
NEGATIVE = (
    f"data=arrays has labels of -1 {ROW}, and the model numbers its 3 classes from 0; "
    "number labels from 0, write -100 where there is none, or use other data"
)
LARGE = (
    "data=arrays has labels up to 3, and the model has 3 classes; use a model with at least 4 "
    "classes, or other data"
)


@pytest.mark.parametrize(
    ("model", "more", "arrays", "expected"),
    [
        ("Classifier", CE, {"x": X, "labels": Y}, ""),
        ("Classifier", CE, {"x": X, "labels": changed(Y, -100)}, ""),
        ("Classifier", CE, {"x": X, "labels": changed(Y, -1)}, NEGATIVE),
        ("Classifier", CE, {"x": X, "labels": changed(changed(Y, -1), -1)[:, None]}, NEGATIVE),
        ("Classifier", CE, {"x": X, "labels": Y.astype(np.int8)}, ""),
        ("Classifier", CE, {"x": X, "labels": Y.astype(np.uint8)}, ""),
        ("Classifier", CE, {"x": X, "labels": changed(Y, 3)}, LARGE),
        ("Classifier model.looks=true", CE, {"x": X, "labels": changed(Y, -1)}, NEGATIVE),
        ("Classifier model.looks=true", CE, {"x": X, "labels": changed(Y, 3)}, LARGE),
        ("Classifier model.looks=true", CE, {"x": X, "labels": changed(Y, -100)}, ""),
        *(
            (
                model,
                CE,
                {"x": X, "labels": labels},
                "model.loss=cross_entropy numbers classes, and the labels of the data are "
                f"{dtype}; save labels as int64, or use model.loss=model",
            )
            for model, labels, dtype in (
                ("Classifier", Y > 0, "bool"),
                ("Classifier model.looks=true", Y.astype(np.float32), "float32"),
            )
        ),
        ("OwnLoss", (), {"x": X, "labels": changed(Y, -1)}, NEGATIVE),
        ("OwnLoss model.ignored=-1", (), {"x": X, "labels": changed(Y, -1)}, ""),
        ("OwnLoss model.ignored=255", (), {"x": X, "labels": changed(Y, 255)}, ""),
        (
            "OwnLoss model.ignored=255",
            (),
            {"x": X, "labels": changed(Y, -100)},
            f"data=arrays has labels of -100 {ROW}, and the model numbers its 3 classes from 0; "
            "number labels from 0, write 255 where there is none, or use other data",
        ),
        ("OwnLoss", (), {"x": X, "labels": np.eye(3, dtype=np.float32)[Y]}, ""),
        ("OwnLoss model.casts=true", (), {"x": X, "labels": Y > 0}, ""),
        ("OwnLoss model.casts=true", (), {"x": X, "labels": Y.astype(np.float32)}, ""),
        (
            "OwnLoss",
            (),
            {"x": X, "labels": Y > 0},
            "data=arrays has labels of dtype bool, and the model numbers classes by them; "
            "save labels as int64",
        ),
        ("Packed", CE, {"ids": IDS, "labels": Y}, ""),
        (
            "Packed",
            CE,
            {"ids": IDS - 41, "labels": Y},
            "data=arrays has ids of -41 (in row 0, from 0 on), and small.weight numbers its 3 rows "
            "from 0; number ids from 0, or use other data\n"
            "data=arrays has ids of -1 (in row 0, from 0 on), and large.weight numbers its 50 rows "
            "from 0; number ids from 0, or use other data",
        ),
    ],
)
def test_arrays(
    tmp_path: Path, model: str, more: tuple[str, ...], arrays: dict[str, Any], expected: str
) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    assert answer(tmp_path / "a.npz", model, *more) == expected


def test_rows_of_files(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "d"
    folder.mkdir()
    rows = ({"x": X[i].tolist(), "labels": int(y)} for i, y in enumerate(changed(Y, -1)))
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    more = ("data=hf_dataset", f"data.path={folder}")
    assert answer(folder, "Classifier", *CE, *more) == NEGATIVE
