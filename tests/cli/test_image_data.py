"""`data=image_folder` and `data=webdataset` on the command line: refusals, word for word."""

import io
import shlex
import tarfile
from pathlib import Path

import pytest
from tests.cli.command import whale_train

PLAN = ("mode=plan", "model=image_classifier", "model.channels=3", "hardware=cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "cat" / "a.jpg.part").write_text("")
    for name, mode in (("plain", "w"), ("packed", "w:gz")):
        with tarfile.open(tmp_path / f"{name}.tar", mode) as tar:
            for member in ("000.cls", "001.cls"):
                info = tarfile.TarInfo(member)
                info.size = 2
                tar.addfile(info, io.BytesIO(b"12"))
    return tmp_path


REFUSED = {
    "a file that is no image": (
        "data=image_folder data.path=photos",
        "data.path={here}/photos/cat/a.jpg.part is no image by its name (bmp, gif, jpeg, jpg, pgm, "
        "png, ppm, tif, tiff, webp); convert it, or take it away",
    ),
    "a compressed tar": (
        "data=webdataset data.cache=cache data.path=packed.tar",
        "data.path={here}/packed.tar is compressed, and samples are read at their places in a tar; "
        "unpack it with gunzip (images are compressed already)",
    ),
    "a field that is missing": (
        "data=webdataset data.cache=cache data.path=plain.tar",
        "data.fields.pixel_values=jpg or jpeg or png or webp is missing in sample 000 of "
        "{here}/plain.tar, which has cls; name what all samples have, or write the shard again "
        "with the members of each sample one after another",
    ),
    "a pickle": (
        "data=webdataset data.cache=cache data.path=plain.tar "
        "'data.fields={pixel_values: pth, labels: cls}'",
        "data.fields.pixel_values=pth is a pickle, which runs what is in it; save arrays as npy, "
        "or images as png",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, folder: Path) -> None:
    command, expected = REFUSED[name]
    given = shlex.split(command)
    answer = whale_train([*PLAN, *given], folder)
    assert answer.status == 2
    assert " ".join(answer.stderr.split()) == f"error: {expected.format(here=folder)}"


def test_a_class_that_the_model_lacks_is_found_in_the_index(folder: Path) -> None:
    given = ("model=custom", "model._target_=net.Net", "data=webdataset", "data.path=plain.tar")
    (folder / "net.py").write_text(NET)
    more = ("data.fields={labels: cls, x: cls}", "data.cache=cache", "model.loss=cross_entropy")
    answer = whale_train(["mode=plan", "hardware=cpu", *given, *more], folder)
    assert answer.status == 2
    assert " ".join(answer.stderr.split()) == (
        "error: data=webdataset has labels up to 12, and the model has 4 classes; use a model with "
        "at least 13 classes, or other data"
    )


NET = """import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(1, 4)

    def forward(self, x):
        return self.head(x[:, None].float())
"""
