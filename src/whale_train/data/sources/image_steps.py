"""From an encoded image to an array: decoding by PIL, the steps of a transform, normalising.

PIL is imported when the first image is read. Random steps draw from Python's generator, which is
seeded by the sample's place in the run.
"""

import io
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from whale_train.data.dataset import EvaluationSets
from whale_train.errors import ConfigError, Fault
from whale_train.extras import how_to_install
from whale_train.own_code import PATH, TargetKind, called, importable, named_function, said

EXTENSIONS = ("bmp", "gif", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp")
_AREA = (0.08, 1.0)  # of an image, that a random crop takes
_RATIO = (3 / 4, 4 / 3)  # of a random crop's width to its height
_TRIES = 10
_MEAN_AND_STD = {  # by channels: those of ImageNet, and of grey values between 0 and 1
    3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    1: ((0.5,), (0.5,)),
}
_DEEP = ("I", "F")  # beginnings of PIL's names for pixels of more than 8 bits

Transform = Callable[[Any], Any]


class OwnStep(BaseModel):
    """A step of the user's own: a class whose objects can be called, or a function."""

    model_config = ConfigDict(frozen=True, extra="allow")

    target: str = Field(alias="_target_", pattern=PATH)


Step = Literal["random_crop", "flip", "center_crop"] | OwnStep


class ImageOptions(BaseModel):
    """Options of data with images.

    transform: steps of training samples, in order: `random_crop` (a part of the image, resized),
        `flip` (left and right, of half of the images), `center_crop` (resized, and cut to a
        square), or objects of one's own; None: `random_crop`, then `flip`.
    evaluation_transform: steps of samples to evaluate; None: `center_crop`.
    image_size: height and width after a crop, in pixels.
    channels: 3 reads images as RGB, 1 as grey.
    mean: what is subtracted from the values of each channel, which are between 0 and 1; None:
        ImageNet's means, and 0.5 for grey images.
    std: what they are divided by then; None: ImageNet's, and 0.5.
    workers: processes of each rank that read samples.
    shuffle: whether epochs are permuted.
    evaluation_fraction: share of the samples that is held back.
    evaluation: evaluation sets by name, each this data with other options; None: there are none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    transform: Step | tuple[Step, ...] | None = None
    evaluation_transform: Step | tuple[Step, ...] | None = None
    image_size: int = Field(224, ge=1)
    channels: Literal[1, 3] = 3
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    workers: int = Field(1, ge=1)
    shuffle: bool = True
    evaluation_fraction: float = Field(0.0, ge=0, lt=1)
    evaluation: EvaluationSets | None = None

    @property
    def has_images(self) -> bool:
        """Return whether samples have an image."""
        return True

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return the steps of training samples."""
        given = self.transform
        return ("random_crop", "flip") if given is None else _listed(given)

    @property
    def evaluation_steps(self) -> tuple[Step, ...]:
        """Return the steps of samples to evaluate."""
        given = self.evaluation_transform
        return ("center_crop",) if given is None else _listed(given)

    def faults(self) -> list[Fault]:
        """Return the faults of options that do not go together."""
        faults = []
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) != self.channels:
                rule = f"has {len(values)} numbers for data.channels={self.channels}"
                remedy = "give one for each channel, or null"
                faults.append(Fault(f"data.{name}", str(list(values)), rule, remedy))
            elif name == "std" and values is not None and min(values) <= 0:
                rule, remedy = "divides by what is not above 0", "use numbers above 0, or null"
                faults.append(Fault("data.std", str(list(values)), rule, remedy))
        return faults


def _listed(given: Step | tuple[Step, ...]) -> tuple[Step, ...]:
    return given if isinstance(given, tuple) else (given,)


_IMAGE = TargetKind(
    "PIL.Image.Image, tensor or array",
    lambda made: made.__name__ in ("Image", "Tensor", "ndarray"),
)


@dataclass(frozen=True, eq=False)
class ImageReader:
    """Reader of images.

    steps: applied one after another to a PIL image, with the keys of the config that name them.
    channels: 3 for RGB, 1 for grey.
    mean: float32 `[channels, 1, 1]`.
    std: float32 `[channels, 1, 1]`.
    """

    steps: tuple[tuple[str, Transform], ...]
    channels: int
    mean: NDArray[np.float32]
    std: NDArray[np.float32]

    def read(self, encoded: bytes, what: Callable[[], str]) -> NDArray[Any]:
        """Return an image as `[channels, height, width]`; `what` gives its name for messages.

        An image of 8 bits that the steps leave becomes float32, normalised. Anything else that they
        make is left as it is. Raises ConfigError where it cannot be decoded, or a step raises.
        """
        value: Any = decoded(encoded, self.channels, what)
        for key, step in self.steps:
            try:
                value = step(value)
            except Exception as error:
                rule = f"raised {said(error)} for {what()}"
                raise ConfigError([Fault(key, "", rule, "correct it")]) from error
        if hasattr(value, "detach"):  # a tensor of torch
            value = value.detach().cpu().numpy()
        is_flat = hasattr(value, "getbands")  # a PIL image: [height, width, channels]
        array = np.asarray(value)
        if is_flat:
            array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
        if array.dtype != np.uint8:
            return array
        return (array.astype(np.float32) / np.float32(255) - self.mean) / self.std


