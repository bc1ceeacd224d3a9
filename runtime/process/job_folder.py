"""The run directory of a job on each of its hosts: rank 0's, or one of the host's own.

Hosts need not share files. On one that does not see rank 0's run directory, the first rank makes
one under the same name, with what ranks read of the job in it; logs of that host are kept there.
"""

import hmac
import json
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from torch.distributed.distributed_c10d import Store

from whale_train.errors import LaunchError
from whale_train.machine.hosts import MEETING, Host
from whale_train.runtime.base.job_key import JobKey
from whale_train.runtime.failures.failure import FAILURE_FILE, write_whole
from whale_train.runtime.process.job_message import Job


@dataclass(frozen=True)
class JobFolder:
    """Rank 0's run directory, and a word in it, by which others know it from one of its name."""

    path: Path
    word: str

    @classmethod
    def made(cls, run_dir: Path) -> "JobFolder":
        """Write the word."""
        folder = cls(run_dir.absolute(), token_hex(16))
        write_whole(folder.path / MEETING, folder.word)
        return folder

    def to_json(self) -> str:
        return json.dumps({"path": str(self.path), "word": self.word})

    @classmethod
    def from_json(cls, text: str) -> "JobFolder":
        content = json.loads(text)
        return cls(Path(content["path"]), content["word"])

    @property
    def is_here(self) -> bool:
        """Whether this host shares it."""
        try:
            return hmac.compare_digest((self.path / MEETING).read_bytes(), self.word.encode())
        except OSError:
            return False


def take_place(job: Job, host: Host, rank: int, store: Store, key: JobKey) -> None:
    """Return when the run directory of `rank`, on `host`, is there. Raises LaunchError where it
    cannot be, or has something else in it than rank 0 sent."""
    if not host.shares:
        made = f"made/{host.node}"
        if rank == host.ranks[0]:
            store.set(made, key.signed(_make(job, host)))  # type: ignore[arg-type]
        error = key.checked(store.get(made), f"rank {host.ranks[0]}")
        if error:
            raise LaunchError(error)
    unlike = job.unlike()
    if unlike is not None:
        rule = f"{job.run_dir / unlike} is not on {host.name} what rank 0 sent rank {rank}"
        raise LaunchError(f"{rule}: something else writes to that directory")


def _make(job: Job, host: Host) -> str:
    """Make a host's own run directory; return why that cannot be done, '' if it is."""
    logs = job.run_dir / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        for path in (job.run_dir / FAILURE_FILE, *logs.glob("rank_*")):
            path.unlink(missing_ok=True)  # of an earlier attempt
        for name, text in job.texts.items():
            write_whole(job.run_dir / name, text)
    except OSError as error:
        rule = f"{job.run_dir} cannot be made a run directory on host {host.name}"
        remedy = "name one that every host can make, by hydra.run.dir=..."
        return f"{rule} ({error.strerror}); {remedy}"
    return ""
