"""Make the secret key that the ranks of one job share (docs/adr/030).

Ranks that torchrun or srun started meet at a store whose port is open to everybody. They accept
only messages in the store that are signed with the key (`runtime/process/job_message.py`). The key
is derived from the job's name and a secret: `$WHALE_TRAIN_SECRET`, which every rank has in its
environment, or else the user's own secret, in a file that only the user can read.
"""

import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex

from whale_train.errors import ConfigError, Fault

SECRET = "WHALE_TRAIN_SECRET"  # the environment variable with the secret of the launch
SHORTEST_SECRET = 32  # characters: 128 bits where they are hexadecimal digits

_REMEDY = f"give every rank the same one: export {SECRET}=$(openssl rand -hex 32)"


def job_key(environment: Mapping[str, str], job: str) -> str:
    """Return the key of the job named `job`, 64 hexadecimal digits.

    Raises ConfigError for a secret that is too short. Without a secret in `environment`, it is
    raised where the user's own secret can neither be read nor made, or other users may read it.
    """
    secret = environment.get(SECRET)
    if not secret:
        secret = _users_secret(_users_file(environment))
    elif len(secret) < SHORTEST_SECRET:
        rule = f"has {len(secret)} characters, and a secret has {SHORTEST_SECRET} or more"
        raise ConfigError([Fault(SECRET, "", rule, _REMEDY)])
    return hmac.digest(secret.encode(), f"whale-train job {job}".encode(), "sha256").hex()


def _users_file(environment: Mapping[str, str]) -> Path:
    """Return the path of the user's own secret, in the folder of the user's configuration."""
    root = Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return root / "whale-train" / "secret"


def _users_secret(path: Path) -> str:
    """Return the secret in the file `path`, which is created if it does not exist.

    Raises ConfigError where the file can neither be read nor created, or other users could know the
    secret.
    """
    try:
        if not path.exists():
            _make(path)
        # A symbolic link might lead to a file that another user chose.
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
    """Write a new secret to `path`, unless another rank writes one first, which then counts for all
    ranks."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{token_hex(8)}")
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "w", encoding="utf-8") as opened:
            opened.write(token_hex(32) + "\n")
        # A hard link never replaces a file, not even on a network file system.
        os.link(partial, path)
    except FileExistsError:
        pass
    finally:
        partial.unlink()
