"""Parts of tensors in a store: the same as of the files here, by no more bytes than they have."""

from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whale_train.checkpoints.safetensors_files import Block, stored_blocks
from whale_train.checkpoints.url_path import UrlPath
from whale_train.runtime.state import ranged_reads
from whale_train.runtime.state.tensor_files import TensorReader, write_tensors


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """A shape, and a part of it that is not empty."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    starts = [draw(st.integers(0, n - 1)) for n in shape]
    stops = [draw(st.integers(a + 1, n)) for a, n in zip(starts, shape, strict=True)]
    return shape, tuple(map(slice, starts, stops))


@given(parts(), st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
def test_runs_are_where_the_part_lies(
    part: tuple[tuple[int, ...], tuple[slice, ...]], dtype: torch.dtype
) -> None:
    """By the places of a tensor's elements, which torch counts."""
    shape, index = part
    places = torch.arange(torch.Size(shape).numel()).view(shape)[index].flatten() * dtype.itemsize
    run_bytes, starts = ranged_reads.runs(shape, index, dtype.itemsize)
    counted = [x for start in starts for x in range(start, start + run_bytes, dtype.itemsize)]
    assert counted == places.tolist()


class Counted:
    """The ranges that were read of a store in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = self.reads = 0
        read = UrlPath.read_bytes

        def counting(path: UrlPath, start: int, stop: int) -> bytes:
            self.bytes, self.reads = self.bytes + stop - start, self.reads + 1
            return read(path, start, stop)

        monkeypatch.setattr(UrlPath, "read_bytes", counting)


@pytest.mark.parametrize("between", [0, 2**18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_part_is_read_by_its_bytes(
    between: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (torch.arange(6 * 8 * 4) % 3).view(6, 8, 4).to(dtype)
    tensors = {"other": torch.ones(5), "whole": whole, "scalar": torch.tensor(2.5)}
    described = {name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()}
    write_tensors(tmp_path, "a.safetensors", described, tensors.values())
    to = UrlPath.of(f"memory://ranged/{dtype}/{between}")
    (to / "a.safetensors").put(tmp_path / "a.safetensors")
    assert [x for x, _ in stored_blocks(to / "a.safetensors")] == list(tensors)
    monkeypatch.setattr(ranged_reads, "MOST_BETWEEN_BYTES", between)
    reader = TensorReader(to)
    counted = Counted(monkeypatch)
    wanted = Block((1, 2, 0), (3, 4, 4))
    into, scalar = torch.empty(3, 4, 4, dtype=dtype), torch.zeros(())
    reader.read_all([("whole", wanted, into), ("scalar", Block((), ()), scalar)])
    assert torch.equal(into, whole[1:4, 2:6])
    assert scalar == 2.5
    span = (2 * 8 + 4) * 4 if between else 3 * 4 * 4
    assert counted.bytes == span * dtype.itemsize + 4
    assert counted.reads == (2 if between else 4)


def test_long_headers_are_read_whole(tmp_path: Path) -> None:
    names = [f"a_parameter_with_a_long_name.{number}" for number in range(600)]
    described = dict.fromkeys(names, (torch.float32, ()))
    write_tensors(tmp_path, "long.safetensors", described, (torch.ones(()) for _ in names))
    path = UrlPath.of("memory://ranged/long.safetensors")
    path.put(tmp_path / "long.safetensors")
    assert path.size() > 2**15
    for place in (path, tmp_path / "long.safetensors"):
        assert [name for name, _ in stored_blocks(place)] == names


def test_a_local_url_is_a_place_like_another(tmp_path: Path) -> None:
    described = {"weight": (torch.float32, (4, 2))}
    write_tensors(tmp_path, "a.safetensors", described, [torch.arange(8.0).view(4, 2)])
    assert fsspec.url_to_fs(f"file://{tmp_path}")[1] == str(tmp_path)
    into = torch.empty(2, 2)
    TensorReader(UrlPath.of(f"file://{tmp_path}")).read("weight", Block((1, 0), (2, 2)), into)
    assert into.tolist() == [[2.0, 3.0], [4.0, 5.0]]
