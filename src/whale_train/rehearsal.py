"""Define the content of `rehearsal.json`.

The process that rehearses writes the file, and the command that asked for it reads it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter

FILE = "rehearsal.json"


@dataclass(frozen=True)
class GroupTraffic:
    """The operations of one kind that a rank asks for, on one group, in a step.

    group: the name of the group.
    kind: the kind of operation.
    count: number of operations.
    num_bytes: bytes of all of them.
    """

    group: str
    kind: str
    count: int
    num_bytes: int


@dataclass(frozen=True)
class KindOfRank:
    """Ranks that do the same. One of them was rehearsed for all.

    rank: the rank that was rehearsed.
    ranks: the ranks of the kind.
    task_graphs: the names of the TaskGraphs that they hold.
    error: the error that the step raised; '' where it raised none.
    place: the place of that error; '' likewise.
    peak_bytes: bytes at the worst moment of a step, by what holds them.
    planned_bytes: the plan's bytes, likewise, of the largest of the ranks.
    traffic: the operations with other ranks in a step.
    kernels: how often each kind of attention kernel ran.
    reads: how often the model's own code reads a value on the host, by the place in the code. A GPU
        waits for the host there.
    operations: number of operations that were run.
    seconds: the time that the rehearsal of this kind took, in seconds.
    """

    rank: int
    ranks: tuple[int, ...]
    task_graphs: tuple[str, ...]
    error: str
    place: str
    peak_bytes: Mapping[str, int]
    planned_bytes: Mapping[str, float]
    traffic: tuple[GroupTraffic, ...]
    kernels: Mapping[str, int]
    reads: Mapping[str, int]
    operations: int
    seconds: float

    @property
    def peak(self) -> int:
        """Return the bytes at the worst moment of a step."""
        return sum(self.peak_bytes.values())

    @property
    def planned(self) -> float:
        """Return the bytes that the plan says a rank needs."""
        return sum(self.planned_bytes.values())


@dataclass(frozen=True)
class Rehearsal:
    """The outcome of a rehearsal.

    kinds: all kinds of rank.
    faults: disagreements between ranks.
    seconds: the time that the whole rehearsal took, in seconds.
    """

    kinds: tuple[KindOfRank, ...]
    faults: tuple[str, ...]
    seconds: float

    @property
    def is_clean(self) -> bool:
        """Return whether every rank runs, and all ranks agree."""
        return not self.faults and not any(kind.error for kind in self.kinds)

    def to_mapping(self) -> dict[str, Any]:
        """Return the content of `rehearsal.json`."""
        return {"is_clean": self.is_clean, **asdict(self)}

    @classmethod
    def from_json(cls, text: str) -> "Rehearsal":
        """Return the rehearsal in the text of `rehearsal.json`. Raises pydantic's ValidationError
        where it is none."""
        return _reader().validate_json(text)


@cache
def _reader() -> TypeAdapter[Rehearsal]:
    return TypeAdapter(Rehearsal)
