"""Read `callbacks` of the config: the user's own code, and what its errors do to the run."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from whale_train.errors import Fault
from whale_train.own_code import PATH
from whale_train.validation import as_yaml, validated

KEY, ON_ERROR = "callbacks", "on_error"


class CallbackOptions(BaseModel):
    """Options of a callback.

    name: the callback's name in the config.
    target: path of the callback's class, or of a function that returns a callback.
    arguments: keyword arguments of the class or function.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    target: Annotated[str, Field(pattern=PATH)]
    arguments: dict[str, Any] = Field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return the callback's key in the config."""
        return f"{KEY}.{self.name}"


class CallbacksOptions(BaseModel):
    """Options of all callbacks.

    on_error: what the run does when a callback raises: it stops, or goes on without that callback.
    listed: the callbacks, in the order in which they are called.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    on_error: Literal["stop", "go_on"] = "stop"
    listed: tuple[CallbackOptions, ...] = ()


def read_callbacks(value: object, faults: list[Fault]) -> CallbacksOptions:
    """Return the callbacks of the mapping `value`, after adding all faults of `value` to
    `faults`."""
    if not isinstance(value, Mapping):
        remedy = f"use '{KEY}={{mine: {{_target_: my_module.MyCallback}}}}'"
        faults.append(Fault(KEY, as_yaml(value), "is not a mapping", remedy))
        return CallbacksOptions()
    callbacks = []
    for name, entry in value.items():
        if name == ON_ERROR:
            continue
        if not isinstance(entry, Mapping) or not isinstance(entry.get("_target_"), str):
            remedy = f"write {KEY}.{name}._target_=my_module.MyCallback"
            faults.append(Fault(f"{KEY}.{name}", as_yaml(entry), "names no class", remedy))
            continue
        arguments = {str(key): item for key, item in entry.items() if key != "_target_"}
        given = {"name": str(name), "target": entry["_target_"], "arguments": arguments}
        wrong: list[Fault] = []
        options = validated(CallbackOptions, given, f"{KEY}.{name}", wrong)
        if wrong:
            rule, remedy = "is not the path of a class", "name one, as my_module.MyCallback"
            faults.append(Fault(f"{KEY}.{name}._target_", entry["_target_"], rule, remedy))
        else:
            callbacks.append(options)
    on_error = value.get(ON_ERROR, "stop")
    if on_error not in ("stop", "go_on"):
        key = f"{KEY}.{ON_ERROR}"
        faults.append(Fault(key, as_yaml(on_error), "is unknown", "use one of: go_on, stop"))
        on_error = "stop"
    return CallbacksOptions(on_error=on_error, listed=tuple(callbacks))
