"""Open the named evaluation sets of a request: the training data with other options."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whale_train.data.blank_field import WithBlankField
from whale_train.data.dataset import Dataset
from whale_train.data.open import DataOptions, open_dataset
from whale_train.data.sources.classes import ClassesOptions
from whale_train.data.sources.digits import DigitsOptions
from whale_train.data.sources.image_folder import ImageFolderOptions, with_classes
from whale_train.data.sources.image_steps import ImageOptions
from whale_train.data.sources.images import ImagesOptions
from whale_train.data.stream import ENDLESS
from whale_train.data.tokens.make_store import Watch
from whale_train.errors import ConfigError, Fault, nearest
from whale_train.strategies.graph.operation_graph import InputField
from whale_train.validation import validated

KEY = "data.evaluation"
HELD_BACK = "evaluation"  # the set of held-back samples, in the names of metrics
_Unnamed = DigitsOptions | ClassesOptions | ImagesOptions  # these have no named sets
_OWN = ("kind", "evaluation", "evaluation_fraction", "shuffle")  # a set cannot change these


@dataclass(frozen=True, eq=False)
class OpenedData:
    """The data of a request.

    training: the training samples, and the samples held back from them.
    sets: further evaluation sets by name. All samples of a set are training samples of its dataset.
    """

    training: Dataset
    sets: Mapping[str, Dataset]


def open_data(
    options: DataOptions,
    watch: Watch | None = None,
    blank_labels: tuple[str, tuple[int, ...]] | None = None,
) -> OpenedData:
    """Return the data of a request, ready to read.

    watch: called during long preparations with the bytes done and the bytes in all.
    blank_labels: dtype and shape of labels of zeros that are added to all samples; None adds none.

    Raises ConfigError with all faults.
    """
    training = open_dataset(options, watch)
    sets = _sets(options, training, watch)
    if blank_labels is None:
        return OpenedData(training, sets)
    dtype, shape = blank_labels
    labels = InputField("labels", shape, dtype)
    blank = {name: WithBlankField(dataset, labels) for name, dataset in sets.items()}
    return OpenedData(WithBlankField(training, labels), blank)


def _sets(options: DataOptions, like: Dataset, watch: Watch | None) -> dict[str, Dataset]:
    """Return the evaluation sets by name. Raises ConfigError where the fields of a set differ from
    those of `like`."""
    sets: dict[str, Dataset] = {}
    faults: list[Fault] = []
    named = None if isinstance(options, _Unnamed) else options.evaluation
    for name, changes in (named or {}).items():
        try:
            sets[name] = open_dataset(_changed(options, name, changes), watch)
            faults += _unlike(name, sets[name], like)
            faults += _without_end(name, sets[name])
        except ConfigError as error:
            faults += [_of_set(name, fault) for fault in error.faults]
    if faults:
        raise ConfigError(faults)
    return sets


def _changed(options: DataOptions, name: str, changes: Mapping[str, Any]) -> DataOptions:
    """Return `options` with the changes of one set. Raises ConfigError with all faults."""
    key = f"{KEY}.{name}"
    taken = {x.alias or option for option, x in type(options).model_fields.items()} - set(_OWN)
    faults = []
    if name == HELD_BACK:
        rule = "is the name of the samples that data.evaluation_fraction holds back"
        faults.append(Fault(key, "", rule, "use another, such as valid"))
    for option in changes:
        if option in _OWN:
            remedy = nearest(option, taken)
            faults.append(Fault(f"{key}.{option}", "", "is not an option of a set", remedy))
    if isinstance(options, ImageFolderOptions):  # a set may lack a class
        options = with_classes(options)
    given = {
        **options.model_dump(mode="json", by_alias=True),
        **{"evaluation": None, "evaluation_fraction": 0.0, "shuffle": False},
    }
    if isinstance(options, ImageOptions) and options.has_images:
        own = given["evaluation_transform"]
        given["transform"] = ["center_crop"] if own is None else own
    if "sources" in given and "path" in changes:
        given["sources"] = []
    elif "sources" in changes:
        given["path"] = None
    changed = validated(type(options), {**given, **changes}, key, faults)
    if faults:
        raise ConfigError(faults)
    assert isinstance(changed, type(options))
    return changed


def _without_end(name: str, dataset: Dataset) -> list[Fault]:
    """Return a fault where a set is a stream without a length."""
    if dataset.num_samples != ENDLESS:
        return []
    rule = "is a stream without a length, and an evaluation goes through all of it"
    return [Fault(f"{KEY}.{name}", "", rule, "give its class a __len__")]


def _of_set(name: str, fault: Fault) -> Fault:
    """Return a fault of the options of a set, with the set's own key."""
    inside = fault.key.removeprefix("data.")
    key = fault.key if inside.startswith("evaluation.") else f"{KEY}.{name}.{inside}"
    return Fault(key, fault.value, fault.rule, fault.remedy)


def _unlike(name: str, dataset: Dataset, like: Dataset) -> list[Fault]:
    """Return a fault where the fields of a set differ from those of the training data `like`."""

    def described(data: Dataset) -> str:
        return ", ".join(f"{x.name} {x.dtype} {list(x.shape)}" for x in data.fields)

    if described(dataset) == described(like):
        return []
    rule = f"has samples of {described(dataset)}, and those to train on have {described(like)}"
    return [Fault(f"{KEY}.{name}", "", rule, "give both the same fields and shapes")]
