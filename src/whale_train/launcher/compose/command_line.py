"""Check the command line before Hydra runs, so that faults have our messages and exit status 2.

Hydra then composes the config, expands sweeps and makes the directories. This file owns the
rewriting of overrides that set keys which no config file lists, such as arguments of a user's own
model or optimizer, and keys of a strategy.
"""

import shlex
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
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from whale_train.config import Request, read_request
from whale_train.data.sources.custom import DATA_KEYS
from whale_train.errors import ConfigError, Fault, RequestError, nearest
from whale_train.launcher.compose.config_files import read_within_bounds
from whale_train.launcher.compose.hydra_keys import code_faults
from whale_train.launcher.compose.interpolations import interpolation_faults
from whale_train.launcher.compose.output_dirs import run_dir_faults
from whale_train.launcher.compose.override_text import read_override
from whale_train.launcher.compose.own_files import put_own_files_first
from whale_train.launcher.compose.studies import (
    is_study,
    points,
    put_released_sweeper_aside,
    read_study,
)
from whale_train.launcher.compose.sweeps import PARAMS, jobs, params_of, refuse_swept, value_of
from whale_train.launcher.compose.unknown_keys import (
    READ_ALONE,
    REMEDY_BY_GROUP,
    is_choice,
    remedy_for,
    remedy_for_flag,
    unread,
    without_doubtful,
)
from whale_train.models.options import MODEL_KEYS
from whale_train.optimizer_options import OPTIMIZER_KEYS
from whale_train.other_trainers import known_elsewhere
from whale_train.strategies.grammar.nodes import read_strategy

CONFIG_MODULE = "whale_train.conf"
_SWEEPER = "hydra/sweeper"
_SWEEPER_KEYS = ("hydra/sweeper/", "hydra.sweeper.")
# Groups whose option `custom` names a class, with the keys that are not arguments of that class.
_OF_CLASSES = {"model": MODEL_KEYS, "data": DATA_KEYS, "optimizer": OPTIMIZER_KEYS}
# Keys whose values are mappings that the config files leave empty: {} or null.
_MAPPINGS = (
    *("data.collate", "data.columns", "data.convert", "data.evaluation", "data.field"),
    *(
        "data.fields",
        "data.evaluation_transform",
        "data.map",
        "data.pack",
        "data.pad",
        "data.transform",
    ),
    *("metrics", "model.adapters", "model.config", "model.loss", "optimizer.schedule"),
    "train.stop_after",
)
# Launchers of a schedule's jobs, with what their options begin with.
_STARTERS = {
    "slurm": ("launcher.sbatch",),
    "ray": ("launcher.address", "launcher.hosts", "launcher.placement_s", "launcher.threads"),
}
_GROUPS = ("model", "data", "strategy", "hardware", "optimizer", "launcher")


def asks_version(arguments: Sequence[str]) -> bool:
    """Return whether the command line has the flag `--version`, or an abbreviation that argparse
    accepts for it."""
    return any(len(text) > 2 and "--version".startswith(text) for text in arguments)


def rewritten(arguments: Sequence[str]) -> list[str]:
    """Return the command line in the form that Hydra accepts, overrides before flags.

    `model._target_` without `model` implies `model=custom`; likewise for `data._target_` and
    `optimizer._target_`. Keys that no config file lists get a `++`: arguments of these classes,
    keys of a strategy, callbacks, options of `sbatch`, and keys of mappings that the config files
    leave empty. Later readers of the config check such keys.

    Raises ConfigError for flags and overrides that cannot be parsed.
    """
    options = parsed_flags(arguments)
    if options.shell_completion:
        return list(arguments)
    flags = [text for text in arguments if text not in options.overrides]
    parsed = parsed_overrides(options.overrides)
    keys = {o.key_or_group for o in parsed}
    own = [x for x in _OF_CLASSES if f"{x}._target_" in keys and x not in keys]
    custom = {*own, *(o.key_or_group for o in parsed if o.value() == "custom")}
    on_slurm = any(o.key_or_group == "launcher" and o.value() == "slurm" for o in parsed)
    overrides = []
    for override in parsed:
        first, _, name = override.key_or_group.partition(".")
        text = str(override.input_line)
        free = (
            first in ("strategy", "callbacks")
            or (on_slurm and override.key_or_group.startswith("launcher.sbatch"))
            or (first in custom and name.split(".")[0] not in _OF_CLASSES.get(first, (name,)))
            or override.key_or_group.startswith(tuple(f"{key}." for key in _MAPPINGS))
        )
        if (name or first == "callbacks") and free and not override.is_delete():
            text = "++" + text.lstrip("+")
        if override.key_or_group == "strategy.graph" and not override.is_delete():
            # Hydra would merge a given graph into the file's graph. The deletion has it replaced.
            overrides.append("~strategy.graph")
        overrides.append(text)
    return [*(f"{group}=custom" for group in own), *overrides, *flags]


