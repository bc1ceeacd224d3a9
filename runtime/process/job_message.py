"""What ranks of a job tell each other through a store that others may write to.

A rank believes what was signed with the job's key alone (docs/adr/030): the launcher makes that key
and hands it to its ranks in the environment.
"""

import hmac
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from whale_train.errors import LaunchError
from whale_train.hosts import HOSTS, Host, host_of, hosts_from_json

KEY = "WHALE_TRAIN_JOB_KEY"  # the variable of the job's key, 64 hexadecimal digits

# All that ranks read of a job, in its run directory.
FILES = ("request.json", "plan.json", "launch.json", HOSTS)
_TAG_BYTES = 32  # of SHA-256


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


class JobKey:
    """The key of a job, and what is made of it."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def from_environment(cls) -> "JobKey":
        """Return the key that the launcher handed over. Raises LaunchError where it did not."""
        text = os.environ.get(KEY, "")
        try:
            return cls(bytes.fromhex(text))
        except ValueError:
            raise LaunchError(f"{KEY} is not a key: start ranks by whale-train") from None

    @property
    def nonce(self) -> str:
        """What all keys of the store begin with: those of another job are never read."""
        return self._of(b"names in the store")

    @property
    def fingerprint(self) -> str:
        """What tells this key from others without giving it away."""
        return self._of(b"fingerprint")

    def sealed(self, job: Job | None) -> bytes:
        """Return a message that tells of `job`, or, of None, that there is none."""
        content = None
        if job is not None:
            content = {"run_dir": str(job.run_dir), "texts": dict(job.texts)}
        return self.signed(json.dumps(content))

    def opened(self, message: bytes) -> Job | None:
        """Return what `sealed` was given. Raises LaunchError as `checked` does."""
        content = json.loads(self.checked(message, "rank 0"))
        return None if content is None else Job(Path(content["run_dir"]), content["texts"])

    def signed(self, text: str) -> bytes:
        """Return a message that says `text`."""
        # A store takes 8 MB at once (torch's TCPStoreLibUvBackend), and a large plan has more.
        packed = zlib.compress(text.encode())
        return self._tag(packed) + packed

    def checked(self, message: bytes, sender: str) -> str:
        """Return what `signed` was given. Raises LaunchError for a message without its tag, of
        which nothing is looked at."""
        tag, packed = message[:_TAG_BYTES], message[_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(packed)):
            rule = f"the message of {sender} was not signed by a rank of this job"
            raise LaunchError(f"{rule}, and is not believed")
        return zlib.decompress(packed).decode()

    def _tag(self, packed: bytes) -> bytes:
        return hmac.digest(self._key, b"message " + packed, "sha256")

    def _of(self, purpose: bytes) -> str:
        return hmac.digest(self._key, purpose, "sha256").hex()
