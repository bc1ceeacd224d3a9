"""Hydra's command line, checked before Hydra runs: its complaints in our words, exit status 2.

Hydra itself then composes, sweeps and makes the directories. Owns the few rewritings that let a
user's own model take arguments, and a strategy keys, that its config file does not list.
"""

import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra import compose
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from whale_train.config import AUTO, read_request
from whale_train.errors import ConfigError, Fault, nearest
from whale_train.launcher.own_files import put_own_files_first
from whale_train.launcher.ranks.run_dir import taken_by
from whale_train.launcher.unknown_keys import (
    is_choice,
    remedy_for,
    remedy_for_flag,
    unread,
    without_doubtful,
)
from whale_train.models.options import MODEL_KEYS
from whale_train.other_trainers import known_elsewhere

CONFIG_MODULE = "whale_train.conf"

# What composing raises: Hydra, what it is made of, and files that cannot be read or hold no
# mapping (ValueError, AssertionError).
_COMPOSING = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    OSError,
    ValueError,
    AssertionError,
)


def asks_version(arguments: Sequence[str]) -> bool:
    """Return whether the command line has the flag `--version`, or the start of it that argparse
    takes for it, among its flags."""
    return any(len(text) > 2 and "--version".startswith(text) for text in arguments)


def rewritten(arguments: Sequence[str]) -> list[str]:
    """Return the command line with `model._target_=` standing for model=custom, and arguments of a
    model's class and keys of a strategy, whose own readers know them, allowed though no file lists
    them; overrides before flags, as Hydra wants them.

    Raises ConfigError for flags and overrides that cannot be parsed.
    """
    options = _flags(arguments)
    if options.shell_completion:
        return list(arguments)
    flags = [text for text in arguments if text not in options.overrides]
    faults: list[Fault] = []
    parsed = [o for text in options.overrides if (o := _parsed(text, faults)) is not None]
    if faults:
        raise ConfigError(faults)
    keys = {o.key_or_group for o in parsed}
    own_class = "model._target_" in keys and "model" not in keys
    custom = own_class or any(o.key_or_group == "model" and o.value() == "custom" for o in parsed)
    on_slurm = any(o.key_or_group == "launcher" and o.value() == "slurm" for o in parsed)
    found = []
    for override in parsed:
        first, _, name = override.key_or_group.partition(".")
        text = str(override.input_line)
        free = (
            first == "strategy"
            or (on_slurm and override.key_or_group.startswith("launcher.sbatch"))
            or (custom and first == "model" and name.split(".")[0] not in MODEL_KEYS)
        )
        if name and free and not override.is_delete():
            text = "++" + text.lstrip("+")
        if override.key_or_group == "strategy.graph" and not override.is_delete():
            # A graph given whole is that graph: Hydra would merge it into the file's.
            found.append("~strategy.graph")
        found.append(text)
    return [*(["model=custom"] if own_class else []), *found, *flags]


def read_own_files(arguments: Sequence[str]) -> None:
    """Have Hydra read the user's own files before the built-in ones."""
    options = _flags(arguments)
    parsed = [override for text in options.overrides if (override := _parsed(text, []))]
    put_own_files_first(options.config_dir, parsed)


def check(arguments: Sequence[str]) -> None:
    """Compose as Hydra will and read what it composes, before it makes any directory.

    Of a sweep only what would stop all of it is refused here; its jobs are read one by one as
    they run. Raises ConfigError with all faults found.
    """
    options = _flags(arguments)
    if options.help or options.hydra_help or options.info or options.shell_completion:
        return
    if options.config_path or options.experimental_rerun:
        return  # another primary config: Hydra speaks for itself
    name = options.config_name or "config"
    multirun = options.multirun or "hydra.mode=MULTIRUN" in options.overrides
    faults: list[Fault] = []
    with _hydra(options.config_dir):
        for number, overrides in enumerate(_jobs(options.overrides, multirun)):
            config, wrong = _compose(name, overrides)
            faults += [fault for fault in wrong if fault not in faults]
            if config is None or options.cfg:
                continue
            if config.get("mode") == "export":
                faults += [x for x in _faults_of_export(overrides, wrong) if x not in faults]
            if not multirun:
                faults += _request_faults(config, wrong, overrides)
            if not faults:
                faults += _run_dir_faults(config, number if multirun else None)
    if faults:
        raise ConfigError(faults)


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return one job's config. Raises ConfigError with all faults of the overrides."""
    with _hydra(None):
        config, faults = _compose("config", overrides)
    if config is None or faults:
        raise ConfigError(faults)
    return _without_hydra(config)


