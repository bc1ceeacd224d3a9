"""The logical workers of a plan: who runs which, and how far the bits of a run are promised."""

from dataclasses import dataclass
from typing import Literal

# The levels of EasyScale (arXiv 2208.14228, section 3.3) are D0 for `fixed_devices` and D1 for
# `elastic`. Nothing here promises D2, the same bits on unlike devices.
Level = Literal["none", "fixed_devices", "elastic"]


@dataclass(frozen=True)
class LogicalWorkers:
    """The logical workers of a step, each with an equal part of the global batch.

    count: number of logical workers, whatever the number of ranks.
    of_ranks: numbers of each rank's workers, in the order in which it runs them.
    level: what is promised of the bits of the trained parameters. `elastic`: they are the same on
        any number of devices of the plan's kind. `fixed_devices`: they are the same each time on
        the plan's devices. `none`: they may differ from run to run.
    stops: operations that keep the plan from the next level.
    buffers: paths of the buffers that the forward writes, of which every worker has its own.
    """

    count: int
    of_ranks: tuple[tuple[int, ...], ...]
    level: Level
    stops: tuple[str, ...]
    buffers: tuple[str, ...]

    @property
    def rounds(self) -> int:
        """Return the most workers that one rank runs in a step."""
        return max(map(len, self.of_ranks))
