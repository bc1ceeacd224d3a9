"""What ranks of a job tell each other through a store that others may write to.

A rank believes what was signed with the job's key alone (docs/adr/030): the launcher makes that key
and hands it to its ranks in the environment.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from whale_train.machine.hosts import HOSTS, Host, host_of, hosts_from_json
from whale_train.runtime.base.job_key import JobKey

# All that ranks read of a job, in its run directory.
FILES = ("request.json", "plan.json", "launch.json", HOSTS)


@dataclass(frozen=True)
class Job:
    """A job as rank 0 tells it: its run directory, and the text of each of FILES."""

    run_dir: Path
    texts: Mapping[str, str]

    @classmethod
    def read(cls, run_dir: Path) -> "Job":
        """Return the job of a run directory that is ready."""
        run_dir = run_dir.absolute()
        return cls(run_dir, {name: (run_dir / name).read_text(encoding="utf-8") for name in FILES})

    def host_of(self, rank: int) -> Host:
        """Return the host that `rank` is on."""
        return host_of(hosts_from_json(self.texts[HOSTS]), rank)

    def unlike(self) -> str | None:
        """Return the first of FILES that does not hold here what rank 0 sent; None if all do."""
        for name, text in self.texts.items():
            path = self.run_dir / name
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                return name
        return None


def sealed(key: JobKey, job: Job | None) -> bytes:
    """Return a message that tells of `job`, or, of None, that there is none."""
    content = None
    if job is not None:
        content = {"run_dir": str(job.run_dir), "texts": dict(job.texts)}
    return key.signed(json.dumps(content))


def opened(key: JobKey, message: bytes) -> Job | None:
    """Return what `sealed` was given. Raises LaunchError as `JobKey.checked` does."""
    content = json.loads(key.checked(message, "rank 0"))
    return None if content is None else Job(Path(content["run_dir"]), content["texts"])