@contextmanager
def _hydra(config_dir: str | None) -> Iterator[None]:
    """Hydra initialised as its command line will be, the user's own folder first."""
    path = create_config_search_path(f"pkg://{CONFIG_MODULE}")
    if config_dir is not None:
        folder = Path(config_dir).absolute()
        if not folder.is_dir():
            fault = Fault("--config-dir", config_dir, "is not a folder", "name one with your files")
            raise ConfigError([fault])
        assert isinstance(path, ConfigSearchPathImpl)
        path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
    Hydra.create_main_hydra2("whale-train", path)
    try:
        yield
    finally:
        GlobalHydra.instance().clear()


def _flags(arguments: Sequence[str]) -> Namespace:
    """Hydra's flags; `overrides` may stand between them. Raises ConfigError for unknown ones."""
    parser = get_args_parser()
    parser.prog = "whale-train"
    options, unknown = parser.parse_known_intermixed_args(list(arguments))
    if unknown:
        raise ConfigError([Fault(x, "", "is not a flag", remedy_for_flag(x)) for x in unknown])
    return options


def _parsed(text: str, faults: list[Fault]) -> Override | None:
    """Return an override; None when it is a fault."""
    if "=" not in text and not text.startswith("~"):
        instead = known_elsewhere(text)
        remedy = f"write {text}=VALUE" if instead is None else instead.remedy
        faults.append(Fault(text, "", "is neither KEY=VALUE nor a flag", remedy))
        return None
    try:
        return OverridesParser.create().parse_overrides([text])[0]
    except HydraException as error:
        reason = str(error).splitlines()[0].rpartition("Exception: ")[2].rstrip(".:")
        rule = f"cannot be read ({reason})" if reason != text else "cannot be read"
        remedy = "quote values with spaces, commas or brackets, as in 'key={a: 1}'"
        faults.append(Fault(text, "", rule, remedy))
        return None