def image_reader(options: ImageOptions, evaluates: bool) -> ImageReader:
    """Return the reader of the samples to train on, or of those to evaluate.

    Raises ConfigError where a step cannot be had.
    """
    key = "data.evaluation_transform" if evaluates else "data.transform"
    given = options.evaluation_transform if evaluates else options.transform
    chosen = options.evaluation_steps if evaluates else options.steps
    keys = [f"{key}[{i}]" if isinstance(given, tuple) else key for i in range(len(chosen))]
    steps = tuple(
        (name, _step(step, name, options.image_size))
        for name, step in zip(keys, chosen, strict=True)
    )
    mean, std = _MEAN_AND_STD[options.channels]
    numbers = [options.mean or mean, options.std or std]
    scale = [np.array(x, np.float32).reshape(-1, 1, 1) for x in numbers]
    return ImageReader(steps, options.channels, *scale)


def decoded(encoded: bytes, channels: int, what: Callable[[], str]) -> Any:
    """Return an image as a PIL image, in RGB or grey. Raises ConfigError where it is none."""
    image = _pil()
    try:
        with image.open(io.BytesIO(encoded)) as read:
            mode = read.mode
            if not mode.startswith(_DEEP):
                return read.convert("RGB" if channels == 3 else "L")
    except Exception as error:
        rule = f"holds {what()}, which is no image that PIL reads ({said(error)})"
        remedy = "write the file again, copy it whole, or leave it out"
        raise ConfigError([Fault("data.path", "", rule, remedy)]) from error
    rule = f"holds {what()}, with pixels of more than 8 bits (PIL's mode {mode})"
    raise ConfigError([Fault("data.path", "", rule, "save it with 8 bits a channel")])


def _pil() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        rule = "needs the package pillow to read images, which is not installed"
        raise ConfigError([Fault("data", "", rule, how_to_install("pillow"))]) from error
    return Image


def _step(step: Step, key: str, size: int) -> Transform:
    """Return one step. Raises ConfigError, with the config's `key`, where it cannot be had."""
    if not isinstance(step, OwnStep):
        own: Mapping[str, Transform] = {
            "random_crop": lambda image: _random_crop(image, size),
            "center_crop": lambda image: _center_crop(image, size),
            "flip": _flipped,
        }
        return own[step]
    return own_function(key, step, _IMAGE)


def own_function(key: str, step: OwnStep, returns: TargetKind) -> Transform:
    """Return the function or object of the user's own that `step` names under the config's `key`.

    Raises ConfigError where it cannot be had, or is a function that does not say that it returns
    something of the kind `returns`.
    """
    with importable(os.getcwd()):
        given = step.model_extra or {}
        arguments = {name: called(f"{key}.{name}", value) for name, value in given.items()}
        return named_function(key, step.target, arguments, returns)


def _random_crop(image: Any, size: int) -> Any:
    """Return a part of a PIL image, of random size, shape and place, as a square of `size`.

    Its share of the area is uniform, and the logarithm of its ratio of width to height. After
    `_TRIES` parts that the image is too small for, it is the largest square in the middle.
    """
    width, height = image.size
    for _ in range(_TRIES):
        area = width * height * random.uniform(*_AREA)
        ratio = math.exp(random.uniform(math.log(_RATIO[0]), math.log(_RATIO[1])))
        across, down = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if across <= width and down <= height:
            left, top = random.uniform(0, width - across), random.uniform(0, height - down)
            return _resized(image, size, (left, top, left + across, top + down))
    return _center_crop(image, size)


def _center_crop(image: Any, size: int) -> Any:
    """Return the largest square in the middle of a PIL image, resized to `size`."""
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return _resized(image, size, (left, top, left + side, top + side))


def _resized(image: Any, size: int, box: Sequence[float]) -> Any:
    """Return the part `box` (left, top, right, bottom) of a PIL image as a square of `size`."""
    return image.resize((size, size), _pil().Resampling.BILINEAR, box=tuple(box))


def _flipped(image: Any) -> Any:
    """Return a PIL image, half of the times mirrored left to right."""
    return image.transpose(_pil().Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image
