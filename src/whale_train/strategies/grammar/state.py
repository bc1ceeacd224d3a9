"""Read `state`: how ZeRO cuts the state of replicas among their devices."""

from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from whale_train.errors import Fault, nearest

_MODES = ("auto", "even", "memory")
_REMEDY = "use auto, even, memory, or a list such as [3, 1]"
_WHOLE = 1_000_000  # the sum of listed parts that are no whole numbers


@dataclass(frozen=True)
class StateCut:
    """How ZeRO cuts the state of replicas.

    mode: `even`: in equal parts, by DeepSpeed; `memory`: in proportion to the memory that each
        device has left beside all else; `auto`: even where that fits, else by memory; `listed`: as
        in `parts`.
    parts: the relative part of each replica.
    """

    mode: Literal["auto", "even", "memory", "listed"] = "auto"
    parts: tuple[int, ...] = ()

    @property
    def is_uneven(self) -> bool:
        """Return True if the request asks for parts of its own, even where equal ones fit."""
        return self.mode in ("memory", "listed")

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.parts))}]" if self.mode == "listed" else self.mode


AUTO = StateCut()


def read_state(value: Any, path: str, faults: list[Fault]) -> StateCut:
    """Return the content of the key `path`; `auto` where it has no value, or after adding a
    fault."""
    match value:
        case None | "auto":
            return AUTO
        case "even" | "memory":
            return StateCut(value)
        case str():
            faults.append(Fault(path, value, "is unknown", nearest(value, _MODES)))
        case [_, *_] if all(_is_part(x) for x in value) and sum(value) > 0:
            if all(isinstance(x, int) for x in value):
                return StateCut("listed", tuple(value))
            return StateCut("listed", tuple(round(_WHOLE * x / sum(value)) for x in value))
        case list():
            rule = "is no list of relative parts"
            faults.append(Fault(path, str(value), rule, "use numbers of at least 0, as [3, 1]"))
        case _:
            faults.append(Fault(path, str(value), "is not known to cut state", _REMEDY))
    return AUTO


def _is_part(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < inf
