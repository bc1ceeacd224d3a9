"""Run the ranks of one bundle on its Ray node: the class of the actors of `launcher=ray`.

Nothing here imports Ray. An actor runs its methods one after another in the main thread of a
process, so that the ranks, which end with the thread that started them, end with the actor.
"""

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from whale_train.launcher.ranks.host_agent import HostReport, RankRequest, look
from whale_train.launcher.ranks.host_ranks import HostRanks, Start


@dataclass(frozen=True)
class News:
    """What ranks have printed since the last call, and whether they have ended.

    out, err: new bytes of the ranks' standard output and standard error.
    status: the exit status once all ranks have ended, as of `HostRanks.poll`; None before.
    """

    out: bytes
    err: bytes
    status: int | None


class NodeRanks:
    """The ranks of a bundle. Each rank's output is kept in files until it is fetched."""

    def __init__(self) -> None:
        self._ranks: HostRanks | None = None
        self._outputs: list[tuple[int, int]] = []
        self._read: dict[int, int] = {}

    def look(
        self, wanted: RankRequest, folder: str, variables: Mapping[str, str]
    ) -> HostReport | str:
        """Go to the folder of the command, and return the report of this host, or what it lacks.

        wanted: the paths and the modules that ranks need.
        folder: the working directory of the command.
        variables: variables of the command's environment that ranks need to find modules.
        """
        try:
            os.chdir(folder)
        except OSError:
            return f"the directory {folder}"
        os.environ.update(variables)
        places = variables.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [place for place in (folder, *places) if place and place not in sys.path]
        return look(wanted)

    def start(self, start: Start) -> None:
        """Start the ranks."""
        for _ in start.ranks:
            self._outputs.append((_nameless_file(), _nameless_file()))
        self._ranks = HostRanks(start, outputs=self._outputs)

    def news(self) -> News:
        """Return the output and the status since the last call."""
        assert self._ranks is not None
        status = self._ranks.poll()  # before the output, so that none follows the status
        out = b"".join(self._new(out, status) for out, _ in self._outputs)
        err = b"".join(self._new(err, status) for _, err in self._outputs)
        return News(out, err, status)

    def end(self, leave_s: float) -> None:
        """Ask the ranks to save, if they can, and to end. They are killed after `leave_s`
        seconds."""
        if self._ranks is not None:
            self._ranks.end(leave_s)

    def _new(self, file: int, status: int | None) -> bytes:
        """Return the whole lines of a file that were not returned before; with a status, all that
        was not."""
        at = self._read.get(file, 0)
        new = os.pread(file, os.fstat(file).st_size - at, at)
        if status is None:
            new = new[: new.rfind(b"\n") + 1]
        self._read[file] = at + len(new)
        return new


def _nameless_file() -> int:
    """Return the descriptor of a new file that no folder lists, and that ends with its last
    descriptor."""
    file, name = tempfile.mkstemp()
    os.unlink(name)
    return file
