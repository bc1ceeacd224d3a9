"""`data=image_folder`: one folder of images for each class, in ImageNet's layout.

Classes are the folders of `path`, sorted by name. The names of all files are bytes in one array,
which forked ranks share.
"""

import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from whale_train.data.dataset import Dataset, Note, RowDataset, hold_back
from whale_train.data.paths import UserPath, missing_path, path_error, unreadable
from whale_train.data.sources.image_steps import (
    EXTENSIONS,
    ImageOptions,
    ImageReader,
    image_reader,
)
from whale_train.data.sources.own_samples import Samples
from whale_train.errors import ConfigError, Fault, nearest
from whale_train.strategies.graph.operation_graph import InputField

_Name = Annotated[str, Field(min_length=1)]
_ALIKE = "end data.transform with random_crop or center_crop, or with a step that resizes"


class ImageFolderOptions(ImageOptions):
    """Options of `data=image_folder`.

    path: folder that contains one folder for each class.
    classes: names of the classes' folders, by class number; None takes all folders, by name.
    fields: names of the image and of its class among the model's forward arguments.
    """

    kind: Literal["image_folder"] = "image_folder"
    path: UserPath
    classes: tuple[_Name, ...] | None = None
    fields: tuple[_Name, _Name] = ("pixel_values", "labels")

    def faults(self) -> list[Fault]:
        """Return the faults of options that contradict each other."""
        faults = super().faults()
        if self.fields[0] == self.fields[1]:
            rule, remedy = "names image and class alike", "give them two names"
            faults.append(Fault("data.fields", ", ".join(self.fields), rule, remedy))
        return faults


def with_classes(options: ImageFolderOptions) -> ImageFolderOptions:
    """Return options that name the classes, so that other folders of images get the same numbers.

    Raises ConfigError where the folder cannot be read or contains no folders.
    """
    if options.classes is not None:
        return options
    return options.model_copy(update={"classes": tuple(_folders(options.path))})


def open_image_folder(options: ImageFolderOptions) -> Dataset:
    """Return the images with the numbers of their classes, sorted by class and then by name.

    The fields are the image, as the transform returns it, and an int64 class. Raises ConfigError
    for a folder without classes, a class without images, a file without an image's extension, a
    transform that cannot be imported, and an image that cannot be read.
    """
    faults = options.faults()
    if faults:
        raise ConfigError(faults)
    images = _listed(options)
    readers = [image_reader(options, evaluates) for evaluates in (False, True)]
    training, evaluated = (
        Samples(*("image_folder", _maker(images, reader), options.fields, None, {}), alike=_ALIKE)
        for reader in readers
    )
    count = len(images.names)
    first = np.arange(min(2, count))
    batch = training.read(first, first)
    image, label = options.fields
    fields = (
        InputField(image, batch[image].shape[1:], batch[image].dtype.name),
        InputField(label, (), "int64", len(images.classes)),
    )
    training.fields = evaluated.fields = fields
    held_back = hold_back(count, options.evaluation_fraction)
    if options.evaluation_fraction:
        evaluated.read(first, first)
    note = Note("data.path", f"{count:,} images", f"of {len(images.classes):,} classes")
    return RowDataset(
        *(fields, held_back, training.read),
        notes=(note,),
        workers=options.workers,
        read_held_back=evaluated.read,
    )


class _Images:
    """Paths and classes of images.

    path: the folder that contains the classes' folders.
    classes: names of the classes.
    names: names of the files, bytes `[n]`.
    labels: numbers of the classes, int64 `[n]`.
    """

    def __init__(
        self, path: str, classes: Sequence[str], names: Sequence[bytes], labels: Sequence[int]
    ) -> None:
        self.path, self.classes = path, classes
        self.names: NDArray[np.bytes_] = np.array(names)
        self.labels: NDArray[np.int64] = np.array(labels, np.int64)

    def file(self, number: int) -> str:
        """Return the path of image `number`."""
        folder = self.classes[self.labels[number]]
        return os.path.join(self.path, folder, os.fsdecode(bytes(self.names[number])))


class _Read:
    """Samples by number: an image, and the number of its class."""

    def __init__(self, images: _Images, reader: ImageReader) -> None:
        self._images, self._reader = images, reader

    def __len__(self) -> int:
        return len(self._images.names)

    def __getitem__(self, number: int) -> tuple[Any, np.int64]:
        file = self._images.file(number)
        try:
            with open(file, "rb") as opened:
                encoded = opened.read()
        except OSError as error:
            raise unreadable(error, file) from error
        return self._reader.read(encoded, lambda: file), self._images.labels[number]


def _maker(images: _Images, reader: ImageReader) -> Any:
    return lambda: _Read(images, reader)


def _folders(path: str) -> list[str]:
    """Return the names of the folders in `path`, sorted. Raises ConfigError where there are
    none."""
    if not os.path.exists(path):
        raise missing_path(path)
    if not os.path.isdir(path):
        raise path_error(path, "is a file, not a folder", "name a folder of a folder a class")
    try:
        with os.scandir(path) as entries:
            names = sorted(x.name for x in entries if x.is_dir() and not x.name.startswith("."))
    except OSError as error:
        raise unreadable(error, path) from error
    if not names:
        remedy = f"lay images out as {os.path.join(path, 'CLASS', 'FILE.jpg')}"
        raise path_error(path, "has no folder, and each class is a folder of images", remedy)
    return names


def _listed(options: ImageFolderOptions) -> _Images:
    """Return the images in the classes' folders. Raises ConfigError with the first fault of a
    folder."""
    present = _folders(options.path)
    classes = options.classes or tuple(present)
    strange = [name for name in present if name not in set(classes)]
    if strange:
        rule = f"has a folder {strange[0]}, which is none of data.classes"
        raise path_error(options.path, rule, nearest(strange[0], classes))
    names: list[bytes] = []
    labels: list[int] = []
    for number, name in enumerate(classes):
        if name in present:
            files = _images_in(os.path.join(options.path, name), options.path)
            names += map(os.fsencode, files)
            labels += [number] * len(files)
    return _Images(options.path, classes, names, labels)


def _images_in(folder: str, path: str) -> list[str]:
    """Return the names of the images of a class, sorted, without hidden files. Raises ConfigError
    for a folder or a file of another kind inside, and where there is no image."""
    try:
        with os.scandir(folder) as entries:
            inside = [(x.name, x.is_dir()) for x in entries if not x.name.startswith(".")]
    except OSError as error:
        raise unreadable(error, folder) from error
    for name, is_folder in sorted(inside):
        if is_folder:
            rule = f"is a class of data.path={path}, and holds a folder {name}"
            remedy = f"use data.path={folder} if its folders are the classes (and 'data.evaluation="
            remedy += "{val: {path: ...}}' for others beside it)"
            raise ConfigError([Fault("data.path", folder, rule, remedy)])
        if os.path.splitext(name)[1][1:].lower() not in EXTENSIONS:
            rule = f"is no image by its name ({', '.join(EXTENSIONS)})"
            remedy = "convert it, or take it away"
            raise path_error(os.path.join(folder, name), rule, remedy)
    if not inside:
        remedy = "put images there, or take the folder away"
        raise path_error(folder, "is a class without an image", remedy)
    return sorted(name for name, _ in inside)
