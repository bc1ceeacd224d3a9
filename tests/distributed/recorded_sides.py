"""Writes what the ranks of a verification leave, of given tensors."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tests.distributed.test_verify import Case

from whale_train.config import Request, read_request
from whale_train.launcher.compose.command_line import composed, rewritten

_SAID = {"dropout_off": False, "drew_random": False, "largest": {"w": 2.0}}


@cache
def asked(steps: int) -> Request:
    overrides = [*Case("gpt", "dp", "sgd").overrides, f"verify.steps={steps}"]
    return read_request(composed(rewritten(overrides)), {})


@dataclass(frozen=True)
class Left:
    """What a run leaves beside `w`: its losses and norms, the steps it skipped, the largest
    gradient by parameter, and of a buffer the blocks a rank has, as rows and their values."""

    losses: tuple[float, ...] = (1.0,)
    norms: tuple[float, ...] = (1.0,)
    skipped: tuple[int, ...] = ()
    largest: float = 2.0
    buffer: tuple[tuple[tuple[int, int], Any], ...] = ()


PLAIN = Left()


def write_side(
    folder: Path, parts: Sequence[tuple[Any, Mapping[str, Any]]], left: Left = PLAIN
) -> Path:
    """A run with one parameter `w` of shape [2, 6]; per rank the columns it holds and its
    tensors."""
    (folder / "verify").mkdir(parents=True)
    lines = [
        {"loss": loss if np.isfinite(loss) else None, "grad_norm": norm, "lr": 0.1}
        for loss, norm in zip(left.losses, left.norms, strict=True)
    ]
    lines = [
        x | {"grad_norm": x["grad_norm"] if np.isfinite(x["grad_norm"]) else None} for x in lines
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    for rank, (columns, tensors) in enumerate(parts):
        arrays = {f"{k}/w": np.array(x, dtype=np.float32, order="C") for k, x in tensors.items()}
        constants = {}
        for number, (rows, values) in enumerate(left.buffer):
            arrays[f"constant/{number}"] = np.array(values)
            is_float = np.array(values).dtype.kind == "f"
            constants[f"constant/{number}"] = {
                **{"path": "b", "what": "buffer", "index": [[rows]], "is_float": is_float}
            }
        said = {
            **_SAID,
            **{"parts": {"w": {"shape": [2, 6], "index": [None, columns]}}},
            **{"constants": constants, "skipped": left.skipped, "largest": {"w": left.largest}},
        }
        (folder / f"verify/rank_{rank}.json").write_text(json.dumps(said))
        save_file(arrays, folder / f"verify/rank_{rank}.safetensors")
    return folder


def whole_tensors() -> dict[str, Any]:
    draw = np.random.default_rng(3)
    initial, gradient = draw.normal(size=(2, 6)), draw.uniform(-2, 2, size=(2, 6))
    final = initial - 0.1 * gradient
    return {"initial": initial, "gradient": gradient, "final": final}
