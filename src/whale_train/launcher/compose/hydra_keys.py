"""Check that Hydra's own part of a config names no code that would be run.

Hydra imports and calls any `_target_` in callbacks, launcher and sweeper. Python's logging imports
and calls the class of a handler or formatter. The allowed targets are those that Hydra and its
installed plugins register, our own sweeper, and logging to files and streams.
"""

from collections.abc import Iterator
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from whale_train.errors import Fault, nearest, shortened
from whale_train.launcher.study.settings import SWEEPER
from whale_train.validation import as_yaml

# Sections whose `_target_` Hydra calls, and sections whose `()` and `class` logging calls.
_CALLED = ("callbacks", "launcher", "sweeper")
_LOGGING = ("hydra_logging", "job_logging")
_LOGGERS = (
    "logging.Formatter",
    "logging.StreamHandler",
    "logging.FileHandler",
    "logging.NullHandler",
    "logging.handlers.RotatingFileHandler",
    "logging.handlers.TimedRotatingFileHandler",
    "logging.handlers.WatchedFileHandler",
    "colorlog.ColoredFormatter",  # of hydra_colorlog
)
_STREAMS = ("ext://sys.stdout", "ext://sys.stderr")

# Prefixes of the environment variables that a config may set for a job. Libraries read numbers and
# choices from these variables. Other variables can name code that is run (LD_PRELOAD, PYTHONPATH,
# PATH, CXX, NCCL_NET_PLUGIN).
_VARIABLES = (
    *("OMP_", "MKL_NUM_THREADS", "KMP_", "OPENBLAS_NUM_THREADS", "NUMEXPR_", "GLOO_", "NCCL_"),
    *("TORCH_NCCL_", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS"),
    *("TORCH_SHOW_CPP_STACKTRACES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG", "MALLOC_", "THP_MEM_ALLOC_ENABLE"),
    *("HF_", "TRANSFORMERS_", "TOKENIZERS_PARALLELISM", "WHALE_TRAIN_", "TZ", "LANG", "LC_"),
)
_LOADED = ("PLUGIN", "CONF_FILE", "TRUST")

_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
_BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


def code_faults(config: DictConfig) -> list[Fault]:
    """Return a fault for every key of `hydra` that names code which would be run. No target is
    called."""
    hydra = config.hydra
    HydraConfig.instance().set_config(config)
    known = _registered()
    faults: list[Fault] = []
    for name in hydra:
        if name not in ("overrides", "runtime"):
            key = f"hydra.{name!s}"
            faults += _target_faults(hydra._get_node(name), key, known, name in _CALLED)
    for name in _LOGGING:
        faults += _logging_faults(config, name)
    faults += _plugin_faults(hydra, "launcher", Launcher)
    faults += _plugin_faults(hydra, "sweeper", Sweeper)
    # A copied variable keeps the value that it has in the environment of the command.
    copied = set(hydra.job.env_copy or ())
    for name, value in (hydra.job.env_set or {}).items():
        if name not in copied:
            faults += _variable_faults(str(name), str(value))
    faults += _verbosity_faults(hydra.verbose)
    return faults


def _plugin_faults(hydra: DictConfig, name: str, kind: type) -> Iterator[Fault]:
    """Yield the faults of Hydra's launcher or sweeper, except those that `_target_faults` yields.

    hydra: Hydra's own part of the config.
    name: `launcher` or `sweeper`.
    kind: the base class of such plugins.
    """
    config, key = hydra.get(name), f"hydra.{name!s}"
    kinds = {f"{x.__module__}.{x.__name__}" for x in Plugins.instance().discover(kind)}
    target = config.get("_target_") if isinstance(config, DictConfig) else None
    if not isinstance(config, DictConfig) or target is None:
        yield Fault(key, shortened(as_yaml(config)), f"is no {name}", f"use hydra/{name}=basic")
    elif target in _registered() and target not in kinds:
        rule = f"is no {name}"
        yield Fault(f"{key}._target_", str(target), rule, nearest(str(target), kinds))
    elif target == _BASIC_SWEEPER:
        known = ("_target_", "max_batch_size", "params")
        for unknown in (str(x) for x in config if x not in known):
            yield Fault(f"{key}.{unknown}", "", "is not a key here", nearest(unknown, known))
        size = config.get("max_batch_size")
        if size is not None and (type(size) is not int or size < 1):
            rule = "is not a whole number of at least 1"
            yield Fault(f"{key}.max_batch_size", as_yaml(size), rule, "use such a number, or null")
    elif name == "launcher" and target == _BASIC_LAUNCHER:
        for unknown in (str(x) for x in config if x != "_target_"):
            yield Fault(f"{key}.{unknown}", "", "is not a key here", f"use hydra/{name}=basic")


def _verbosity_faults(value: Any) -> Iterator[Fault]:
    """Yield a fault where `hydra.verbose` is not true, false, or names of loggers."""
    names = value if isinstance(value, ListConfig) else [value]
    if not isinstance(value, bool) and not all(isinstance(x, str) for x in names):
        shown = as_yaml(OmegaConf.to_container(value) if OmegaConf.is_config(value) else value)
        rule = "is not true, false, or names of loggers"
        yield Fault("hydra.verbose", shortened(shown), rule, "use true, or as [whale_train]")


def _target_faults(node: Any, key: str, known: frozenset[str], is_called: bool) -> Iterator[Fault]:
    """Yield the faults of the targets below a node of the config.

    node: the node.
    key: the path of the node, for messages.
    known: the allowed targets.
    is_called: whether Hydra calls targets in this section. Such a section may have no interpolation
        of a mapping or list, since a target could be changed behind it.
    """
    if is_called and isinstance(node, DictConfig | ListConfig) and node._is_interpolation():
        rule = "is written elsewhere, and what it calls can change"
        yield Fault(key, str(node._value()), rule, "write it out here")
        return
    if isinstance(node, DictConfig) and not (node._is_none() or node._is_missing()):
        for name in node if not node._is_interpolation() else ():
            inner: Any = node._get_node(name)
            inside = f"{key}.{name!s}"
            if name == "_target_" and not _is_known(inner, known):
                value = shortened(as_yaml(_written(inner)))
                rule = "would be called, and Hydra's own part of a config calls nothing"
                yield Fault(inside, value, rule, "leave it out; code is named by model._target_")
            elif is_called and _gives_values(inner):
                rule = "is written elsewhere, and what it calls can change"
                yield Fault(inside, shortened(str(_written(inner))), rule, "write it out here")
            else:
                yield from _target_faults(inner, inside, known, is_called)
    elif isinstance(node, ListConfig) and not (
        node._is_none() or node._is_missing() or node._is_interpolation()
    ):
        for number in range(len(node)):
            inner = node._get_node(number)
            yield from _target_faults(inner, f"{key}[{number}]", known, is_called)


def _is_known(node: Any, known: frozenset[str]) -> bool:
    """Return whether the unresolved value of a node is one of the `known` targets."""
    return _written(node) in known


def _written(node: Any) -> Any:
    """Return the value of a node with interpolations unresolved."""
    if isinstance(node, DictConfig | ListConfig):
        return OmegaConf.to_container(node, resolve=False)
    return node._value()


def _gives_values(node: Any) -> bool:
    """Return whether a node is an interpolation of a mapping or list, or one that cannot be
    resolved."""
    if not node._is_interpolation():
        return False
    try:
        target = node._maybe_dereference_node(throw_on_resolution_failure=True)
    except OmegaConfBaseException:
        return True
    return isinstance(target, DictConfig | ListConfig)


def _registered() -> frozenset[str]:
    """Return the targets that Hydra and its installed plugins have registered, with our own
    sweeper."""

    def targets(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for key, item in value.items():
                if key == "_target_" and isinstance(item, str):
                    yield item
                else:
                    yield from targets(item)

    def nodes(repo: Any) -> Iterator[str]:
        for value in repo.values():
            if isinstance(value, dict):
                yield from nodes(value)
            elif isinstance(value.node, DictConfig):
                yield from targets(OmegaConf.to_container(value.node, resolve=False))

    return frozenset(nodes(ConfigStore.instance().repo.get("hydra", {}))) | {SWEEPER}


def _logging_faults(config: DictConfig, name: str) -> Iterator[Fault]:
    """Yield the faults of a logging config, resolved as in a job.

    name: `hydra_logging` or `job_logging`.
    """
    hydra = config.hydra
    if OmegaConf.is_missing(hydra, name) or hydra[name] is None:
        return
    shown = f"hydra.{name!s}"
    copied = OmegaConf.masked_copy(config, list(config))
    with read_write(copied.hydra), open_dict(copied.hydra):
        copied.hydra.runtime.output_dir = ""
        for key, value in (("num", 0), ("id", "0")):
            if OmegaConf.is_missing(copied.hydra.job, key):
                copied.hydra.job[key] = value
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(copied)
    try:
        value = copied.hydra[name]
        if not isinstance(value, DictConfig):
            rule = "is no description of logging"
            yield Fault(shown, shortened(as_yaml(value)), rule, f"use hydra/{name}=NAME")
            return
        plain = OmegaConf.to_container(value, resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        yield Fault(shown, "", f"cannot be resolved ({reason})", "correct its ${...}")
        return
    finally:
        HydraConfig.instance().cfg = before
    yield from _logger_faults(plain, shown)


def _logger_faults(value: Any, key: str) -> Iterator[Fault]:
    """Yield a fault for every class or stream below `value` that logging would call or import, and
    that is not allowed.

    key: the path of `value`, for messages.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            inside = f"{key}.{name}"
            if name in ("()", "class", "factory", "queue", "listener") and item not in _LOGGERS:
                rule = "would be called to log"
                yield Fault(inside, shortened(as_yaml(item)), rule, nearest(str(item), _LOGGERS))
            else:
                yield from _logger_faults(item, inside)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _logger_faults(item, f"{key}[{number}]")
    elif isinstance(value, str) and value.startswith("ext://") and value not in _STREAMS:
        rule = "would be imported to log"
        yield Fault(key, shortened(value), rule, nearest(value, _STREAMS))


def _variable_faults(name: str, value: str) -> Iterator[Fault]:
    """Yield a fault where a config may not set an environment variable, which could name code."""
    is_number_or_choice = name.startswith(_VARIABLES) and not any(x in name for x in _LOADED)
    if not (is_number_or_choice and name.isidentifier() and "\0" not in value):
        rule = "is no variable that a config may set: others name code that is run"
        remedy = "set it in the environment of the command"
        yield Fault(f"hydra.job.env_set.{name}", "", rule, remedy)
