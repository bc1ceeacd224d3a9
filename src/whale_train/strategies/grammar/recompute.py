"""Read `recompute`: which modules compute their forward again in the backward, instead of keeping
its values (activation checkpointing; Chen et al. 2016, arXiv 1604.06174)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from whale_train.errors import Fault, closest

RECOMPUTE = ("none", "full", "auto")
_FORMS = "none, full, auto, a list of modules, or {memory: 0.5}"


@dataclass(frozen=True)
class Recompute:
    """What a node of the strategy computes again.

    path: path of the key in the strategy.
    mode: `none`; `full`: every repeated block; `auto`: as many blocks as it takes to fit; `named`:
        the modules in `modules`; `memory`: as many blocks as it takes to keep at most `share`.
    modules: paths or globs of the modules.
    share: bytes that are kept for the backward, as a fraction of those without recomputation.
    """

    path: str = ""
    mode: Literal["none", "full", "auto", "named", "memory"] = "none"
    modules: tuple[str, ...] = ()
    share: float = 1.0

    @property
    def is_open(self) -> bool:
        """Return True if the planner chooses the blocks."""
        return self.mode in ("auto", "memory")

    def __str__(self) -> str:
        if self.mode == "named":
            return f"[{', '.join(self.modules)}]"
        return f"{{memory: {self.share:g}}}" if self.mode == "memory" else self.mode


NOTHING = Recompute()


def read_recompute(value: Any, path: str, faults: list[Fault]) -> Recompute | None:
    """Return the content of the key `path`; None where it has no value, or after adding a fault."""
    match value:
        case None:
            return None
        case "none" | "full" | "auto":
            return Recompute(path, value)
        case str() if value in ("", "*") or not set(value).intersection("*.?["):
            faults.append(_unknown(value, path))
        case str():
            return Recompute(path, "named", (value,))
        case list() if value and all(isinstance(x, str) and x for x in value):
            return Recompute(path, "named", tuple(value))
        case Mapping() if list(value) == ["memory"]:
            share = value["memory"]
            is_number = isinstance(share, int | float) and not isinstance(share, bool)
            if is_number and 0 <= share <= 1:
                return Recompute(path, "memory", share=float(share))
            rule = "is no fraction of the bytes that are kept without recomputation"
            faults.append(Fault(f"{path}.memory", str(share), rule, "use a number from 0 to 1"))
        case _:
            faults.append(_unknown(value, path))
    return None


def _unknown(value: Any, path: str) -> Fault:
    """Return the fault of a value of the key `path` that has none of the forms."""
    close = closest(value, RECOMPUTE) if isinstance(value, str) else None
    remedy = f"did you mean {close}? Use {_FORMS}" if close else f"use {_FORMS}"
    return Fault(path, str(value), "is no form of recomputation", remedy)
