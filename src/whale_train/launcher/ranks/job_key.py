"""Make the key that the ranks of one job share, and nobody else has (docs/adr/030).

Ranks that torchrun or srun started meet at a store that anybody who reaches its port may write to.
They believe there only what was signed with this key (`runtime/process/job_message.py`). The key is
made of the job's name and of a secret. The secret is the launch's, `$WHALE_TRAIN_SECRET`, which
every rank has in its environment, or else the user's own, in a file that nobody else can read.
"""

import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex

from whale_train.errors import ConfigError, Fault

SECRET = "WHALE_TRAIN_SECRET"  # the variable that has the secret of the launch
SHORTEST_SECRET = 32  # characters: 128 bits where they are hexadecimal digits

_REMEDY = f"give every rank the same one: export {SECRET}=$(openssl rand -hex 32)"


def job_key(environment: Mapping[str, str], job: str) -> str:
    """Return the key of the job named `job`, 64 hexadecimal digits.

    Raises ConfigError for a secret that is too short, and where there is none and the user's own
    can neither be read nor made, or others may read it.
    """
    secret = environment.get(SECRET)
    if not secret:
        secret = _users_secret(_users_file(environment))
    elif len(secret) < SHORTEST_SECRET:
        rule = f"has {len(secret)} characters, and a secret has {SHORTEST_SECRET} or more"
        raise ConfigError([Fault(SECRET, "", rule, _REMEDY)])
    return hmac.digest(secret.encode(), f"whale-train job {job}".encode(), "sha256").hex()


def _users_file(environment: Mapping[str, str]) -> Path:
    """Return the path of the user's own secret, in the user's configuration."""
    root = Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return root / "whale-train" / "secret"


def _users_secret(path: Path) -> str:
    """Return the secret in the file `path`. The file is made where there is none.

    Raises ConfigError where it can neither be read nor made, or where others could know the secret.
    """
    try:
        if not path.exists():
            _make(path)
        # A symbolic link may lead to a file of somebody else's choice.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(file, encoding="utf-8") as opened:
            about, secret = os.fstat(file), opened.read().strip()
    except OSError as error:
        reason = error.strerror or str(error)
        rule = f"is not set, and {path} cannot be used instead ({reason})"
        raise ConfigError([Fault(SECRET, "", rule, _REMEDY)]) from error
    is_own = about.st_uid == os.geteuid() and stat.S_ISREG(about.st_mode)
    if not is_own or stat.S_IMODE(about.st_mode) & 0o077 or len(secret) < SHORTEST_SECRET:
        rule = f"is not set, and {path} is no secret: not a file of {SHORTEST_SECRET} characters "
        rule += "that its owner alone may read"
        remedy = f"remove that file, or {_REMEDY}"
        raise ConfigError([Fault(SECRET, "", rule, remedy)])
    return secret


def _make(path: Path) -> None:
    """Write a new secret to `path`, unless another rank does so first: all ranks read the same
    one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{token_hex(8)}")
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "w", encoding="utf-8") as opened:
            opened.write(token_hex(32) + "\n")
        # A link never replaces a file, not even on a network's file system.
        os.link(partial, path)
    except FileExistsError:
        pass
    finally:
        partial.unlink()
