"""What a rehearsal came to, as `rehearsal.json` has it: written by the process that rehearses, read
by the command that asked for it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter

FILE = "rehearsal.json"


@dataclass(frozen=True)
class Traffic:
    """Operations of one kind on a group of that name: how many, and their bytes."""

    group: str
    kind: str
    count: int
    num_bytes: int


@dataclass(frozen=True)
class KindOfRank:
    """Ranks that do the same: `rank` was rehearsed for all of `ranks`.

    `error` is what its step raised, and `place` where ('' if nothing). `peak_bytes` are those of
    the worst moment of a step, by what holds them, and `planned_bytes` the plan's, of the largest
    of the ranks. `kernels` says how often each kind of attention kernel ran, `reads` how
    often the model's own code reads a value on the host, by where: a GPU waits for the host there.
    """

    rank: int
    ranks: tuple[int, ...]
    task_graphs: tuple[str, ...]
    error: str
    place: str
    peak_bytes: Mapping[str, int]
    planned_bytes: Mapping[str, float]
    traffic: tuple[Traffic, ...]
    kernels: Mapping[str, int]
    reads: Mapping[str, int]
    operations: int
    seconds: float

    @property
    def peak(self) -> int:
        """The bytes of the worst moment."""
        return sum(self.peak_bytes.values())

    @property
    def planned(self) -> float:
        """The bytes that the plan says it needs."""
        return sum(self.planned_bytes.values())


@dataclass(frozen=True)
class Rehearsal:
    """All kinds of rank, and what is wrong between ranks (`faults`)."""

    kinds: tuple[KindOfRank, ...]
    faults: tuple[str, ...]
    seconds: float

    @property
    def is_clean(self) -> bool:
        """Whether every rank runs, and all agree."""
        return not self.faults and not any(kind.error for kind in self.kinds)

    def to_mapping(self) -> dict[str, Any]:
        """Return what JSON has of it."""
        return {"is_clean": self.is_clean, **asdict(self)}

    @classmethod
    def from_json(cls, text: str) -> "Rehearsal":
        return _reader().validate_json(text)


@cache
def _reader() -> TypeAdapter[Rehearsal]:
    return TypeAdapter(Rehearsal)
