"""Damaged files of a checkpoint: each is harmless or refused, whatever is wrong in it.

Damage is drawn from a seed, and goes through all that a run asks of a checkpoint before it starts.
Checksums are made to fit in most cases: what is behind them is to be looked at.
"""

import json
import random
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.distributed.resumed_models import Side, gone_on, side_of, write_checkpoint
from tests.pairs import IS_FULL

from whale_train.checkpoints import safetensors_files
from whale_train.checkpoints.checkpoint_files import MANIFEST
from whale_train.errors import RequestError
from whale_train.models.weights.stored import _tensors_in, mapped

DAMAGED = 3000 if IS_FULL else 60
DEEP = 10_000
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**400),
    *(0.5, -0.0, 1e308, float("inf"), float("nan"), "", "x", "0", "\ud800", "a\0b", "../../x"),
    *("/dev/zero", "F32", "F64", "BF16", "F8_E4M3", "Q9", 5000 * "y", [], {}, [[]], [0], [-1]),
    *([0, 4], [2**62, 2**62], [1.5], ["1"], {"": {}}, {"x": 1}, [None] * 100, list(range(300))),
)


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Side:
    path = tmp_path_factory.mktemp("data") / "d.npz"
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    np.savez(path, x=x, labels=np.arange(64) % 3)
    return side_of(f"data.path={path}", "model.counts=int64")


@pytest.fixture
def checkpoint(side: Side, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, side)


def damaged(content: Any, draw: random.Random) -> str:
    """Return plain data as JSON with one to three things in it changed; now and then no JSON."""
    kind = draw.randrange(12)
    if kind == 0:
        return draw.choice(["[", '{"a":']) * DEEP
    if kind == 1:
        return "[" * DEEP + "]" * DEEP
    if kind == 2:
        return json.dumps(draw.choice(JUNK))
    if kind == 3:
        return json.dumps({**content, "step": 0}).replace(": 0", f": {'9' * 5000}", 1)
    holder = [json.loads(json.dumps(content))]
    for _ in range(draw.randint(1, 3)):
        _change(holder, draw)
    text = json.dumps(holder[0])
    return text[: draw.randrange(len(text))] if kind == 4 else text


def _change(holder: list[Any], draw: random.Random) -> None:
    """Change one value, key or length somewhere in what `holder` has."""
    inside: Any = holder
    key: Any = 0
    while isinstance(inside[key], dict | list) and inside[key] and draw.random() < 0.8:
        inside = inside[key]
        key = draw.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
    value = inside[key]
    kind = draw.randrange(5)
    if kind == 0 and inside is not holder:
        del inside[key]
    elif kind == 1 and isinstance(inside, dict):
        inside[draw.choice(["", "step", "a.weight", "x" * 3000, "__metadata__"])] = value
    elif kind == 2 and type(value) in (int, float):
        inside[key] = draw.choice([value + 1, value - 1, -value, value * 2, value * 10**30])
    elif kind == 3 and isinstance(value, list) and value:
        inside[key] = draw.choice([value[:1] * 2, value[:-1], value[::-1], value[1:]])
    else:
        inside[key] = deepcopy(draw.choice(JUNK))


def damaged_safetensors(whole: bytes, draw: random.Random) -> bytes:
    """Return a safetensors file with its header, its length or its data changed."""
    (length,) = struct.unpack("<Q", whole[:8])
    header, data = whole[8 : 8 + length], whole[8 + length :]
    kind = draw.randrange(8)
    if kind == 0:
        return whole[: draw.randrange(len(whole))]
    if kind == 1:
        said = draw.choice([0, 1, 7, length - 1, length + 1, 10**8, 10**8 + 1, 2**63, 2**64 - 1])
        return struct.pack("<Q", said) + whole[8:]
    if kind == 2:
        flipped = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            flipped[draw.randrange(8 + length)] ^= 1 << draw.randrange(8)
        return bytes(flipped)
    if kind == 3:
        return whole + draw.randbytes(draw.randint(1, 9))
    content = json.loads(header)
    if kind == 4 and "DCP_SHARDING_INFO" in content.get("__metadata__", {}):
        parts = json.loads(content["__metadata__"]["DCP_SHARDING_INFO"])
        content["__metadata__"]["DCP_SHARDING_INFO"] = damaged(parts, draw)
        text = json.dumps(content).encode()
    else:
        text = damaged(content, draw).encode(errors="surrogatepass")
    return struct.pack("<Q", len(text)) + text + data


