"""Shards of samples: their index, WebDataset's naming, and what is refused."""

import gzip
import io
import json
import os
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from whale_train.data.dataset import Dataset
from whale_train.data.evaluation_sets import open_data
from whale_train.data.open import open_dataset, tokenizer_of
from whale_train.data.shards import shard_index
from whale_train.data.sources.webdataset import WebdatasetOptions
from whale_train.errors import ConfigError
from whale_train.strategies.graph.operation_graph import InputField

OWN = '''"""Functions of a user's own."""

import random


def cut(sample) -> dict:
    count = random.choice((1, 2, 3))
    return {"x": sample["x"][:count], "count": count, "y": sample["y"]}


def broken_sample(sample) -> dict:
    return {"x": sample["y"]}


def codes(text: str) -> list[int]:
    return [ord(letter) for letter in text[:2]]


def broken(text: str) -> list[int]:
    raise ValueError("no text")
'''
Members = Sequence[tuple[str, bytes]]


def png(seed: int) -> bytes:
    file = io.BytesIO()
    values = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    Image.fromarray(values).save(file, "png")
    return file.getvalue()


def saved(array: Any, *more: Any) -> bytes:
    file = io.BytesIO()
    if more:
        np.savez(file, a=array, b=more[0])
    else:
        np.save(file, array)
    return file.getvalue()


