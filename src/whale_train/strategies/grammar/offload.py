"""Read `offload` of a replicate: which state and which activations are kept on the host."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from whale_train.errors import Fault, nearest

OFFLOAD = ("none", "cpu", "auto")
WHERE_POSSIBLE = "where possible"  # `auto` for models whose blocks can send their activations
_KEYS = ("optimizer", "parameters", "activations")


@dataclass(frozen=True)
class Offload:
    """What replicas keep on their hosts: each of the three `cpu`, `none`, or `auto` (the planner
    chooses).

    optimizer: place of the optimizer's state.
    parameters: place of the parameters.
    activations: place of what blocks save for their backward; None: what a node around it says;
        `WHERE_POSSIBLE`: `auto`, or `none` for a model that has no such blocks.
    """

    optimizer: str = "none"
    parameters: str = "none"
    activations: str | None = None


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
    places = {key: _place(value, path, key, faults) for key in _KEYS}
    optimizer, parameters = places["optimizer"], places["parameters"]
    if zero == 0 and optimizer == "cpu":
        rule = "needs ZeRO: the copies' optimizer state is only moved once it is partitioned"
        remedy = f"use {path.removesuffix('offload')}zero=1, 2 or 3"
        faults.append(Fault(f"{path}.optimizer", optimizer, rule, remedy))
    if zero != 3 and parameters == "cpu":
        rule = "needs ZeRO 3: only partitioned parameters can live elsewhere"
        remedy = f"use {path.removesuffix('offload')}zero=3"
        faults.append(Fault(f"{path}.parameters", parameters, rule, remedy))
    return Offload(optimizer, parameters, places["activations"] if "activations" in value else None)


def _place(given: Mapping[str, Any], path: str, key: str, faults: list[Fault]) -> str:
    """Return the value of `key`; `none` where it is missing or, after a fault, unknown."""
    value = given.get(key, "none")
    if value in OFFLOAD:
        return cast(str, value)
    text = "null" if value is None else str(value)
    faults.append(Fault(f"{path}.{key}", text, "is unknown", nearest(text, OFFLOAD)))
    return "none"
