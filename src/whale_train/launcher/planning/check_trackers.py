"""Refuse trackers that cannot work on this host, before any rank starts.

The checks find missing packages, classes that are no trackers, and servers that do not answer. An
exception that a tracker raises later does not end a run.
"""

import os
import socket
from importlib.util import find_spec
from urllib.parse import urlsplit

from whale_train.errors import ConfigError, Fault
from whale_train.extras import how_to_install
from whale_train.own_code import argument_faults, importable, imported
from whale_train.trackers.options import KEY, BuiltIn, MlflowOptions, OwnTrackerOptions
from whale_train.trackers.tracker import TRACKER

_ANSWER_S = 5.0
_PORTS = {"http": 80, "https": 443}
_OF_SQLITE = {"sqlalchemy": "SQLAlchemy", "alembic": "alembic"}  # modules and their packages


def refuse_trackers(trackers: tuple[BuiltIn | OwnTrackerOptions, ...]) -> None:
    """Raise ConfigError with the faults of all trackers that cannot work on this host."""
    faults: list[Fault] = []
    for number, options in enumerate(trackers):
        key = f"{KEY}[{number}]"
        if isinstance(options, OwnTrackerOptions):
            faults += _own_faults(options, key)
        elif find_spec(options.name) is None:
            rule = f"needs {options.name}, which is not installed"
            faults.append(Fault(key, options.name, rule, how_to_install(options.name)))
        elif isinstance(options, MlflowOptions):
            faults += _mlflow_faults(options, key)
    if faults:
        raise ConfigError(faults)


def _own_faults(options: OwnTrackerOptions, key: str) -> list[Fault]:
    try:
        with importable(os.getcwd()):
            tracker_class = imported(f"{key}._target_", options.target, TRACKER)
    except ConfigError as error:
        return list(error.faults)
    return argument_faults(tracker_class, options.arguments, key, options.target.rpartition(".")[2])


def _mlflow_faults(options: MlflowOptions, key: str) -> list[Fault]:
    uri = options.uri or os.environ.get("MLFLOW_TRACKING_URI")
    scheme = "sqlite" if uri is None else urlsplit(uri).scheme
    if scheme == "sqlite":
        missing = [name for module, name in _OF_SQLITE.items() if find_spec(module) is None]
        rule = "keeps runs in SQLite by {}, which is not installed"
        return [Fault(key, "mlflow", rule.format(name), how_to_install(name)) for name in missing]
    if uri is None or scheme not in _PORTS:
        return []
    where = urlsplit(uri)
    try:
        port = where.port or _PORTS[scheme]
        with socket.create_connection((where.hostname or "", port), _ANSWER_S):
            return []
    except (OSError, ValueError) as error:
        shown = f"{scheme}://{where.netloc.rpartition('@')[2]}{where.path}"
        named = f"{key}.uri" if options.uri else "MLFLOW_TRACKING_URI"
        rule = f"does not answer ({getattr(error, 'strerror', None) or error})"
        remedy = "start the server, or leave the address out for a store in the run directory"
        return [Fault(named, shown, rule, remedy)]
