"""Checkpoints as files: what torch reads of them, and every way in which one can be broken."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from whale_train.checkpoints.checkpoint_files import (
    Manifest,
    check,
    checkpoints_in,
    folder_of,
    unfinished,
)
from whale_train.checkpoints.safetensors_files import Block, BrokenCheckpoint
from whale_train.config import ConfigError
from whale_train.launcher.resume import find_checkpoint
from whale_train.runtime.state.held import LocalBlock
from whale_train.runtime.state.saver import write_blocks
from whale_train.runtime.state.tensor_files import TensorReader, record_text

WHOLE = {
    "weight": torch.arange(70, dtype=torch.float32).view(7, 10),
    "scale": torch.tensor(3.5),
    "half": torch.arange(6, dtype=torch.bfloat16),
    "count": torch.tensor([7], dtype=torch.int64),
    "mask": torch.tensor([[True, False]]),
}
# Which rows of the weight each of two ranks has; the second, in two blocks.
ROWS = {0: [(0, 3)], 1: [(3, 4), (4, 7)]}


def saved(folder: Path, step: int) -> Path:
    """A checkpoint that two ranks wrote."""
    made = folder_of(folder, step)
    files = []
    for rank, rows in ROWS.items():
        blocks = [
            LocalBlock("model", "weight", Block((a, 0), (b - a, 10)), WHOLE["weight"][a:b], True)
            for a, b in rows
        ]
        if rank == 0:
            blocks += [
                LocalBlock("model", name, Block((0,) * x.dim(), tuple(x.shape)), x, True)
                for name, x in WHOLE.items()
                if name != "weight"
            ]
        files += list(write_blocks(made, blocks, rank))
    files.append(record_text(made, "state.json", '{"step": 3}\n'))
    (made / "manifest.json").write_text(Manifest(step, 0.1, tuple(files)).to_json())
    return made


def test_what_was_written_is_read_in_any_pieces(tmp_path: Path) -> None:
    reader = TensorReader(saved(tmp_path, 3) / "model")
    read = dict(reader.whole())
    assert read.keys() == WHOLE.keys()
    assert all(torch.equal(read[name], WHOLE[name]) for name in WHOLE)
    piece = torch.zeros(4, 5, dtype=torch.float64)
    reader.read("weight", Block((2, 3), (4, 5)), piece)
    assert torch.equal(piece, WHOLE["weight"][2:6, 3:8].double())


def test_what_nobody_wrote_is_named(tmp_path: Path) -> None:
    reader = TensorReader(saved(tmp_path, 3) / "model")
    with pytest.raises(BrokenCheckpoint, match="has no bias"):
        reader.read("bias", Block((0,), (2,)), torch.zeros(2))
    with pytest.raises(BrokenCheckpoint, match="has not all of weight"):
        reader.read("weight", Block((5, 0), (3, 10)), torch.zeros(3, 10))


def test_torchs_own_reader_reads_it(tmp_path: Path) -> None:
    state = {name: torch.zeros_like(x) for name, x in WHOLE.items() if name != "mask"}
    reader = dcp.HuggingFaceStorageReader(str(saved(tmp_path, 3) / "model"))
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert all(torch.equal(state[name], WHOLE[name]) for name in state)


def test_safetensors_reads_a_file_of_it(tmp_path: Path) -> None:
    found = load_file(saved(tmp_path, 3) / "model" / "rank_1_0.safetensors")
    assert torch.equal(found["weight"], WHOLE["weight"][3:4])


def test_every_flipped_byte_is_found_by_name(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, 3)
    assert check(checkpoint).step == 3
    draw = random.Random(5)
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    for _ in range(200):
        path = draw.choice(files)
        before = path.read_bytes()
        place = draw.randrange(len(before))
        flipped = bytearray(before)
        flipped[place] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(BrokenCheckpoint, match=f"{path} (is damaged|cannot)"):
            check(checkpoint)
        path.write_bytes(before)
    assert check(checkpoint).step == 3


def test_what_is_cut_off_or_gone_is_found_by_name(tmp_path: Path) -> None:
    path = saved(tmp_path, 3) / "model" / "rank_1_1.safetensors"
    before = path.read_bytes()
    path.write_bytes(before[:-7])
    with pytest.raises(BrokenCheckpoint, match=f"{path} has {len(before) - 7} of {len(before)} b"):
        check(path.parents[1])
    path.unlink()
    with pytest.raises(BrokenCheckpoint, match=f"{path} is missing"):
        check(path.parents[1])


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"step": 3, "files": [{}]}'])
def test_a_folder_without_its_manifest_is_no_checkpoint(tmp_path: Path, content: str) -> None:
    manifest = saved(tmp_path, 3) / "manifest.json"
    manifest.unlink()
    if content is not None:
        manifest.write_text(content)
    with pytest.raises(BrokenCheckpoint, match=str(manifest)):
        check(manifest.parent)


def test_a_run_goes_on_from_the_newest_that_is_whole(tmp_path: Path) -> None:
    first, second, third = (saved(tmp_path, step) for step in (9, 10, 100))
    unfinished(folder_of(tmp_path, 200)).mkdir()
    assert checkpoints_in(first.parent) == [third, second, first]
    (third / "state.json").write_text('{"step": 4}\n')
    for wanted in ("auto", str(tmp_path), str(first.parent)):
        found = find_checkpoint(wanted, tmp_path)
        assert found is not None
        assert (found.path, found.step) == (second, 10)
        assert found.broken == (f"{third / 'state.json'} is damaged: its checksum is not the "
                                "manifest's",)  # fmt: skip
    with pytest.raises(ConfigError, match="is no whole checkpoint"):
        find_checkpoint(str(third), tmp_path)
    for path in (first, second):
        (path / "manifest.json").unlink()
    with pytest.raises(ConfigError) as caught:
        find_checkpoint("auto", tmp_path)
    assert len(caught.value.faults) == 3


def test_a_run_that_has_saved_nothing_begins(tmp_path: Path) -> None:
    assert find_checkpoint("auto", tmp_path) is None
