"""Read `offload` of a replicate: which state and which activations are kept on the host."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from whale_train.errors import Fault, nearest

OFFLOAD = ("none", "cpu", "nvme", "auto")
ACTIVATIONS = ("none", "cpu", "auto")
WHERE_POSSIBLE = "where possible"  # `auto` for models whose blocks can send their activations
_STATES = ("optimizer", "parameters", "activations")
_KEYS = (*_STATES, "path")


@dataclass(frozen=True)
class Offload:
    """What replicas keep on their hosts: each of the three `cpu`, `none`, or `auto` (the planner
    chooses). State may be in files (`nvme`); the planner chooses that where `path` is given.

    optimizer: place of the optimizer's state.
    parameters: place of the parameters.
    activations: place of what blocks save for their backward; None: what a node around it says;
        `WHERE_POSSIBLE`: `auto`, or `none` for a model that has no such blocks.
    path: folder for the files; None: there are none.
    """

    optimizer: str = "none"
    parameters: str = "none"
    activations: str | None = None
    path: str | None = None


def read_offload(value: Any, path: str, zero: int, faults: list[Fault]) -> Offload:
    """Return the content of the key `path` of replicas under ZeRO stage `zero`.

    `auto` alone is `auto` for all three. A fault is added for every value that has no meaning; it
    then reads as `none`.
    """
    if value is None:
        return Offload()
    if value == "auto":
        return Offload("auto", "auto", WHERE_POSSIBLE)
    if not isinstance(value, Mapping):
        remedy = "use auto, or {optimizer: cpu, parameters: none}"
        faults.append(Fault(path, str(value), "is not a mapping", remedy))
        return Offload()
    for key in value:
        if key not in _KEYS:
            remedy = nearest(str(key), _KEYS)
            faults.append(Fault(f"{path}.{key}", "", "is not a key here", remedy))
    places = {key: _place(value, path, key, faults) for key in _STATES}
    optimizer, parameters = places["optimizer"], places["parameters"]
    if zero == 0 and optimizer == "cpu":
        rule = "needs ZeRO: the copies' optimizer state is only moved once it is partitioned"
        remedy = f"use {path.removesuffix('offload')}zero=1, 2 or 3"
        faults.append(Fault(f"{path}.optimizer", optimizer, rule, remedy))
    if zero != 3 and optimizer == "nvme":
        # DeepSpeed 0.19.8 keeps it in memory at stages 1 and 2, and says nothing.
        rule = "needs ZeRO 3: DeepSpeed writes no other stage's state to files"
        remedy = f"use {path.removesuffix('offload')}zero=3"
        faults.append(Fault(f"{path}.optimizer", optimizer, rule, remedy))
    if zero != 3 and parameters in ("cpu", "nvme"):
        rule = "needs ZeRO 3: only partitioned parameters can live elsewhere"
        remedy = f"use {path.removesuffix('offload')}zero=3"
        faults.append(Fault(f"{path}.parameters", parameters, rule, remedy))
    if parameters == "nvme" and optimizer not in ("cpu", "nvme"):
        rule = "needs the optimizer off the device as well, whose values weights are written from"
        faults.append(Fault(f"{path}.parameters", "nvme", rule, f"use {path}.optimizer=nvme"))
    folder = _folder(value, path, (optimizer, parameters), faults)
    activations = places["activations"] if "activations" in value else None
    return Offload(optimizer, parameters, activations, folder)


def _folder(
    given: Mapping[str, Any], path: str, places: Collection[str], faults: list[Fault]
) -> str | None:
    """Return the value of `path`, which must be given where one of `places` is `nvme`, and only
    where one is `nvme` or `auto`."""
    key, folder = f"{path}.path", given.get("path")
    if folder is None:
        if "nvme" in places:
            remedy = "give a folder of a local disk, as /nvme/scratch"
            faults.append(Fault(key, "", "is missing, and state is on NVMe", remedy))
        return None
    if not isinstance(folder, str) or not folder.startswith("/"):
        remedy = "use one as /nvme/scratch"
        faults.append(Fault(key, str(folder), "is not the absolute path of a folder", remedy))
    elif "nvme" not in places and "auto" not in places:
        remedy = f"remove it, or use {path}.optimizer=nvme"
        faults.append(
            Fault(key, folder, "is a folder for state on NVMe, and none is there", remedy)
        )
    else:
        return folder
    return None


def _place(given: Mapping[str, Any], path: str, key: str, faults: list[Fault]) -> str:
    """Return the value of `key`; `none` where it is missing or, after a fault, unknown."""
    value = given.get(key, "none")
    choices = ACTIVATIONS if key == "activations" else OFFLOAD
    if value in choices:
        return cast(str, value)
    text = "null" if value is None else str(value)
    faults.append(Fault(f"{path}.{key}", text, "is unknown", nearest(text, choices)))
    return "none"