def read_own_files(arguments: Sequence[str]) -> None:
    """Have Hydra read the user's own config files before the built-in ones.

    arguments: the command line, which names the folders of these files.
    """
    options = parsed_flags(arguments)
    parsed = [o for text in options.overrides if (o := read_override(text, []))]
    put_own_files_first(options.config_dir, parsed)


def check(arguments: Sequence[str]) -> None:
    """Compose and read the config as Hydra will, before Hydra makes a directory or calls a target.

    For a sweep, only faults that would stop the whole sweep are raised, since each job's request is
    read when the job runs. Raises ConfigError with all faults.
    """
    options = parsed_flags(arguments)
    if options.shell_completion:
        return
    name = options.config_name or "config"
    shows = options.help or options.hydra_help or options.info
    faults: list[Fault] = []
    with initialised(options.config_dir, options.config_path):
        parsed = OverridesParser.create().parse_overrides(list(options.overrides))
        common = [str(o.input_line) for o in parsed if not o.is_sweep_override()]
        if shows:  # Hydra reports faults itself, but first runs the logging config
            attempt = _attempt(name, common)
            if isinstance(attempt, RequestError):
                raise attempt
            faults = code_faults(attempt) if isinstance(attempt, DictConfig) else []
            if faults:
                raise ConfigError(faults)
            return
        mode = next((value_of(o) for o in parsed if o.key_or_group == "hydra.mode"), "")
        multirun = options.multirun or mode == "MULTIRUN"
        if not multirun:
            refuse_swept(parsed)
        config, wrong = _compose(name, common)
        faults += wrong
        if config is not None:
            faults += code_faults(config)
            multirun = multirun or (not mode and config.hydra.mode == RunMode.MULTIRUN)
        study = config is not None and is_study(config)
        if config is not None and study and not multirun:
            if any(o.key_or_group.startswith((_SWEEPER, *_SWEEPER_KEYS)) for o in parsed):
                rule = "has no effect on one run"
                faults.append(Fault("hydra/sweeper", "optuna", rule, "add -m to sweep"))
            study = False
        every: list[list[str]] = [[]]
        wants = any(o.key_or_group == _SWEEPER and o.value() == "optuna" for o in parsed)
        if faults and (study or wants):  # the sweep cannot be checked against a faulty config
            has_none = any(fault.key == _SWEEPER for fault in faults)
            own_faults = [x for x in faults if not (has_none and x.key.startswith(_SWEEPER_KEYS))]
            raise ConfigError(own_faults)
        if config is not None and study:
            every = _of_study(config, parsed)
        elif multirun:
            every = jobs(config, options.overrides)
        for number, overrides in enumerate(every):
            if multirun:
                config, wrong = _compose(name, overrides)
                faults += [fault for fault in wrong if fault not in faults]
                if config is not None:
                    faults += [fault for fault in code_faults(config) if fault not in faults]
            if config is None or options.cfg:
                continue
            given = overrides if multirun else options.overrides
            faults += [
                x for x in _without_effect(config.get("mode"), given, wrong) if x not in faults
            ]
            if not multirun:
                faults += _request_faults(config, wrong, given)
            if not faults and not study:  # a study's run directories may exist already
                faults += run_dir_faults(config, number if multirun else None)
    if faults:
        raise ConfigError(faults)


