"""Turn an encoded image into an array: decoding by PIL, the steps of a transform, normalisation.

PIL is imported when the first image is read. Random steps draw from Python's global generator,
which is seeded by the sample's place in the run.
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
_AREA = (0.08, 1.0)  # the fraction of an image's area in a random crop
_RATIO = (3 / 4, 4 / 3)  # the ratio of a random crop's width to its height
_TRIES = 10
_MEAN_AND_STD = {  # by number of channels: ImageNet's, and those of grey values between 0 and 1
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

    transform: steps for training samples, in order: `random_crop` (a part of the image, resized),
        `flip` (mirrors half of the images left to right), `center_crop` (the central square,
        resized), or the user's own objects; None is `random_crop`, then `flip`.
    evaluation_transform: steps for evaluation samples; None is `center_crop`.
    image_size: height and width after a crop, in pixels.
    channels: 3 reads images as RGB, 1 as grey.
    mean: the mean to subtract from each channel, whose values are between 0 and 1; None is
        ImageNet's, or 0.5 for grey images.
    std: the standard deviation to divide each channel by; None is ImageNet's, or 0.5 for grey
        images.
    workers: processes of each rank that read samples.
    shuffle: whether epochs are permuted.
    evaluation_fraction: fraction of the samples that is held back.
    evaluation: evaluation sets by name, each this data with other options; None has none.
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
        """Return whether samples contain an image."""
        return True

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return the steps for training samples."""
        given = self.transform
        return ("random_crop", "flip") if given is None else _listed(given)

    @property
    def evaluation_steps(self) -> tuple[Step, ...]:
        """Return the steps for evaluation samples."""
        given = self.evaluation_transform
        return ("center_crop",) if given is None else _listed(given)

    def faults(self) -> list[Fault]:
        """Return the faults of options that contradict each other."""
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

    steps: functions that are applied in order to a PIL image, each with its key in the config.
    channels: 3 for RGB, 1 for grey.
    mean: float32 `[channels, 1, 1]`.
    std: float32 `[channels, 1, 1]`.
    """

    steps: tuple[tuple[str, Transform], ...]
    channels: int
    mean: NDArray[np.float32]
    std: NDArray[np.float32]

    def read(self, encoded: bytes, image_name: Callable[[], str]) -> NDArray[Any]:
        """Return an image as `[channels, height, width]`. `image_name` returns the image's name for
        messages.

        An image that still has 8 bits after the steps becomes float32 and is normalised. Any other
        result of the steps is returned unchanged. Raises ConfigError where the image cannot be
        decoded, or a step raises.
        """
        value: Any = decoded(encoded, self.channels, image_name)
        for key, step in self.steps:
            try:
                value = step(value)
            except Exception as error:
                rule = f"raised {said(error)} for {image_name()}"
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
    """Return the reader of training samples, or of evaluation samples where `evaluates`.

    Raises ConfigError where a step cannot be imported.
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


def decoded(encoded: bytes, channels: int, image_name: Callable[[], str]) -> Any:
    """Return an encoded image as a PIL image, in RGB or grey. Raises ConfigError where PIL cannot
    read it, or it has more than 8 bits a channel.

    image_name: function that returns the image's name for messages.
    """
    image = _pil()
    try:
        with image.open(io.BytesIO(encoded)) as read:
            mode = read.mode
            if not mode.startswith(_DEEP):
                return read.convert("RGB" if channels == 3 else "L")
    except Exception as error:
        rule = f"holds {image_name()}, which is no image that PIL reads ({said(error)})"
        remedy = "write the file again, copy it whole, or leave it out"
        raise ConfigError([Fault("data.path", "", rule, remedy)]) from error
    rule = f"holds {image_name()}, with pixels of more than 8 bits (PIL's mode {mode})"
    raise ConfigError([Fault("data.path", "", rule, "save it with 8 bits a channel")])


def _pil() -> Any:
    """Return the module PIL.Image. Raises ConfigError where pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        rule = "needs the package pillow to read images, which is not installed"
        raise ConfigError([Fault("data", "", rule, how_to_install("pillow"))]) from error
    return Image


def _step(step: Step, key: str, size: int) -> Transform:
    """Return a step as a function. Raises ConfigError, with the config's `key`, where it cannot be
    imported."""
    if not isinstance(step, OwnStep):
        own: Mapping[str, Transform] = {
            "random_crop": lambda image: _random_crop(image, size),
            "center_crop": lambda image: _center_crop(image, size),
            "flip": _flipped,
        }
        return own[step]
    return own_function(key, step, _IMAGE)


def own_function(key: str, step: OwnStep, returns: TargetKind) -> Transform:
    """Return the user's function or object that `step` names under the config's `key`.

    Raises ConfigError where it cannot be imported, or is a function that is not annotated to return
    something of the kind `returns`.
    """
    with importable(os.getcwd()):
        given = step.model_extra or {}
        arguments = {name: called(f"{key}.{name}", value) for name, value in given.items()}
        return named_function(key, step.target, arguments, returns)


def _random_crop(image: Any, size: int) -> Any:
    """Return a part of a PIL image, of random size, shape and place, as a square of `size` pixels.

    The part's fraction of the area is uniform, and so is the logarithm of its ratio of width to
    height. After `_TRIES` parts that do not fit into the image, the largest central square is
    taken.
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
    """Return the largest central square of a PIL image, resized to `size` pixels."""
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return _resized(image, size, (left, top, left + side, top + side))


def _resized(image: Any, size: int, box: Sequence[float]) -> Any:
    """Return the part `box` (left, top, right, bottom) of a PIL image as a square of `size`
    pixels."""
    return image.resize((size, size), _pil().Resampling.BILINEAR, box=tuple(box))


def _flipped(image: Any) -> Any:
    """Return a PIL image, mirrored left to right with probability 0.5."""
    return image.transpose(_pil().Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image
