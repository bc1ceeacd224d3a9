"""Damaged .npz files: each is read or refused, and never takes memory by what it says of itself."""

import io
import tracemalloc
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.lib import format as npy_format
from tests.pairs import IS_FULL

from whale_train.data.open import open_dataset
from whale_train.data.sources.arrays import ArraysOptions
from whale_train.errors import ConfigError

DAMAGED = 3000 if IS_FULL else 150
MOST_BYTES = 20_000_000  # of memory, where files have less than 20 kB


def opened(path: Path) -> str:
    """Return what becomes of a file: `read`, or what it is refused for."""
    try:
        dataset = open_dataset(ArraysOptions(path=str(path)))
    except ConfigError as error:
        return str(error).removeprefix(f"data.path={path} ")
    dataset.samples(np.arange(min(4, dataset.num_samples)))
    return "read"


def whole_files() -> list[bytes]:
    """Return files of every kind that numpy writes: stored and compressed, of a few arrays."""
    generator = np.random.default_rng(0)
    arrays = {
        "x": generator.normal(size=(16, 4)).astype(np.float32),
        "ids": np.asfortranarray(generator.integers(0, 9, (16, 3))),
        "labels": (generator.integers(0, 3, 16)).astype(">i4"),
    }
    files = []
    for save in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        save(file, **arrays)
        files.append(file.getvalue())
    return files


def damage(content: bytes, generator: np.random.Generator) -> bytes:
    """Return the file with bytes changed, cut out, put in or twice, or cut off; where a file says
    something of itself more often than elsewhere."""
    broken = bytearray(content)
    headers = [i for i in range(len(content)) if content[i : i + 2] in (b"PK", b"\x93N")]
    for _ in range(generator.integers(1, 4)):
        at = int(generator.integers(len(broken) or 1))
        if generator.random() < 0.7:
            at = min(len(broken) - 1, int(generator.choice(headers) + generator.integers(64)))
        length = int(generator.integers(1, 9))
        match int(generator.integers(6)):
            case 0 | 1:
                broken[at : at + 1] = bytes([int(generator.integers(256))])
            case 2:
                broken[at : at + length] = generator.bytes(length)
            case 3:
                del broken[at : at + length]
            case 4:
                broken[at:at] = broken[at : at + length]
            case 5 if generator.random() < 0.3:
                del broken[at:]
            case _:
                broken[at : at + length] = b"\xff" * length
    return bytes(broken)


def test_a_damaged_file_is_read_or_refused(tmp_path: Path) -> None:
    files, path = whole_files(), tmp_path / "a.npz"
    ends: Counter[str] = Counter()
    for seed in range(DAMAGED):
        path.write_bytes(damage(files[seed % len(files)], np.random.default_rng(seed)))
        tracemalloc.start()
        try:
            end = opened(path)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        finally:
            tracemalloc.stop()
        assert peak_bytes < MOST_BYTES, seed
        ends["read" if end == "read" else "refused"] += 1
    assert ends["refused"] > DAMAGED / 4
    assert ends["read"]


def written(path: Path, header: dict[str, object], content: bytes, **how: int) -> None:
    """Write an archive of one array with that header."""
    file = io.BytesIO()
    npy_format.write_array_header_1_0(file, header)
    with zipfile.ZipFile(path, "w", **how) as archive:
        archive.writestr("x.npy", file.getvalue() + content)


@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("extent", [10**12, 2**63, -1])
def test_a_shape_is_not_believed(tmp_path: Path, how: int, extent: int) -> None:
    path = tmp_path / "a.npz"
    header = {"shape": (extent, 2), "fortran_order": False, "descr": "<f4"}
    written(path, header, bytes(8), compression=how)
    said = opened(path)
    if extent < 0:
        assert said.startswith("is not an .npz file: its member x.npy is not an array; write one")
    else:
        assert said == (
            f"is damaged: array x of shape [{extent}, 2] has {extent * 8} bytes, and its member 8; "
            "write the file again, or copy it whole"
        )


def test_a_directory_is_not_believed(tmp_path: Path) -> None:
    """Of 8 TB that a file of some hundred bytes says it is compressed of, in its directory too."""
    path, extent = tmp_path / "a.npz", 10**6
    header = {"shape": (extent, 2), "fortran_order": False, "descr": "<f4"}
    written(path, header, bytes(8), compression=zipfile.ZIP_DEFLATED)
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    size = int.from_bytes(content[entry + 24 : entry + 28], "little") - 8 + extent * 8
    content[entry + 24 : entry + 28] = size.to_bytes(4, "little")
    path.write_bytes(content)
    compressed = int.from_bytes(content[entry + 20 : entry + 24], "little")
    assert opened(path) == (
        f"is damaged: {compressed} bytes of member x.npy are not {size} bytes compressed; "
        "write the file again, or copy it whole"
    )


def test_a_checksum_that_is_wrong_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.arange(3))
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    content[entry + 16] ^= 1
    path.write_bytes(content)
    assert opened(path).startswith("is damaged (BadZipFile: Bad CRC-32")


def test_two_arrays_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    array = io.BytesIO()
    np.save(array, np.arange(3))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", array.getvalue())
        archive.writestr("x", array.getvalue())
    assert opened(path) == "has several arrays x; give each a name of its own"


def test_a_bit_of_a_mapped_array_that_is_another_is_refused(tmp_path: Path) -> None:
    """Its header, its size and the archive's directory say nothing of it."""
    path = tmp_path / "samples.npz"
    np.savez(path, x=np.arange(4096, dtype=np.float32))
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)
    assert opened(path) == (
        "is damaged (BadZipFile: Bad CRC-32 for file 'x.npy'); write the file again, or copy it "
        "whole"
    )
