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
    """The collectives or transfers of one kind that a rank issues on one group in a step.

    group: the name of the group.
    kind: the kind of operation.
    count: number of operations.
    num_bytes: bytes of all operations together.
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
    place: the place in the code where the step raised; '' where it did not raise.
    peak_bytes: bytes at the memory peak of a step, by kind of tensor.
    planned_bytes: bytes that the plan predicts for the largest of the ranks, by kind of tensor.
    traffic: the operations with other ranks in a step.
    kernels: number of runs of each kind of attention kernel.
    reads: how often the model's own code reads a value on the host, by the place in the code. Each
        read makes a GPU wait for the host.
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
        """Return the bytes at the memory peak of a step."""
        return sum(self.peak_bytes.values())

    @property
    def planned(self) -> float:
        """Return the bytes that the plan predicts for a rank."""
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
        """Return the rehearsal in the text of `rehearsal.json`. Raises pydantic.ValidationError
        where the text is not a rehearsal."""
        return _reader().validate_json(text)


@cache
def _reader() -> TypeAdapter[Rehearsal]:
    return TypeAdapter(Rehearsal)
