"""Resolve the paths that a user names in `data.path`, and describe unusable ones as errors."""

import os
import stat
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from whale_train.errors import ConfigError, Fault


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


# Relative to where the command is run: a rank may be started in another folder.
UserPath = Annotated[str, AfterValidator(_absolute)]


def path_error(path: str, rule: str, remedy: str) -> ConfigError:
    """Return a ConfigError, ready to raise, with one fault of `data.path`."""
    return ConfigError([Fault("data.path", path, rule, remedy)])


def _started_in() -> str:
    try:
        return os.getcwd()
    except OSError:  # the folder was removed
        return ""


_STARTED_IN = _started_in()  # before Hydra changes to the run directory (hydra.job.chdir=true)


def missing_path(path: str) -> ConfigError:
    """Return the error of a path that does not exist.

    The remedy names the path that was meant in the folder where the command was started, or else
    the most similar name in the folder of `path`, if there is one.
    """
    wanted, here = Path(path), Path(_started_in())
    if _STARTED_IN and str(here) != _STARTED_IN and wanted.is_relative_to(here):
        meant = Path(_STARTED_IN, wanted.relative_to(here))
        if os.path.exists(meant):
            rule = "does not exist: relative paths begin at the run directory, as "
            rule += "hydra.job.chdir=true says"
            return path_error(path, rule, f"use {meant}, or hydra.job.chdir=false")
    if not os.path.isdir(wanted.parent):  # False too for a name that no file can have
        folder = next(parent for parent in wanted.parents if os.path.isdir(parent))
        return path_error(path, "does not exist", f"the path exists only as far as {folder}")
    try:
        names = sorted(os.listdir(wanted.parent))
    except OSError as error:
        return unreadable(error, str(wanted.parent))
    close = get_close_matches(wanted.name, names, n=1, cutoff=0.6)
    if close:
        return path_error(path, "does not exist", f"did you mean {wanted.parent / close[0]}?")
    return path_error(path, "does not exist", f"nothing in {wanted.parent} has a name like it")


def refuse_special(path: str) -> None:
    """Raise ConfigError for a path that is neither a file nor a folder.

    A device or a pipe may be endless, and can be read only once. Raises OSError for a path whose
    status cannot be read.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return
    kinds = ((stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"))
    kind = next((name for is_kind, name in kinds if is_kind(mode)), "device")
    raise path_error(path, f"is a {kind}", "name a file or folder on a disk")


def unreadable(error: OSError, path: str) -> ConfigError:
    """Return the error, ready to raise, of a path that the system cannot read."""
    said = error.strerror or " ".join(str(error).split())
    where = str(error.filename or path)
    return path_error(where, f"cannot be read ({said})", "make it readable, or name another path")
