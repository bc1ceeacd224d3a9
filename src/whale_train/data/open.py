"""List the kinds of data, and open a dataset from the options of one kind."""

from pathlib import Path
from typing import Annotated, assert_never

from pydantic import Field

from whale_train.data.dataset import Dataset
from whale_train.data.sources.arrays import ArraysOptions, open_arrays
from whale_train.data.sources.classes import ClassesOptions, open_classes
from whale_train.data.sources.custom import CustomOptions, open_custom
from whale_train.data.sources.digits import DigitsOptions, open_digits
from whale_train.data.sources.hf_dataset import HfDatasetOptions, open_hf_dataset
from whale_train.data.sources.image_folder import ImageFolderOptions, open_image_folder
from whale_train.data.sources.images import ImagesOptions, open_images
from whale_train.data.sources.text import TextOptions, open_text
from whale_train.data.sources.text_files import TextFilesOptions, open_text_files
from whale_train.data.sources.webdataset import WebdatasetOptions, open_webdataset
from whale_train.data.tokens.make_store import Watch
from whale_train.data.tokens.text_encoder import tokenizer_folder
from whale_train.errors import ConfigError

DataOptions = Annotated[
    TextOptions
    | TextFilesOptions
    | ArraysOptions
    | DigitsOptions
    | ClassesOptions
    | ImagesOptions
    | ImageFolderOptions
    | WebdatasetOptions
    | HfDatasetOptions
    | CustomOptions,
    Field(discriminator="kind"),
]


def open_dataset(options: DataOptions, watch: Watch | None = None) -> Dataset:
    """Return the dataset that `options` describe, ready to read.

    watch: called during long preparations with the bytes done and the bytes in all.

    Raises ConfigError.
    """
    match options:
        case TextOptions():
            return open_text(options)
        case TextFilesOptions():
            return open_text_files(options, watch)
        case ArraysOptions():
            return open_arrays(options)
        case DigitsOptions():
            return open_digits(options)
        case ClassesOptions():
            return open_classes(options)
        case ImagesOptions():
            return open_images(options)
        case ImageFolderOptions():
            return open_image_folder(options)
        case WebdatasetOptions():
            return open_webdataset(options)
        case HfDatasetOptions():
            return open_hf_dataset(options)
        case CustomOptions():
            return open_custom(options)
        case _:
            assert_never(options)


def tokenizer_of(options: object) -> Path | None:
    """Return the folder of the tokenizer for data with `options`, or None where the data has no
    tokenizer or its folder does not exist any more."""
    if not isinstance(options, TextFilesOptions | WebdatasetOptions) or options.tokenizer is None:
        return None
    try:
        return tokenizer_folder(options.tokenizer)
    except ConfigError:
        return None