def _jobs(overrides: Sequence[str], multirun: bool) -> list[list[str]]:
    """Return the overrides of each job: one, or the product of a sweep's choices, in Hydra's
    order."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    parsed = parser.parse_overrides(list(overrides))
    swept = [override for override in parsed if override.is_sweep_override()]
    if swept and not multirun:
        rule = "gives several values to one run"
        raise ConfigError(
            [
                Fault(o.key_or_group, _value(o), rule, f"add -m to sweep, or give one {_kind(o)}")
                for o in swept
            ]
        )
    jobs: list[list[str]] = [[]]
    for override in parsed:
        choices = [str(override.input_line)]
        if override.is_sweep_override():
            if not override.is_discrete_sweep():
                rule = "is a range without steps, which nothing here can sweep"
                fault = Fault(override.key_or_group, _value(override), rule, "list the values")
                raise ConfigError([fault])
            key = override.get_key_element()
            choices = [f"{key}={value}" for value in override.sweep_string_iterator()]
        jobs = [[*job, choice] for job in jobs for choice in choices]
    return jobs


def _value(override: Override) -> str:
    """Return what was written after the equals sign."""
    return str(override.input_line).partition("=")[2]


def _kind(override: Override) -> str:
    return "value" if "." in override.key_or_group else "option"


def _compose(name: str, overrides: Sequence[str]) -> tuple[DictConfig | None, list[Fault]]:
    """Return the config, Hydra's own part included, and what is wrong with the overrides.

    What cannot be composed is left out, so that all of it is found: first of what chooses options,
    then, value by value, of what is set in them. None where it is not an override that is wrong.
    """
    config = _attempt(name, overrides)
    if isinstance(config, DictConfig):
        return config, []
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    choices = [str(override.input_line) for override in parsed if is_choice(override)]
    errors = list[tuple[Override, Exception]]()
    while not isinstance(config := _attempt(name, choices), DictConfig):
        culprit = _culprit(name, choices, config)
        if culprit is None:
            return None, [*_override_faults(errors, None, parsed), _file_fault(config)]
        errors += [(o, config) for o in parsed if str(o.input_line) == choices[culprit]]
        del choices[culprit]
    kept = list(choices)
    parts = [[override for override in parsed if not is_choice(override)]]
    while parts:  # halves of what fails, in order
        part = parts.pop(0)
        attempt = _attempt(name, [*kept, *(str(override.input_line) for override in part)])
        if isinstance(attempt, DictConfig):
            config = attempt
            kept += [str(override.input_line) for override in part]
        elif len(part) == 1:
            errors.append((part[0], attempt))
        else:
            parts[:0] = [part[: len(part) // 2], part[len(part) // 2 :]]
    return config, _override_faults(errors, config, parsed)


def _override_faults(
    errors: Sequence[tuple[Override, Exception]],
    config: DictConfig | None,
    overrides: Sequence[Override],
) -> list[Fault]:
    """Return what is wrong with overrides, but with those below an option that does not exist: they
    may be right."""
    missing = {o.key_or_group for o, e in errors if isinstance(e, MissingConfigException)}
    chosen = {override.key_or_group for override in overrides}
    silent = missing if config is None else unread(missing, config, chosen)
    return [
        _override_fault(override, error, config)
        for override, error in errors
        if override.key_or_group in missing or override.key_or_group.partition(".")[0] not in silent
    ]


def _attempt(name: str, overrides: Sequence[str]) -> DictConfig | Exception:
    try:
        return compose(name, list(overrides), return_hydra_config=True)
    except _COMPOSING as error:
        return error


def _culprit(name: str, overrides: Sequence[str], error: Exception) -> int | None:
    """Return the override without which `error` is not raised."""
    for i in range(len(overrides)):
        found = _attempt(name, [*overrides[:i], *overrides[i + 1 :]])
        if isinstance(found, DictConfig) or str(found) != str(error):
            return i
    return None


def _override_fault(override: Override, error: Exception, config: DictConfig | None) -> Fault:
    """Hydra's complaint about one override, in our words."""
    key, value = override.key_or_group, _value(override)
    said = " ".join(str(error).split())
    if isinstance(error, MissingConfigException):
        missing = str(error.missing_cfg_file or "").rpartition("/")[2]
        remedy = nearest(missing, error.options) if error.options else "name a file that exists"
        if missing == value:
            return Fault(key, value, "is not an option", remedy)
        return Fault(key, value, f"builds on {missing}, which is not an option", remedy)
    if said.startswith(("Could not append", "Multiple values", "force-add")):
        rule = "adds a key that is there already"
        return Fault(str(override.input_line), "", rule, f"write {key}={value}")
    if said.startswith(("Could not override", "Could not delete")):
        cause = error.__cause__
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            longer = cause.full_key != key and cause.full_key.startswith(f"{key}.")
            key, value = (cause.full_key, "") if longer else (key, value)
        return Fault(key, value, "is not a key of the config", remedy_for(key, config))
    if said.startswith("Config group override must be"):
        return Fault(key, value, "is not the name of an option", f"write {key}=NAME")
    if isinstance(error, HydraException | OmegaConfBaseException):
        reason = " ".join(str(error.__cause__ or error).split("\n")[0].split())
        return Fault(key, value, f"cannot be set ({reason})", remedy_for(key, config))
    return _file_fault(error)


