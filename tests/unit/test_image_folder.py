"""Folders of images: numbers of classes, transforms by a sample's draw, and what is refused."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from whale_train.data.dataset import Dataset
from whale_train.data.evaluation_sets import open_data
from whale_train.data.open import open_dataset
from whale_train.data.sources.image_folder import ImageFolderOptions
from whale_train.errors import ConfigError
from whale_train.strategies.graph.operation_graph import InputField

STEPS = '''"""Steps of a user's own."""
from PIL.Image import Image
import numpy as np
import random


class Rolled:
    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, image):
        return np.roll(np.asarray(image), random.randrange(self.most), 1).transpose(2, 0, 1)


def halved(image: Image, by: int = 2) -> Image:
    return image.resize((image.width // by, image.height // by))


def broken(image: Image) -> Image:
    raise ValueError("no such image")


def anything(image):
    return image
'''


def image(seed: int, width: int = 12, height: int = 8) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `train` of the classes cat, dog and owl, and `val` of dog alone."""
    for number, name in enumerate(("owl/b.png", "cat/ä.png", "dog/x.bmp", "owl/a.PNG")):
        path = tmp_path / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image(number).save(path)
    (tmp_path / "val" / "dog").mkdir(parents=True)
    image(9).save(tmp_path / "val" / "dog" / "y.png")
    (tmp_path / "own_steps.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_steps", raising=False)
    return tmp_path


def options(**given: Any) -> ImageFolderOptions:
    plain = {"path": "train", "image_size": 4, "mean": (0, 0, 0), "std": (1, 1, 1)}
    return ImageFolderOptions.model_validate({**plain, **given})


def opened(**given: Any) -> Dataset:
    return open_dataset(options(**given))


def refused(**given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        opened(**given)
    return str(caught.value)


@pytest.mark.usefixtures("folder")
def test_classes_are_numbered_by_name_and_pixels_are_the_files() -> None:
    dataset = opened(transform=(), mean=(0.5, 0, 0), std=(1, 2, 1), fields=("x", "y"))
    assert dataset.fields == (
        InputField("x", (3, 8, 12), "float32"),
        InputField("y", (), "int64", 3),
    )
    batch = dataset.samples(np.arange(4))
    assert batch["y"].tolist() == [0, 1, 2, 2]
    pixels = np.asarray(image(3)).transpose(2, 0, 1) / 255  # owl/a.PNG comes before owl/b.png
    expected = (pixels - np.reshape([0.5, 0, 0], (3, 1, 1))) / np.reshape([1, 2, 1], (3, 1, 1))
    np.testing.assert_allclose(batch["x"][2], expected, atol=1e-6)


@pytest.mark.usefixtures("folder")
def test_random_steps_are_a_function_of_the_draw() -> None:
    dataset, other = opened(), opened(workers=3)
    rows, draws = np.array([2, 0, 2]), np.array([5, 6, 7])
    batch = dataset.samples(rows, draws)["pixel_values"]
    assert batch.shape == (3, 3, 4, 4)
    assert (other.samples(rows[::-1], draws[::-1])["pixel_values"][::-1] == batch).all()
    assert (batch[0] != batch[2]).any()


@pytest.mark.usefixtures("folder")
def test_a_flip_mirrors_half_of_the_images() -> None:
    dataset = opened(transform="flip")
    batch = dataset.samples(np.zeros(200, np.int64), np.arange(200))["pixel_values"]
    mirrored = [bool((x == batch[0][..., ::-1]).all()) for x in batch]
    assert all(m or (x == batch[0]).all() for m, x in zip(mirrored, batch, strict=True))
    assert 70 <= sum(mirrored) <= 130


@pytest.mark.usefixtures("folder")
def test_a_center_crop_is_the_middle_square() -> None:
    batch = opened(transform="center_crop", image_size=8).samples(np.array([2]))
    middle = np.asarray(image(3))[:, 2:10].transpose(2, 0, 1) / 255
    np.testing.assert_allclose(batch["pixel_values"][0], middle, atol=1e-6)


@pytest.mark.usefixtures("folder")
def test_evaluations_draw_nothing_and_number_classes_as_training_does() -> None:
    given = options(evaluation={"val": {"path": "val"}}, evaluation_fraction=0.5)
    data = open_data(given)
    still = opened(transform="center_crop")
    held_back = data.training.evaluation_samples(np.arange(2))
    all_of_them = still.samples(np.arange(4))["pixel_values"]
    assert all(any((x == y).all() for y in all_of_them) for x in held_back["pixel_values"])
    of_set = data.sets["val"].samples(np.array([0]), np.array([77]))
    assert of_set["labels"].tolist() == [1]
    other = opened(path="val", classes=("cat", "dog", "owl"), transform="center_crop")
    assert (of_set["pixel_values"] == other.samples(np.array([0]))["pixel_values"]).all()


@pytest.mark.usefixtures("folder")
def test_steps_of_ones_own_are_applied_in_order() -> None:
    steps = ({"_target_": "own_steps.halved"}, {"_target_": "own_steps.Rolled", "most": 6})
    batch = opened(transform=steps).samples(np.array([2, 2]), np.array([0, 1]))["pixel_values"]
    assert batch.shape == (2, 3, 4, 6)
    half = np.asarray(image(3).resize((6, 4))).transpose(2, 0, 1)
    rolled = [np.roll(half, by, 2).astype(np.float32) / np.float32(255) for by in range(6)]
    assert all(any((x == y).all() for y in rolled) for x in batch)


def test_grey_images_have_one_channel(folder: Path) -> None:
    batch = opened(channels=1, mean=None, std=None, transform="center_crop", image_size=8)
    grey = np.asarray(image(3).convert("L"))[None, :, 2:10]
    expected = (grey / 255 - 0.5) / 0.5
    np.testing.assert_allclose(batch.samples(np.array([2]))["pixel_values"][0], expected, atol=1e-6)


def test_an_image_that_cannot_be_read_is_named(folder: Path) -> None:
    path = folder / "train" / "cat" / "ä.png"
    path.write_bytes(path.read_bytes()[:100])
    assert f"data.path holds {path}, which is no image that PIL reads (" in refused()
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(path)
    assert "with pixels of more than 8 bits (PIL's mode I;16)" in refused()


def test_folders_that_are_no_classes_are_refused(folder: Path) -> None:
    train = folder / "train"
    assert refused(path=str(folder)) == (
        f"data.path={train} is a class of data.path={folder}, and holds a folder cat; use "
        f"data.path={train} if its folders are the classes (and 'data.evaluation={{val: {{path: "
        "...}}' for others beside it)"
    )
    assert refused(path=str(train / "cat")) == (
        f"data.path={train / 'cat'} has no folder, and each class is a folder of images; lay "
        f"images out as {train / 'cat' / 'CLASS' / 'FILE.jpg'}"
    )
    (train / "bat").mkdir()
    assert refused() == (
        f"data.path={train / 'bat'} is a class without an image; put images there, or take the "
        "folder away"
    )
    (train / "bat" / "notes.txt").write_text("")
    assert f"{train / 'bat' / 'notes.txt'} is no image by its name (bmp, gif," in refused()
    (train / "bat" / "notes.txt").rename(train / "bat" / ".notes")
    assert "is a class without an image" in refused()
    expected = (
        f"data.path={train} has a folder bat, which is none of data.classes; did you mean cat?"
    )
    assert refused(classes=("cat", "dog", "owl")).startswith(expected)


FAULTS = {
    "mean": (
        {"mean": (0.5,)},
        "data.mean=[0.5] has 1 numbers for data.channels=3; give one for each",
    ),
    "std": ({"std": (1, 0, 1)}, "data.std=[1.0, 0.0, 1.0] divides by what is not above 0; use"),
    "fields": (
        {"fields": ("x", "x")},
        "data.fields=x, x names image and class alike; give them two names",
    ),
    "unequal": (
        {"transform": {"_target_": "own_steps.halved"}},
        "data.pixel_values has samples of several shapes: [3, 3, 5] (sample 1), elsewhere [3, 4, "
        "6]; end data.transform with random_crop or center_crop, or with a step that resizes",
    ),
    "raises": (
        {"transform": ("flip", {"_target_": "own_steps.broken"})},
        "data.transform[1] raised ValueError: no such image for ",
    ),
    "unannotated": (
        {"transform": {"_target_": "own_steps.anything"}},
        "data.transform._target_=own_steps.anything is a function that does not say what",
    ),
    "not_a_step": (
        {"evaluation_transform": {"_target_": "os.system"}},
        "data.evaluation_transform._target_=os.system is a function that does not say",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_refused(name: str, folder: Path) -> None:
    image(5, 10, 6).save(folder / "train" / "dog" / "x.bmp")
    given, expected = FAULTS[name]
    assert refused(**given).startswith(expected)


@pytest.mark.usefixtures("folder")
def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert refused() == (
        "data needs the package pillow to read images, which is not installed; "
        "pip install 'pillow>=10'"
    )
