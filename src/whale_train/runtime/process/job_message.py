"""Sign and check the messages of a job's ranks in a store that others may write to.

A rank believes only messages that are signed with the job's key (docs/adr/030). The launcher makes
the key and hands it to its ranks in the environment.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from whale_train.machine.hosts import HOSTS, Host, host_of, hosts_from_json
from whale_train.runtime.base.job_key import JobKey

# Every file of the run directory that ranks read.
FILES = ("request.json", "plan.json", "launch.json", HOSTS)


@dataclass(frozen=True)
class Job:
    """A job as rank 0 sends it.

    run_dir: the absolute path of the run directory.
    texts: the text of each of FILES.
    """

    run_dir: Path
    texts: Mapping[str, str]

    @classmethod
    def read(cls, run_dir: Path) -> "Job":
        """Return the job of the run directory `run_dir`, which must be ready."""
        run_dir = run_dir.absolute()
        return cls(run_dir, {name: (run_dir / name).read_text(encoding="utf-8") for name in FILES})

    def host_of(self, rank: int) -> Host:
        """Return the host that `rank` is on."""
        return host_of(hosts_from_json(self.texts[HOSTS]), rank)

    def unlike(self) -> str | None:
        """Return the first of FILES that differs on this host from rank 0's, or None."""
        for name, text in self.texts.items():
            path = self.run_dir / name
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                return name
        return None


def sealed(key: JobKey, job: Job | None) -> bytes:
    """Return a signed message with `job`; None stands for no job."""
    content = None
    if job is not None:
        content = {"run_dir": str(job.run_dir), "texts": dict(job.texts)}
    return key.signed(json.dumps(content))


def opened(key: JobKey, message: bytes) -> Job | None:
    """Return the job in a message of `sealed`, or None. Raises LaunchError as `JobKey.checked`
    does."""
    content = json.loads(key.checked(message, "rank 0"))
    return None if content is None else Job(Path(content["run_dir"]), content["texts"])
