"""Digits, generated classes and images, and the config files of every kind."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError

from whale_train.data.open import DataOptions, open_dataset
from whale_train.data.order import step_indices
from whale_train.data.permutation import permute
from whale_train.data.random_bits import stream_key
from whale_train.data.sources.classes import ClassesOptions, balanced_labels
from whale_train.data.sources.digits import DigitsOptions
from whale_train.data.sources.images import ImagesOptions
from whale_train.strategies.graph.operation_graph import InputField

CONFIGS = sorted((Path(__file__).parents[2] / "conf" / "data").glob("*.yaml"))


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    dataset = open_dataset(DigitsOptions())
    assert dataset.fields == (
        InputField("pixel_values", (1, 8, 8), "float32"),
        InputField("labels", (), "int64", 10),
    )
    assert (dataset.num_samples, dataset.num_evaluation_samples) == (1438, 359)
    training = dataset.samples(np.arange(1438))
    held = dataset.evaluation_samples(np.arange(359))
    pixels = np.concatenate([training["pixel_values"], held["pixel_values"]])
    labels = np.concatenate([training["labels"], held["labels"]])
    assert pixels.shape == (1797, 1, 8, 8)
    assert (pixels.dtype.name, labels.dtype.name) == ("float32", "int64")
    assert (pixels.min(), pixels.max()) == (0, 1)
    seen = sorted((tuple(p), n) for p, n in zip(pixels.reshape(1797, 64) * 16, labels, strict=True))
    expected = zip(*load_digits(return_X_y=True), strict=True)
    assert seen == sorted((tuple(p), n) for p, n in expected)


def test_digits_held_back_are_of_all_classes() -> None:
    held = open_dataset(DigitsOptions()).evaluation_samples(np.arange(359))
    assert np.bincount(held["labels"], minlength=10).min() > 15


def test_classes_have_their_fields_and_sizes() -> None:
    options = ClassesOptions(num_classes=50, num_features=8, num_samples=1000)
    dataset = open_dataset(options)
    assert dataset.fields == (
        InputField("features", (8,), "float32"),
        InputField("labels", (), "int64", 50),
    )
    assert (dataset.num_samples, dataset.num_evaluation_samples) == (1000, 10)
    batch = dataset.samples(np.arange(7))
    assert (batch["features"].shape, batch["features"].dtype.name) == ((7, 8), "float32")
    assert (batch["labels"].shape, batch["labels"].dtype.name) == ((7,), "int64")


@pytest.mark.parametrize(("num_classes", "num_samples"), [(10, 1000), (7, 100), (100, 100)])
def test_all_classes_occur_equally_often(num_classes: int, num_samples: int) -> None:
    dataset = open_dataset(ClassesOptions(num_classes=num_classes, num_samples=num_samples))
    labels = dataset.samples(np.arange(num_samples))["labels"]
    counts = np.bincount(labels, minlength=num_classes)
    assert len(counts) == num_classes
    assert counts.max() - counts.min() <= 1
    assert (np.diff(labels) < 0).any()


@pytest.mark.parametrize("num_classes", [10, 999_999, 10**11 + 1, 10**12])
def test_labels_are_those_of_whole_numbers_without_a_limit(num_classes: int) -> None:
    num_samples, key = 10**9, stream_key("labels", 0)
    indices = np.arange(200)
    exact = [
        int(place) * num_classes // num_samples for place in permute(indices, num_samples, key)
    ]
    assert balanced_labels(indices, num_samples, num_classes, key).tolist() == exact


def test_few_samples_of_a_million_classes_are_spread_over_all_of_them() -> None:
    dataset = open_dataset(ClassesOptions(num_classes=1_000_000, num_samples=1000))
    labels = np.sort(dataset.samples(np.arange(1000))["labels"])
    assert np.diff(labels).tolist() == [1000] * 999


def test_classes_can_be_learnt_and_evaluation_is_of_the_same_classes() -> None:
    options = ClassesOptions(num_classes=20, num_samples=2000, evaluation_fraction=0.5)
    dataset = open_dataset(options)
    training = dataset.samples(np.arange(2000))
    held = dataset.evaluation_samples(np.arange(1000))
    means = np.stack([training["features"][training["labels"] == c].mean(0) for c in range(20)])
    distances = ((held["features"][:, None] - means) ** 2).sum(-1)
    assert (distances.argmin(1) == held["labels"]).all()
    assert np.abs(means.std() - 1) < 0.05
    residual = training["features"] - means[training["labels"]]
    assert np.abs(residual.std() - 0.5) < 0.02
    first_of_class = training["features"][training["labels"] == 0]
    assert not (held["features"][:, None] == first_of_class).all(-1).any()


def test_a_sample_does_not_depend_on_its_batch() -> None:
    dataset = open_dataset(ClassesOptions())
    together = dataset.samples(np.array([999_999, 5, 123]))
    alone = dataset.samples(np.array([123]))
    for name, array in alone.items():
        assert array[0].tolist() == together[name][2].tolist()


def test_equal_seeds_give_equal_batches_and_others_do_not() -> None:
    def batch(data_seed: int, seed: int) -> dict[str, np.ndarray]:
        dataset = open_dataset(ClassesOptions(seed=data_seed))
        return dataset.samples(step_indices(dataset.num_samples, 16, 3, seed, True))

    reference, again = batch(0, 0), batch(0, 0)
    for name in ("features", "labels"):
        np.testing.assert_array_equal(reference[name], again[name])
        assert (batch(0, 1)[name] != reference[name]).any()
        assert (batch(1, 0)[name] != reference[name]).any()


def test_classes_stay_what_they_are() -> None:
    """Golden: these samples are the same in every version and on every machine."""
    batch = open_dataset(ClassesOptions(num_features=3)).samples(np.array([0, 1]))
    assert batch["labels"].tolist() == [830, 218]
    np.testing.assert_allclose(
        batch["features"],
        [[0.906766, -2.241417, 2.7904], [-2.371963, 0.86999, 0.041507]],
        atol=1e-5,
    )


def test_images_have_their_fields_and_sizes() -> None:
    options = ImagesOptions(num_classes=50, channels=2, size=10, num_samples=1000)
    dataset = open_dataset(options)
    assert dataset.fields == (
        InputField("pixel_values", (2, 10, 10), "float32"),
        InputField("labels", (), "int64", 50),
    )
    assert (dataset.num_samples, dataset.num_evaluation_samples) == (1000, 10)
    batch = dataset.samples(np.arange(7))
    assert (batch["pixel_values"].shape, batch["pixel_values"].dtype.name) == (
        (7, 2, 10, 10),
        "float32",
    )
    counts = np.bincount(dataset.samples(np.arange(1000))["labels"], minlength=50)
    assert counts.tolist() == [20] * 50


def test_images_are_their_class_and_noise_and_do_not_depend_on_their_batch() -> None:
    options = ImagesOptions(num_classes=8, size=9, num_samples=800, evaluation_fraction=0.1)
    dataset = open_dataset(options)
    training, held = dataset.samples(np.arange(800)), dataset.evaluation_samples(np.arange(80))
    images, labels = training["pixel_values"], training["labels"]
    means = np.stack([images[labels == c].mean(0) for c in range(8)])
    distances = ((held["pixel_values"][:, None] - means) ** 2).sum((2, 3, 4))
    assert (distances.argmin(1) == held["labels"]).all()
    assert np.abs((images - means[labels]).std() - 0.5) < 0.02
    # Pixels of one patch are alike, but for what is left of the noise in a mean of a hundred.
    assert np.abs(means[:, :, 0, 0] - means[:, :, 1, 1]).max() < 0.4
    alone = dataset.samples(np.array([123]))["pixel_values"]
    assert alone.tolist() == dataset.samples(np.array([5, 123]))["pixel_values"][1:].tolist()
    other = open_dataset(options.model_copy(update={"seed": 1}))
    assert (other.samples(np.array([123]))["pixel_values"] != alone).any()


_REQUIRED = {"path": "/data", "_target_": "my_data.Mine"}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_config_files_spell_out_the_options_defaults(config: Path) -> None:
    loaded = OmegaConf.load(config)
    written: Any = OmegaConf.to_container(OmegaConf.create({"data": loaded}), resolve=True)
    written = written["data"]
    required = {key: text for key, text in _REQUIRED.items() if written.get(key) == "???"}
    written |= required
    options = TypeAdapter(DataOptions).validate_python(written)
    assert options.kind == config.stem
    dumped = options.model_dump(mode="json", by_alias=True)
    assert dumped == written | ({"arguments": {}} if config.stem == "custom" else {})
    assert type(options)(**required) == options


def test_there_is_a_config_file_for_each_kind() -> None:
    assert [config.stem for config in CONFIGS] == [
        "arrays",
        "classes",
        "custom",
        "digits",
        "hf_dataset",
        "image_folder",
        "images",
        "text",
        "text_files",
        "webdataset",
    ]


def test_the_number_of_classes_follows_the_model() -> None:
    data = OmegaConf.load(next(config for config in CONFIGS if config.stem == "classes"))
    composed = OmegaConf.create({"model": {"num_classes": 77}, "data": data})
    assert composed.data.num_classes == 77


def test_images_follow_the_model() -> None:
    data = OmegaConf.load(next(config for config in CONFIGS if config.stem == "images"))
    ours = OmegaConf.create({"model": {"num_classes": 77, "channels": 1}, "data": data})
    assert (ours.data.num_classes, ours.data.channels, ours.data.size) == (77, 1, 224)
    theirs = {"config": {"num_labels": 5, "image_size": 32}}
    hugging_face = OmegaConf.create({"model": theirs, "data": data})
    assert (hugging_face.data.num_classes, hugging_face.data.size) == (5, 32)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "text", "evaluation_fraction": 1.0},
        {"kind": "classes", "num_classes": 10**12 + 1},
        {"kind": "digits", "path": "x"},
        {"kind": "arrays"},
        {"kind": "images", "size": 0},
        {"kind": "pictures"},
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(DataOptions).validate_python(wrong)
