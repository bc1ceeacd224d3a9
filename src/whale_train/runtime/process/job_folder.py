"""Give each host of a job a run directory: rank 0's, or one of the host's own.

Hosts need not share files. On a host that does not see rank 0's run directory, the host's first
rank makes a directory of the same name, with the files that ranks read. It also gets the logs of
the host's ranks.
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
    """The run directory of rank 0, identified by a random word in a file.

    path: the absolute path of the directory.
    word: the content of its file MEETING.
    """

    path: Path
    word: str

    @classmethod
    def made(cls, run_dir: Path) -> "JobFolder":
        """Write a new word into `run_dir`, and return its folder."""
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
        """Return True if this host sees the same directory."""
        try:
            return hmac.compare_digest((self.path / MEETING).read_bytes(), self.word.encode())
        except OSError:
            return False


def take_place(job: Job, host: Host, rank: int, store: Store, key: JobKey) -> None:
    """Wait until the run directory of `rank`, on `host`, exists.

    On a host that does not share rank 0's files, the host's first rank makes the directory. Raises
    LaunchError where it cannot be made, or where its files differ from those that rank 0 sent.
    """
    if not host.shares:
        name = f"made/{host.node}"
        if rank == host.ranks[0]:
            store.set(name, key.signed(_make(job, host)))  # type: ignore[arg-type]
        error = key.checked(store.get(name), f"rank {host.ranks[0]}")
        if error:
            raise LaunchError(error)
    unlike = job.unlike()
    if unlike is not None:
        rule = f"{job.run_dir / unlike} is not on {host.name} what rank 0 sent rank {rank}"
        raise LaunchError(f"{rule}: something else writes to that directory")


def _make(job: Job, host: Host) -> str:
    """Make the host's own run directory; return the reason of a failure, or ''."""
    logs = job.run_dir / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        for path in (job.run_dir / FAILURE_FILE, *logs.glob("rank_*")):
            path.unlink(missing_ok=True)  # left by an earlier attempt
        for name, text in job.texts.items():
            write_whole(job.run_dir / name, text)
    except OSError as error:
        rule = f"{job.run_dir} cannot be made a run directory on host {host.name}"
        remedy = "name one that every host can make, by hydra.run.dir=..."
        return f"{rule} ({error.strerror}); {remedy}"
    return ""