def fit(checkpoint: Path, path: Path) -> None:
    """Make the manifest of a checkpoint that of a file as it is."""
    content = json.loads((checkpoint / MANIFEST).read_text())
    del content["crc32"]
    for record in content["files"]:
        if checkpoint / record["path"] == path:
            record["bytes"] = path.stat().st_size
            record["crc32"] = zlib.crc32(path.read_bytes())
    sign(checkpoint, json.dumps(content))


def sign(checkpoint: Path, text: str) -> None:
    """Write a manifest with the checksum of its content, where it has any to sign."""
    try:
        content = json.loads(text)
        content["crc32"] = zlib.crc32(json.dumps(content).encode())
        text = json.dumps(content)
    except (ValueError, TypeError, RecursionError, AttributeError):
        pass
    (checkpoint / MANIFEST).write_text(text, errors="surrogatepass")


def tried(path: Path, side: Side) -> bool:
    """Return whether a side goes on from a checkpoint; any other end than a refusal raises."""
    try:
        gone_on(path, side)
    except RequestError:
        return False
    return True


def each(paths: list[Path], checkpoint: Path, number: int) -> Iterator[tuple[Path, random.Random]]:
    """Yield a file to damage, `number` times; what was done to it before is undone."""
    kept = {path: path.read_bytes() for path in (*paths, checkpoint / MANIFEST)}
    for seed in range(number):
        draw = random.Random(seed)
        yield draw.choice(paths), draw
        for path, content in kept.items():
            path.write_bytes(content)


def test_damaged_tensors(checkpoint: Path, side: Side) -> None:
    paths = sorted(checkpoint.glob("*/*.safetensors"))
    accepted = 0
    for path, draw in each(paths, checkpoint, DAMAGED):
        path.write_bytes(damaged_safetensors(path.read_bytes(), draw))
        if draw.random() < 0.9:
            fit(checkpoint, path)
        accepted += tried(checkpoint, side)
    assert accepted < DAMAGED / 4
    assert tried(checkpoint, side)


def test_damaged_manifests(checkpoint: Path, side: Side) -> None:
    for path, draw in each([checkpoint / MANIFEST], checkpoint, DAMAGED):
        content = json.loads(path.read_text())
        if draw.random() < 0.9:
            del content["crc32"]
            sign(checkpoint, damaged(content, draw))
        else:
            path.write_text(damaged(content, draw), errors="surrogatepass")
        tried(checkpoint, side)
    assert tried(checkpoint, side)


@pytest.mark.parametrize("name", ["state.json", "plan.json", "request.json"])
def test_damaged_words(name: str, checkpoint: Path, side: Side) -> None:
    for path, draw in each([checkpoint / name], checkpoint, DAMAGED):
        text = damaged(json.loads(path.read_text()), draw)
        path.write_text(text, errors="surrogatepass")
        if draw.random() < 0.9:
            fit(checkpoint, path)
        tried(checkpoint, side)
    assert tried(checkpoint, side)


def test_a_file_of_any_size_is_not_read(
    checkpoint: Path, side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is one of the format's, made small here."""
    monkeypatch.setattr(safetensors_files, "MOST_JSON_BYTES", 3000)
    path = checkpoint / "state.json"
    path.write_text(path.read_text() + " " * 5000)
    fit(checkpoint, path)
    with pytest.raises(RequestError, match=r"manifest.json has [\d,]+ bytes, more than 3,000|"
                       r"state.json has 5,\d+ bytes, more than 3,000"):  # fmt: skip
        gone_on(checkpoint, side)


def test_damaged_weights_of_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3, 4), "b": torch.arange(5)}, path)
    whole = path.read_bytes()
    for seed in range(DAMAGED):
        path.write_bytes(damaged_safetensors(whole, random.Random(seed)))
        read_folder(tmp_path)
    path.unlink()
    (tmp_path / "other.safetensors").write_bytes(whole)
    content = {"metadata": {"total_size": 9}, "weight_map": {"a": "other.safetensors"}}
    for seed in range(DAMAGED):
        text = damaged(content, random.Random(seed))
        (tmp_path / "model.safetensors.index.json").write_text(text, errors="surrogatepass")
        read_folder(tmp_path)


def read_folder(folder: Path) -> None:
    """Read the weights of a folder as a model does; any other end than a refusal raises."""
    with suppress(RequestError):
        for _, (file, name, _, _) in _tensors_in(folder):
            mapped(file, name)