def shard(path: Path, members: Members) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shards of three, one and two samples."""
    for number, samples in enumerate(([0, 1, 2], [3], [4, 5])):
        members: list[tuple[str, bytes]] = []
        for x in samples:
            members += [(f"a.b/{x:03}.PNG", png(x)), (f"a.b/{x:03}.cls", str(x % 3).encode())]
            members += [(f"a.b/{x:03}.meta.json", json.dumps({"x": [x, 2]}).encode())]
            members += [(f"a.b/{x:03}.txt", f"{x}!".encode()), (f"a.b/{x:03}.npy", saved([x]))]
            members += [(f"a.b/{x:03}.npz", saved([x], [x, x]))]
        shard(tmp_path / f"train-{number:03}.tar", members)
    (tmp_path / "own_functions.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_functions", raising=False)
    return tmp_path


def options(**given: Any) -> WebdatasetOptions:
    plain: dict[str, Any] = {"path": "train-*.tar", "cache": "cache", "fields": {"y": "cls"}}
    return WebdatasetOptions.model_validate({**plain, **given})


def opened(**given: Any) -> Dataset:
    return open_dataset(options(**given))


def refused(**given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        opened(**given)
    return str(caught.value)


@pytest.mark.usefixtures("folder")
def test_samples_are_numbered_over_all_shards() -> None:
    fields = {"x": ("jpg", "png"), "y": "cls", "z": "meta.json:x", "n": "npy", "m": "npz:b"}
    given: dict[str, Any] = {"transform": (), "mean": (0, 0, 0), "std": (1, 1, 1)}
    dataset = opened(fields={**fields, "t": "txt"}, **given, convert=CODES)
    shapes = [(x.name, x.shape, x.dtype, x.upper_bound) for x in dataset.fields]
    assert shapes == [
        *[("x", (3, 4, 4), "float32", 0), ("y", (), "int64", 3), ("z", (2,), "int64", 0)],
        *[("n", (1,), "int64", 0), ("m", (2,), "int64", 0), ("t", (2,), "int64", 0)],
    ]
    assert dataset.num_samples == 6
    batch = dataset.samples(np.array([5, 3, 0]))
    assert batch["y"].tolist() == [2, 0, 0]
    assert batch["z"].tolist() == [[5, 2], [3, 2], [0, 2]]
    assert batch["n"].tolist() == [[5], [3], [0]]
    assert batch["m"].tolist() == [[5, 5], [3, 3], [0, 0]]
    assert batch["t"].tolist() == [[ord(x), ord("!")] for x in "530"]
    pixels = np.asarray(Image.open(io.BytesIO(png(5)))).transpose(2, 0, 1) / 255
    np.testing.assert_allclose(batch["x"][0], pixels, atol=1e-6)


CODES = {"t": {"_target_": "own_functions.codes"}}


def write_words(folder: Path) -> None:
    """Write a tokenizer of the six texts, which marks the end of a text and would pad to 9."""
    words = Tokenizer(WordLevel({"<end>": 0, **{f"{x}!": x + 1 for x in range(6)}}, "<end>"))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 0)])
    words.enable_padding(length=9)
    (folder / "words").mkdir()
    words.save(str(folder / "words/tokenizer.json"))


def test_texts_are_tokenised_and_padded(folder: Path) -> None:
    write_words(folder)
    pads = {"t": {"length": 4}, "u": {"length": 3, "value": -100}}
    dataset = opened(fields={"t": "txt", "u": "txt", "y": "cls"}, tokenizer="words", pad=pads)
    assert dataset.fields == (
        InputField("t", (4,), "int64", 7),
        InputField("u", (3,), "int64", 7, -100),
        InputField("y", (), "int64", 3),
    )
    batch = dataset.samples(np.array([5, 0]))
    assert batch["t"].tolist() == [[6, 0, 0, 0], [1, 0, 0, 0]]
    assert batch["u"].tolist() == [[6, 0, -100], [1, 0, -100]]
    assert tokenizer_of(options(tokenizer="words")) == Path("words")
    assert tokenizer_of(options(tokenizer="gone")) is None


@pytest.mark.usefixtures("folder")
def test_a_function_makes_the_fields_of_a_sample() -> None:
    """What it draws follows from the place in the run, and not from how samples are read."""
    given: dict[str, Any] = {"map": {"_target_": "own_functions.cut"}, "pad": {"x": {"length": 3}}}
    dataset = opened(fields={"x": "meta.json:x", "y": "cls"}, **given)
    assert dataset.fields == tuple(
        InputField(name, shape, "int64") for name, shape in (("x", (3,)), ("count", ()), ("y", ()))
    )
    rows, draws = np.array([4] * 20), np.arange(20)
    batch, again = (dataset.samples(rows[::x], draws[::x]) for x in (1, -1))
    assert set(batch["count"].tolist()) == {1, 2, 3}
    for name, values in batch.items():
        assert (values == again[name][::-1]).all()
    for count, values in zip(batch["count"], batch["x"], strict=True):
        assert values.tolist() == [*[4, 2][:count], 0, 0][:3]


@pytest.mark.usefixtures("folder")
def test_images_and_classes_are_the_fields_unless_others_are_named() -> None:
    dataset = opened(fields=None, image_size=2)
    assert dataset.fields == (
        InputField("pixel_values", (3, 2, 2), "float32"),
        InputField("labels", (), "int64", 3),
    )
    rows, draws = np.array([4, 0, 4]), np.array([5, 6, 7])
    batch, again = (dataset.samples(rows[::x], draws[::x])["pixel_values"] for x in (1, -1))
    assert (batch == again[::-1]).all()
    assert (batch[0] != batch[2]).any()
    data = open_data(options(fields=None, image_size=2, evaluation={"all": {}}))
    still = opened(fields=None, image_size=2, transform="center_crop").samples(rows)
    assert (data.sets["all"].samples(rows, draws)["pixel_values"] == still["pixel_values"]).all()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("path", "numbers"),
    [
        ("train-{000..001}.tar", [0, 1, 2, 0]),
        ("train-{002,000}.tar", [1, 2, 0, 1, 2]),
        (("train-001.tar", "train-00[02].tar"), [0, 0, 1, 2, 1, 2]),
    ],
)
def test_patterns_name_shards_in_order(path: Any, numbers: list[int]) -> None:
    dataset = opened(path=path)
    assert dataset.samples(np.arange(dataset.num_samples))["y"].tolist() == numbers


def test_an_index_is_made_once_and_follows_the_content(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened()
    kept = {x.name: x.stat().st_mtime_ns for x in (folder / "cache").glob("*.npz")}
    assert len(kept) == 3
    with monkeypatch.context() as patched:
        patched.setattr(shard_index, "_made", lambda _: pytest.fail("it is there"))
        (folder / "train-000.tar").rename(folder / "train-00x.tar")
        assert opened(path="train-00x.tar").num_samples == 3
    shard(folder / "train-00x.tar", [("a.cls", b"7")])
    assert opened(path="train-00x.tar").samples(np.array([0]))["y"].tolist() == [7]
    (folder / "cache" / sorted(kept)[0]).write_bytes(b"broken")
    cut = folder / "cache" / sorted(kept)[1]
    cut.write_bytes(cut.read_bytes()[:100])
    assert opened(path="train-*.tar").num_samples == 4


def test_names_are_webdatasets(folder: Path) -> None:
    """Folders, names without an extension, hidden and `__` members are no samples; a key of other
    members between makes two samples."""
    path = folder / "odd.tar"
    names = ["__meta__/a.cls", "plain", "d.x/.hidden.cls", "d.x/k.CLS", "ü" * 120 + ".cls", "k.cls"]
    shard(path, [(name, str(i).encode()) for i, name in enumerate(names)])
    with tarfile.open(path, "a") as tar:
        tar.add(folder / "cache" if (folder / "cache").exists() else folder, "d", recursive=False)
    assert opened(path="odd.tar").samples(np.arange(3))["y"].tolist() == [3, 4, 5]


def test_a_shard_that_changes_while_it_is_read_is_named(folder: Path) -> None:
    dataset = opened(fields={"n": "npy"})
    path = folder / "train-001.tar"
    path.write_bytes(b"\1" * path.stat().st_size)
    with pytest.raises(ConfigError, match=r"has changed while it was read \(at sample a.b/003 of"):
        dataset.samples(np.array([3]))


def test_numbers_that_are_no_classes_are_found_without_reading_images(folder: Path) -> None:
    from whale_train.data.dataset import can_be_searched, first_row

    dataset = opened()
    assert can_be_searched(dataset)
    place = first_row(dataset, dataset.fields[0], lambda values: values[values > 1])
    assert place is not None
    assert (place.row, place.value) == (2, 2)


FAULTS = {
    "pickle": (
        {"fields": {"x": "pt"}},
        "data.fields.x=pt is a pickle, which runs what is in it; save arrays as npy, or images as",
    ),
    "unknown": ({"fields": {"x": "mp3"}}, "data.fields.x=mp3 is of no kind that is read here (bmp"),
    "part": (
        {"fields": {"x": "npy:a"}},
        "data.fields.x=npy:a names a part, which json and npz alone have; use npy",
    ),
    "text": (
        {"fields": {"x": "txt"}},
        "data.fields.x=txt is a str and no numbers in sample a.b/000 of {here}/train-000.tar, "
        ".txt; use data.tokenizer=DIR, or 'data.convert={{x: {{_target_: my_data.numbers}}}}'",
    ),
    "no_text": (
        {"tokenizer": "words"},
        "data.tokenizer=words has no effect: no field of data.fields is a text without "
        "data.convert; leave it out",
    ),
    "no_tokenizer": (
        {"fields": {"x": "txt"}, "tokenizer": "words"},
        "data.tokenizer=words is no folder, and no name of the Hugging Face hub (owner/name); "
        "name a folder that a tokenizer's save_pretrained() wrote",
    ),
    "empty_tokenizer": (
        {"fields": {"x": "txt"}, "tokenizer": "."},
        "data.tokenizer=. has no tokenizer.json; save a fast tokenizer with save_pretrained()",
    ),
    "map": (
        {"fields": {"x": "txt"}, "map": {"_target_": "own_functions.broken_sample"}},
        "data.map raised KeyError: 'y' for sample a.b/000 of {here}/train-000.tar; correct it",
    ),
    "pad": (
        {"pad": {"x": {"length": 3}}},
        "data.pad.x is no field of the data, which has y; leave it out",
    ),
    "key": (
        {"fields": {"x": "meta.json:z"}},
        "data.path holds sample a.b/000 of {here}/train-000.tar, .meta.json, which cannot be read "
        "(ValueError: it has no key z, but x); write it again",
    ),
    "arrays": (
        {"fields": {"x": "npz"}},
        "data.path holds sample a.b/000 of {here}/train-000.tar, .npz, which cannot be read "
        "(ValueError: it has 2 arrays, of a, b; name one as npz:NAME); write it again",
    ),
    "convert": (
        {"fields": {"x": "txt"}, "convert": {"x": {"_target_": "own_functions.broken"}}},
        "data.convert.x raised ValueError: no text for sample a.b/000 of {here}/train-000.tar, "
        ".txt",
    ),
    "convert_image": (
        {"fields": {"x": "png"}, "convert": CODES | {"x": CODES["t"]}},
        "data.convert.t is no field of the data; leave it out\n"
        "data.convert.x is of an image; use data.transform",
    ),
    "transform": (
        {"transform": "flip"},
        "data.transform has no effect: no field of data.fields is an image; leave it out",
    ),
    "missing": (
        {"path": "train-{000..003}.tar"},
        "data.path={here}/train-003.tar does not exist; did you mean {here}/train-002.tar?",
    ),
    "nothing": (
        {"path": "valid-*.tar"},
        "data.path={here}/valid-*.tar names no file; name tar files, as shards/train-*.tar",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_refused(name: str, folder: Path) -> None:
    given, expected = FAULTS[name]
    assert refused(**given).startswith(expected.format(here=folder))


def test_shards_that_cannot_be_used_are_named(folder: Path) -> None:
    path = folder / "one.tar"

    def said(members: Members, **given: Any) -> str:
        return refused(path="one.tar", **given, cache=str(shard(path, members)) + ".cache")

    apart = [("a.png", png(0)), ("b.png", png(1)), ("a.cls", b"1"), ("b.cls", b"0")]
    assert said(apart, fields={"x": "png", "y": "cls"}) == (
        f"data.fields.x=png is missing in sample a of {path}, which has cls; name what all samples "
        "have, or write the shard again with the members of each sample one after another\n"
        f"data.fields.y=cls is missing in sample a of {path}, which has png; name what all samples "
        "have, or write the shard again with the members of each sample one after another"
    )
    assert said([("a.cls", b"1"), ("b.cls", b"two")]) == (
        f"data.fields.y=cls is no whole number of 64 bits in sample b of {path}; write it again, "
        "or name another field"
    )
    twice = said([("a.cls", b"1"), ("a.cls", b"2")])
    assert twice.startswith(f"data.path={path} has a.cls twice in a sample; give every member")
    assert said([("plain", b"")]).startswith(
        f"data.path={path} has no samples; name its files KEY."
    )
    damaged = said([("a.png", png(0)[:80])], fields={"x": "png"})
    assert damaged.startswith(f"data.path holds sample a of {path}, .png, which is no image")


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_links_are_no_samples(folder: Path, kind: bytes) -> None:
    """One left out would leave out its sample, where all of its members are links."""
    path = shard(folder / "one.tar", [("a.cls", b"1"), ("c.cls", b"2")])
    with tarfile.open(path, "a") as tar:
        for name in ("links", "b.cls"):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.cls"
            tar.addfile(info)
    assert refused(path="one.tar") == (
        f"data.path={path} keeps b.cls as a link to a.cls; write the tar with files, as tar "
        "--dereference --hard-dereference does"
    )


def test_tars_that_are_not_whole_are_named(folder: Path) -> None:
    whole = shard(folder / "train-000.tar", [(f"{x}.cls", b"1") for x in range(3)]).read_bytes()

    def said(content: bytes) -> str:
        (folder / "one.tar").write_bytes(content)
        path = f"data.path={folder / 'one.tar'} "
        return refused(path="one.tar").removeprefix(path)

    assert said(gzip.compress(whole)) == (
        "is compressed, and samples are read at their places in a tar; unpack it with gunzip "
        "(images are compressed already)"
    )
    end = "; write it again, or copy it whole"
    assert said(whole[: 2 * 1024]) == f"is cut off: it has no mark of a tar's end{end}"
    assert said(whole[: 2 * 1024 + 100]) == f"is cut off: it has no mark of a tar's end{end}"
    assert said(whole[: 2 * 1024 + 512]).startswith("is no whole tar (")
    broken = whole[:1024] + b"x" * 512 + whole[1536:]
    assert said(broken) == f"is no whole tar (at byte 1,024 is no header){end}"
    assert said(whole + whole).startswith("goes on behind its end (at byte 3,072), as tars do that")
    assert said(b"no tar" * 200).startswith("is no whole tar (")
    assert os.listdir(folder).count("one.tar") == 1
