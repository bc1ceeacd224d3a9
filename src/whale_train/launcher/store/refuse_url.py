"""Refuse URLs that cannot be read or written here, and stores of another run, before any rank
starts."""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from whale_train.checkpoints.checkpoint_files import CHECKPOINTS, MANIFEST, MODEL, checkpoints_in
from whale_train.checkpoints.url_path import StoreError, UrlPath, is_url, words_of
from whale_train.config import AUTO, READING, Request
from whale_train.errors import ConfigError, Fault, closest

KEY = "checkpoint.to"
RUN = "run.json"  # in a store and in the run directory: the id of the run that owns the checkpoints
# The packages of well-known protocols; fsspec's messages name the packages of others.
_PACKAGES = {
    **{"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"},
    **{"abfs": "adlfs", "abfss": "adlfs", "az": "adlfs", "sftp": "paramiko", "ssh": "paramiko"},
    **{"hdfs": "pyarrow", "smb": "smbprotocol", "oss": "ossfs", "webdav": "webdav4"},
}


def refuse_urls(request: Request, *, is_elsewhere: bool) -> None:
    """Raise ConfigError with the faults of all URLs in a request.

    is_elsewhere: whether the ranks run on other hosts, which check the URLs of training themselves.
    """
    asked: dict[str, str | None] = {}
    if request.mode in READING:
        asked["checkpoint"] = request.checkpoint.path
    elif not is_elsewhere:
        asked = {KEY: request.checkpoint.to, "train.resume": request.train.resume}
    faults: list[Fault] = []
    for key, value in asked.items():
        if value is not None and is_url(value):
            faults += url_faults(key, value)
    if faults:
        raise ConfigError(faults)


def url_faults(key: str, url: str) -> list[Fault]:
    """Return the fault of a URL that fsspec cannot open, in a list; empty where it can.

    A fault is a password, a protocol that fsspec does not know, a protocol without an installed
    implementation, or an error of the implementation.

    key: the config key whose value the URL is, for messages.
    """
    from fsspec.registry import available_protocols, get_filesystem_class, known_implementations

    if any(urlsplit(part).password for part in url.split("::")):
        rule = "has a password, which logs and the files of a run would show"
        hidden = "::".join(_without_password(part) for part in url.split("::"))
        remedy = "put it where fsspec finds it, as in FSSPEC_FTP_PASSWORD or ~/.config/fsspec"
        return [Fault(key, hidden, rule, remedy)]
    for protocol in (part.partition("://")[0] for part in url.split("::")):
        try:
            get_filesystem_class(protocol)
        except ValueError:
            near = closest(protocol, available_protocols())
            rule = f"names the protocol {protocol}, which fsspec does not know"
            remedy = "use one that it knows, as file, s3 or gs, or install what serves it"
            return [Fault(key, url, rule, f"did you mean {near}?" if near else remedy)]
        except ImportError as error:
            package = _PACKAGES.get(protocol)
            rule = f"needs an implementation of {protocol}, and none is installed"
            said = known_implementations.get(protocol, {}).get("err") or str(error)
            return [Fault(key, url, rule, f"pip install {package}" if package else said)]
    try:
        UrlPath.of(url).opened()
    except Exception as error:  # each implementation raises errors of its own
        rule = f"cannot be opened ({words_of(error)})"
        return [Fault(key, url, rule, "correct it, or what the environment says of the store")]
    return []


def _without_password(part: str) -> str:
    """Return one part of a chained URL without the user and the password."""
    protocol, mark, rest = part.partition("://")
    return f"{protocol}{mark}{rest.rpartition('@')[2]}"


def refuse_store(to: UrlPath, run_dir: Path, resume: str | None) -> None:
    """Raise ConfigError where a run may not copy its checkpoints to the store `to`.

    Refused is a store in which a small file cannot be written, read and removed, and a store with
    the checkpoints or weights of another run. Under `train.resume=auto`, a run without checkpoints
    of its own continues the run in the store instead.

    to: the folder of the store.
    run_dir: the run directory.
    resume: the value of `train.resume`.
    """
    if said := _unwritable(to):
        remedy = "name a folder in which this machine may write, read and remove files"
        raise ConfigError([Fault(KEY, str(to), f"cannot be used ({said})", remedy)])
    owner, own = run_of(to), run_of(run_dir)
    try:
        has_files = any(map(_is_whole, checkpoints_in(to))) or (to / MODEL).exists()
    except StoreError as error:
        rule, remedy = f"cannot be read ({error})", "see that it can, or name another folder"
        raise ConfigError([Fault(KEY, str(to), rule, remedy)]) from None
    begins = not own and not checkpoints_in(run_dir / CHECKPOINTS)
    if not has_files or (owner and owner == own) or (resume == AUTO and begins):
        return
    remedy = "name another folder"
    if begins:
        remedy += ", or go on with that run by train.resume=auto"
    raise ConfigError([Fault(KEY, str(to), "holds the checkpoints of another run", remedy)])


def _is_whole(checkpoint: UrlPath) -> bool:
    return (checkpoint / MANIFEST).is_file()


def _unwritable(to: UrlPath) -> str:
    """Return why a small file cannot be written to a store, read and removed; '' where it can.

    No operation is retried, since a missing permission stays missing.
    """
    token = secrets.token_hex(8).encode()
    probe = to / f".probe_{token.decode()}"
    doing = "writing"
    try:
        probe.write_bytes(token, pauses_s=())
        doing = "reading"
        if probe.read_bytes(pauses_s=()) != token:
            return f"reading {probe} gives another content than was written"
        doing = "removing"
        probe.remove(pauses_s=())
    except OSError as error:
        return f"{doing} {error}"
    return ""


def run_of(folder: Path | UrlPath) -> str:
    """Return the id of the run that owns a run directory or a store; '' where none is recorded.
    Raises ConfigError where the record cannot be read."""
    path = folder / RUN
    try:
        content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return str(content["run"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"has a {RUN} that cannot be read ({error})"
        raise ConfigError([Fault(KEY, str(folder), rule, "name another folder")]) from None


def claim(to: UrlPath, run_dir: Path) -> None:
    """Write the id of one run into a store and a run directory.

    The id is the run directory's; without one, the id of a store with checkpoints; else a new id.
    Raises ConfigError where the store cannot be used.
    """
    run = run_of(run_dir) or (checkpoints_in(to) and run_of(to)) or secrets.token_hex(16)
    text = json.dumps({"run": run}) + "\n"
    try:
        if run_of(to) != run:
            (to / RUN).write_bytes(text.encode())
    except StoreError as error:
        rule = f"cannot be used ({error})"
        raise ConfigError([Fault(KEY, str(to), rule, "name another folder")]) from None
    (run_dir / RUN).write_text(text, encoding="utf-8")