def parsed_overrides(texts: Sequence[str]) -> list[Override]:
    """Return the parsed overrides of `texts`. Raises ConfigError for texts that cannot be
    parsed."""
    faults: list[Fault] = []
    parsed = [o for text in texts if (o := read_override(text, faults)) is not None]
    if faults:
        raise ConfigError(faults)
    return parsed


def with_hydra(name: str | None, overrides: Sequence[str]) -> DictConfig:
    """Return the config of one job, with Hydra's own part. Call it within `initialised`.

    name: the name of the primary config; None for the built-in one.

    Raises ConfigError with all faults of the overrides.
    """
    config, faults = _compose(name or "config", overrides)
    if config is None or faults:
        raise ConfigError(faults)
    return config


def _of_study(config: DictConfig, overrides: Sequence[Override]) -> list[list[str]]:
    """Return the overrides of the jobs whose composition tests a sweep by Optuna.

    config: the config that all jobs share.
    overrides: all overrides of the command line.

    Raises ConfigError with the faults of the study.
    """
    hydras = [str(o.input_line) for o in overrides if o.is_hydra_override()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    shared = [o for o in overrides if o.is_sweep_override() or not o.is_hydra_override()]
    parsed = [
        *params_of(config, parser),
        *parser.parse_overrides([str(o.input_line) for o in shared]),
    ]
    _, space, fixed, _ = read_study(config, parsed)
    return [[*job, *hydras] for job in points(space, fixed, parsed)]


def composed_job(sweep: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return the config of one job of a running sweep, with Hydra's own part.

    sweep: the config of the sweep.
    overrides: the job's overrides, except Hydra's own.

    Raises ConfigError with all faults.
    """
    loader = GlobalHydra.instance().config_loader()
    try:
        config = loader.load_sweep_config(sweep, list(overrides))
    except Exception:
        hydras = [str(text) for text in sweep.hydra.overrides.hydra]
        _, faults = _compose(str(sweep.hydra.job.config_name), [*overrides, *hydras])
        if not faults:
            raise
        raise ConfigError(faults) from None
    faults = [*interpolation_faults(config), *code_faults(config)]
    if faults:
        raise ConfigError(faults)
    return config


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return the config of one job, without Hydra's own part. Raises ConfigError with all faults of
    the overrides."""
    with initialised(None):
        return without_hydra(with_hydra(None, overrides))


@contextmanager
def initialised(config_dir: str | None, config_path: str | None = None) -> Iterator[None]:
    """Initialise Hydra, within the context, as Hydra's command line will.

    config_dir: the user's own folder of config files, which is searched first; None without one.
    config_path: the folder of the primary config; None for the built-in one.

    Raises ConfigError where a given path is not a folder.
    """
    folders = (("--config-dir", config_dir), ("--config-path", config_path))
    for flag, given in folders:
        if given is not None and "://" not in given and not Path(given).absolute().is_dir():
            fault = Fault(flag, given, "is not a folder", "name one with your files")
            raise ConfigError([fault])
    path = create_config_search_path(config_path or f"pkg://{CONFIG_MODULE}")
    if config_dir is not None:
        assert isinstance(path, ConfigSearchPathImpl)
        folder = f"file://{Path(config_dir).absolute()}"
        path.prepend("command-line", folder, SearchPathQuery(provider="schema"))
    read_within_bounds()
    put_released_sweeper_aside()
    Hydra.create_main_hydra2("whale-train", path)
    try:
        yield
    finally:
        GlobalHydra.instance().clear()


def parsed_flags(arguments: Sequence[str]) -> Namespace:
    """Return the parsed flags of Hydra's command line, with the overrides in `overrides`.

    Flags and overrides may stand in any order. Raises ConfigError for unknown flags and for
    `--experimental-rerun`.
    """
    parser = get_args_parser()
    parser.prog = "whale-train"
    options, unknown = parser.parse_known_intermixed_args(list(arguments))
    if unknown:
        # argparse also lists the words behind an unknown flag, which may be right.
        flags = [x for x in unknown if x.startswith("-")] or unknown
        raise ConfigError([Fault(x, "", "is not a flag", remedy_for_flag(x)) for x in flags])
    if options.experimental_rerun is not None:
        rule = "would unpickle a file, which can call anything"
        remedy = "give the overrides of the run, which are in its .hydra/overrides.yaml"
        given = str(options.experimental_rerun)
        raise ConfigError([Fault("--experimental-rerun", given, rule, remedy)])
    return options


def _compose(name: str, overrides: Sequence[str]) -> tuple[DictConfig | None, list[Fault]]:
    """Return the config, with Hydra's own part, and the faults of the overrides.

    Overrides that fail are left out one by one, so that the faults of all are found: first
    overrides that choose an option, then overrides that set a key. The config is None where the
    fault is not in an override.
    """
    config = _attempt(name, overrides)
    if isinstance(config, DictConfig):
        return config, []
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    choices = [str(override.input_line) for override in parsed if is_choice(override)]
    errors = list[tuple[Override, Exception]]()
    while not isinstance(config := _attempt(name, choices), DictConfig):
        if isinstance(config, RequestError):
            return None, [*_override_faults(errors, None, parsed), *config.faults]
        culprit = _culprit(name, choices, config)
        if culprit is None:
            return None, [*_override_faults(errors, None, parsed), _file_fault(config)]
        errors += [(o, config) for o in parsed if str(o.input_line) == choices[culprit]]
        del choices[culprit]
    accepted = list(choices)
    parts = [[override for override in parsed if not is_choice(override)]]
    while parts:  # parts that fail are halved, in order
        part = parts.pop(0)
        attempt = _attempt(name, [*accepted, *(str(override.input_line) for override in part)])
        if isinstance(attempt, DictConfig):
            config = attempt
            accepted += [str(override.input_line) for override in part]
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
    """Return the faults of overrides that raised errors.

    errors: every wrong override and its error.
    config: the config composed without the wrong overrides; None where it cannot be composed.
    overrides: all overrides of the request.

    An override of a key below an option that does not exist gets no fault, since it may be right.
    """
    missing = {o.key_or_group for o, e in errors if isinstance(e, MissingConfigException)}
    chosen = {override.key_or_group for override in overrides}
    silent = missing if config is None else unread(missing, config, chosen)
    faults: list[Fault] = []
    for override, error in errors:
        key = override.key_or_group
        if isinstance(error, RequestError):
            faults += [fault for fault in error.faults if fault not in faults]
        elif key in missing or key.partition(".")[0] not in silent:
            faults.append(_override_fault(override, error, config))
    return faults


def _attempt(name: str, overrides: Sequence[str]) -> DictConfig | Exception:
    """Return the composed config, or the exception that composing raises.

    Hydra, OmegaConf and the libraries below them raise errors of any kind for values that they do
    not expect.
    """
    try:
        config = compose(name, list(overrides), return_hydra_config=True)
    except Exception as error:
        return error
    passed = interpolation_faults(config)
    return ConfigError(passed) if passed else config


def _culprit(name: str, overrides: Sequence[str], error: Exception) -> int | None:
    """Return the index of the first override whose removal changes or removes `error`; None without
    one."""
    for i in range(len(overrides)):
        attempt = _attempt(name, [*overrides[:i], *overrides[i + 1 :]])
        if isinstance(attempt, DictConfig) or str(attempt) != str(error):
            return i
    return None


def _override_fault(override: Override, error: Exception, config: DictConfig | None) -> Fault:
    """Return the fault of one override for which Hydra or OmegaConf raised `error`.

    config: the config composed without the override; None where it cannot be composed.
    """
    key, value = override.key_or_group, value_of(override)
    said = " ".join(str(error).split())
    if isinstance(error, MissingConfigException):
        missing = str(error.missing_cfg_file or "").rpartition("/")[2]
        remedy = nearest(missing, error.options) if error.options else "name a file that exists"
        instead = known_elsewhere(missing)
        if key == "strategy" and instead is not None and instead.chooses(key):
            remedy = instead.remedy
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
    if key == PARAMS or key.startswith(f"{PARAMS}."):  # OmegaConf cannot update a key below null
        rule = "is for config files, and cannot be given on the command line"
        return Fault(key, value, rule, "write the choices themselves, as -m seed=1,2")
    of_a_file = (yaml.YAMLError, OSError, ValueError, AssertionError)
    is_theirs = isinstance(error, HydraException | OmegaConfBaseException)
    if is_theirs or not isinstance(error, of_a_file):
        reason = " ".join(str(error.__cause__ or error).split("\n")[0].split())
        if reason.startswith("Cannot merge"):
            return _other_kind(override)
        return Fault(key, value, f"cannot be set ({reason})", remedy_for(key, config))
    return _file_fault(error)


def _other_kind(override: Override) -> Fault:
    """Return the fault of a list in place of a mapping, or of a mapping in place of a list."""
    key, value = override.key_or_group, value_of(override)
    if isinstance(override.value(), list):
        remedy = f"write {key}.KEY=VALUE"
        if key == "callbacks":
            remedy = "write callbacks.mine._target_=my_module.MyCallback"
        return Fault(key, value, "is not a mapping", remedy)
    return Fault(key, value, "is not a list", f"write {shlex.quote(f'{key}=[{value}]')}")


def _file_fault(error: Exception) -> Fault:
    """Return the fault of one of the user's config files, which raised `error` when read."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        rule = _not_yaml(error, error.problem_mark)
        return Fault(str(error.problem_mark.name), "", rule, "correct it there")
    if isinstance(error, MissingConfigException):
        group, _, option = str(error.missing_cfg_file or "").rpartition("/")
        remedy = nearest(option, error.options) if error.options else "name a file that exists"
        return Fault(group or "--config-name", option, "is not an option", remedy)
    said = " ".join(str(error).split())
    return Fault("config", "", f"cannot be composed ({said})", "correct the file it names")


def _not_yaml(error: yaml.MarkedYAMLError, mark: yaml.Mark) -> str:
    """Return the rule that a file breaks which is not YAML, with its place in the file."""
    return f"is not YAML (line {mark.line + 1}, column {mark.column + 1}: {error.problem})"


def without_hydra(config: DictConfig) -> DictConfig:
    """Return a copy of the config without Hydra's own part."""
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def explained_strategy(name: str) -> dict[str, Any]:
    """Return the content of the strategy to explain: of the file that is named, or of the strategy
    of that name. Hydra must be initialised. Raises ConfigError where there is none, where the
    content has faults, and where it is a search, with whose result explain compares."""
    if name.endswith((".yaml", ".yml")):
        content = _strategy_file(name)
    else:
        (content,) = compared_strategies([name], "explain").values()
    faults: list[Fault] = []
    if read_strategy(content, name, faults) is not None and content["graph"] == "auto":
        rule = "searches for the fastest strategy, which explain compares others with"
        faults.append(
            Fault("explain", name, rule, "name another, or use strategy=auto in its place")
        )
    if faults:
        raise ConfigError(faults)
    return content


def _strategy_file(name: str) -> dict[str, Any]:
    """Return the content of a strategy's file. Raises ConfigError where it is no mapping."""
    try:
        content = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        rule = f"cannot be read ({str(error).splitlines()[0]})"
        remedy = "name a strategy, or the YAML file of one"
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            rule, remedy = _not_yaml(error, error.problem_mark), "correct it there"
        raise ConfigError([Fault("explain", name, rule, remedy)]) from error
    if not isinstance(content, dict):
        rule, remedy = "is not a mapping", "write a strategy into it, as graph: {replicate: {}}"
        raise ConfigError([Fault("explain", name, rule, remedy)])
    return {str(key): value for key, value in content.items()}


def compared_strategies(names: Sequence[str], asked: str = "compare") -> dict[str, dict[str, Any]]:
    """Return the strategies of these names, as their config files write them.

    asked: the key of the config that names them, for messages.

    Hydra must be initialised. Raises ConfigError for names that are no strategy, and for files that
    cannot be read.
    """
    strategies: dict[str, dict[str, Any]] = {}
    faults = []
    for name in names:
        config = _attempt("config", [f"strategy={name}"])
        if isinstance(config, DictConfig):
            plain = OmegaConf.to_container(config.strategy, resolve=True)
            assert isinstance(plain, dict)
            strategies[name] = {str(key): value for key, value in plain.items()}
        elif isinstance(config, MissingConfigException) and config.options:
            remedy = nearest(name, config.options)
            faults.append(Fault(asked, name, "is not a strategy", remedy))
        else:
            faults.append(_file_fault(config))
    if faults:
        raise ConfigError(faults)
    return strategies


def _request_faults(
    config: DictConfig, wrong: Sequence[Fault], overrides: Sequence[str]
) -> list[Fault]:
    """Return the faults of the request that the config makes.

    config: the config, composed without the overrides that failed.
    wrong: the known faults of overrides. Faults that may follow from these are left out.
    overrides: the overrides as they were given.
    """
    choices = config.hydra.runtime.choices
    names = {str(key): str(value) for key, value in choices.items() if value is not None}
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    # Hydra merges the options in a list into one section, which has no name of its own.
    several = [o for o in parsed if o.key_or_group in _GROUPS and isinstance(o.value(), list)]
    if several:
        rule, named = "is a list, and one option is read", [(o.key_or_group, o) for o in several]
        return [Fault(x, value_of(o), rule, f"write {x}=NAME") for x, o in named]
    given = {o.key_or_group for o in parsed}
    unset = [fault for fault in wrong if fault.key not in choices]
    silent = unread({fault.key for fault in wrong} & {str(key) for key in choices}, config, given)
    try:
        request = read_request(without_hydra(config), names)
        compared_strategies(request.compare)
        if request.explain is not None:
            explained_strategy(request.explain)
        _refuse_two_strategies(request, parsed)
    except ConfigError as error:
        independent = [fault for fault in error.faults if fault.key.partition(".")[0] not in silent]
        return without_doubtful(independent, unset, given)
    return []


def _refuse_two_strategies(request: Request, given: Sequence[Override]) -> None:
    """Raise ConfigError for overrides of the strategy where `explain` or `compare` names others."""
    key = "explain" if request.explain is not None else "compare" if request.compare else ""
    if key:
        rule = f"has no effect beside {key}, which names strategies of its own"
        faults = [
            Fault(o.key_or_group, value_of(o), rule, "leave it out, or write it into a file")
            for o in given
            if o.key_or_group.partition(".")[0] == "strategy"
        ]
        if faults:
            raise ConfigError(faults)


def _without_effect(mode: object, overrides: Sequence[str], wrong: Sequence[Fault]) -> list[Fault]:
    """Return a fault for every override that has no effect on `mode`.

    Only modes that read the record of a run are checked, since the record fixes all other settings.
    An override whose fault is in `wrong` is left out.
    """
    if mode not in READ_ALONE:
        return []
    keys, remedy = READ_ALONE[str(mode)]
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    known = {*keys, *(fault.key for fault in wrong), *_of_starter(mode, parsed)}
    others = [o for o in parsed if o.key_or_group not in known]
    rule = f"has no effect on mode={mode}"
    faults = []
    for o in others:
        if not o.key_or_group.startswith("hydra"):
            group = o.key_or_group.partition(".")[0]
            of_group = REMEDY_BY_GROUP.get((str(mode), group), remedy)
            faults.append(Fault(o.key_or_group, value_of(o), rule, of_group))
    return faults


def _of_starter(mode: object, parsed: Sequence[Override]) -> set[str]:
    """Return the keys of the overrides that say how the jobs of a schedule start: the launcher, if
    it is an engine that runs jobs of a schedule, and options of it."""
    named = next((str(o.value()) for o in parsed if o.key_or_group == "launcher"), "")
    if mode != "schedule" or named not in _STARTERS:
        return set()
    keys = {o.key_or_group for o in parsed}
    return {"launcher", *(key for key in keys if key.startswith(_STARTERS[named]))}