def _file_fault(error: Exception) -> Fault:
    """Return what is wrong with a config file, the user's own."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        rule = f"is not YAML (line {mark.line + 1}, column {mark.column + 1}: {error.problem})"
        return Fault(str(mark.name), "", rule, "correct it there")
    if isinstance(error, MissingConfigException):
        group, _, option = str(error.missing_cfg_file or "").rpartition("/")
        remedy = nearest(option, error.options) if error.options else "name a file that exists"
        return Fault(group or "--config-name", option, "is not an option", remedy)
    said = " ".join(str(error).split())
    return Fault("config", "", f"cannot be composed ({said})", "correct the file it names")


def _without_hydra(config: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def compared_strategies(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the strategies of these names as their files have them, Hydra being initialised.
    Raises ConfigError for those that are none."""
    found: dict[str, dict[str, Any]] = {}
    faults = []
    for name in names:
        config = _attempt("config", [f"strategy={name}"])
        if isinstance(config, DictConfig):
            plain = OmegaConf.to_container(config.strategy, resolve=True)
            assert isinstance(plain, dict)
            found[name] = {str(key): value for key, value in plain.items()}
        elif isinstance(config, MissingConfigException) and config.options:
            remedy = nearest(name, config.options)
            faults.append(Fault("compare", name, "is not a strategy", remedy))
        else:
            faults.append(_file_fault(config))
    if faults:
        raise ConfigError(faults)
    return found


def _request_faults(
    config: DictConfig, wrong: Sequence[Fault], overrides: Sequence[str]
) -> list[Fault]:
    """Return the faults that reading the request will find, but those that what is `wrong` with its
    overrides may have made."""
    choices = config.hydra.runtime.choices
    names = {str(key): str(value) for key, value in choices.items() if value is not None}
    given = {o.key_or_group for o in OverridesParser.create().parse_overrides(list(overrides))}
    unset = [fault for fault in wrong if fault.key not in choices]
    silent = unread({fault.key for fault in wrong} & {str(key) for key in choices}, config, given)
    try:
        request = read_request(_without_hydra(config), names)
        compared_strategies(request.compare)
    except ConfigError as error:
        kept = [fault for fault in error.faults if fault.key.partition(".")[0] not in silent]
        return without_doubtful(kept, unset, given)
    return []


def _faults_of_export(overrides: Sequence[str], wrong: Sequence[Fault]) -> list[Fault]:
    """Return a fault for every override, but those that are `wrong` already, that says of an export
    what its checkpoint says."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    known = {"mode", "checkpoint", "checkpoint.path", *(fault.key for fault in wrong)}
    others = [o for o in parsed if o.key_or_group not in known]
    rule, remedy = "has no effect on mode=export", "leave it out: the checkpoint has it"
    return [
        Fault(o.key_or_group, _value(o), rule, remedy)
        for o in others
        if not o.key_or_group.startswith("hydra")
    ]


def _run_dir_faults(config: DictConfig, job: int | None) -> list[Fault]:
    """Return what is wrong with the directory Hydra will make; `job` is its number in a sweep."""
    key = "hydra.run.dir" if job is None else "hydra.sweep.dir"
    HydraConfig.instance().set_config(config)
    try:
        if job is None:
            shown = str(config.hydra.run.dir)
        else:
            with read_write(config.hydra.job), open_dict(config.hydra.job):
                config.hydra.job.num = job
            shown = os.path.join(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir))
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        return [Fault(key, "", f"cannot be resolved ({reason})", "correct its ${...}")]
    path = Path(shown).absolute()
    taken = taken_by(path, key, shown)
    if taken is not None and OmegaConf.select(config, "train.resume") != AUTO:
        return [taken]
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return []
    except OSError as error:
        rule = f"cannot be made a run directory ({error.strerror})"
        return [Fault(key, shown, rule, "name a directory that can be written")]
