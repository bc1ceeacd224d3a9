"""Find the remedy for keys that a config does not have, and leave out faults that such keys cause.

A remedy names only keys that the request may set: keys of the chosen options, in the requested
mode. If another option has the key, the remedy names that option.
"""

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches

from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from whale_train.config import READING
from whale_train.errors import Fault, closest, listed
from whale_train.other_trainers import known_elsewhere
from whale_train.schedule_options import ScheduleOptions

# Keys that identify a file of a group. They change with the choice of another file.
_OF_FILES = ("kind", "name", "_target_")
_MODES = {
    "compare": ("plan",),
    "explain": ("plan",),
    "rehearse": ("plan", "rehearse"),
    "verify.steps": ("verify",),
    "verify.tolerance": ("verify",),
    "checkpoint.path": READING,
    "path": (*READING, "audit", "view"),
    "against": ("view",),
    "run": ("audit",),
    "audit.step": ("audit",),
    "jobs": ("schedule",),
    **{f"schedule.{name}": ("schedule",) for name in ScheduleOptions.model_fields},
}
_OF_RECORD = ("mode", "path", "run", "checkpoint", "checkpoint.path")
_OF_SCHEDULE = (
    *("mode", "jobs", "seed", "hardware", "hardware.devices", "hardware.nodes", "hardware.network"),
    *("schedule", *(f"schedule.{name}" for name in ScheduleOptions.model_fields)),
)
# Modes that read a record or a file of requests: the keys with an effect, and the remedy for any
# other key.
READ_ALONE = {
    "export": (_OF_RECORD, "leave it out: the checkpoint has it"),
    "audit": ((*_OF_RECORD, "audit", "audit.step"), "leave it out: the run has it"),
    "view": (("mode", "path", "against"), "leave it out: the plan has it"),
    "schedule": (*(_OF_SCHEDULE, "leave it out, or write it into the commands of jobs"),),
}
# Remedies of these modes for the keys of a group, in place of the mode's.
REMEDY_BY_GROUP = {
    ("schedule", "launcher"): "leave it out, for jobs on this host, or use launcher=slurm, with "
    "launcher.sbatch, or launcher=ray"
}
_WORD = r"\w[\w.]*\w"
_NO_GROUPS = (
    "train",
    "verify",
    "checkpoint",
    "audit",
    "schedule",
)  # sections without options to choose from


def remedy_for(key: str, config: DictConfig | None) -> str:
    """Return the remedy for a key that the config does not have. Hydra must be initialised.

    key: the unknown key.
    config: the config of the rest of the request; None where it cannot be composed.
    """
    if config is None:
        return "see whale-train --cfg job for all keys"
    mode = OmegaConf.select(config, "mode")
    keys = _settable(config, mode)
    instead = known_elsewhere(key) if mode not in READ_ALONE else None
    options = _options_with(key) if mode not in READ_ALONE or key in keys else []
    name = key.rpartition(".")[2]
    same = [x for x in keys if x.rpartition(".")[2] == name and x.count(".") < 2]
    close = same[0] if len(same) == 1 else _spelled(key, keys)
    if options:
        return f"{_any_of(options)} {'has' if len(options) == 1 else 'have'} it"
    if instead is not None:
        return instead.remedy
    if close:
        return f"did you mean {close}?"
    if mode in READ_ALONE:
        return READ_ALONE[str(mode)][1]
    return "see whale-train --cfg job for all keys"


def remedy_for_flag(text: str) -> str:
    """Return the remedy for a flag that Hydra does not have."""
    instead = known_elsewhere(text.partition("=")[0])
    if instead is not None:
        return instead.remedy
    return "see whale-train --hydra-help for the flags; settings are KEY=VALUE"


def is_choice(override: Override) -> bool:
    """Return whether an override chooses the option of a config group, or names folders of config
    files."""
    sources = GlobalHydra.instance().config_loader().get_sources()
    group = override.key_or_group
    is_group = any(source.is_group(group) for source in sources if source.available())
    return group == "hydra.searchpath" or (is_group and not isinstance(override.value(), dict))


def unread(missing: Iterable[str], config: DictConfig, chosen: Collection[str]) -> set[str]:
    """Return the sections of `config` that cannot be checked because an option does not exist.

    missing: the groups whose chosen option does not exist; all are in the result.
    config: the config composed without these choices.
    chosen: the keys that the request sets. A missing option may choose options of other groups, as
        an experiment does. In that case, the result also has every group that is not in `chosen`.
    """
    groups = {str(key) for key in config.hydra.runtime.choices if "/" not in str(key)}
    sections = groups & {str(key) for key in config}
    missing = set(missing)
    everywhere = missing & (groups - sections)
    return missing | ((sections - set(chosen)) if everywhere else set())


def without_doubtful(
    faults: Iterable[Fault], unknown: Iterable[Fault], given: Collection[str]
) -> list[Fault]:
    """Return the faults that do not follow from a mistyped key.

    faults: all faults of the request.
    unknown: the faults of unknown keys. Each remedy names the keys that may have been meant.
    given: the keys that the request sets.

    A fault is left out if it names a key that may have been meant and is not in `given`: the fault
    then concerns a default that the user wanted to replace.
    """
    words = {word for fault in unknown for word in re.findall(_WORD, fault.remedy)}
    meant = {word for word in words if "." in word or word in ("checkpoint", "seed", "mode")}
    meant -= set(given)
    return [x for x in faults if not meant & set(re.findall(_WORD, str(x)))]


def _settable(config: DictConfig, mode: object) -> list[str]:
    """Return the keys that a request in `mode` may set, with a few of Hydra's own keys."""
    if mode == "export":
        return ["mode", "checkpoint", "path", "hydra.run.dir"]
    if mode == "audit":
        return ["mode", "path", "run", "audit.step"]
    if mode == "view":
        return ["mode", "path", "against", "hydra.run.dir"]
    if mode == "schedule":
        return [*_OF_SCHEDULE, "hydra.run.dir"]
    keys: list[str] = []

    def visit(value: object, path: str) -> None:
        name = path.rpartition(".")[2]
        is_set = name not in _OF_FILES and path not in _NO_GROUPS
        if is_set and mode in _MODES.get(path, (mode,)):
            keys.append(path)
        if isinstance(value, dict):
            for key, item in value.items():
                visit(item, f"{path}.{key}")

    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    for key, value in plain.items():
        if key != "hydra":
            visit(value, str(key))
    of_model = ["model._target_"] if "_target_" in (plain.get("model") or {}) else []
    return [*keys, *of_model, "experiment", "hydra.run.dir", "hydra.sweep.dir"]


def _spelled(key: str, keys: Collection[str]) -> str | None:
    """Return the key of `keys` that the mistyped `key` probably means, or None.

    If the section of `key` exists, the last names of the section's keys are compared. If not, whole
    keys are compared.
    """
    section, _, name = key.rpartition(".")
    if section and any(x.startswith(f"{section}.") for x in keys):
        beside = {x.rpartition(".")[2]: x for x in keys if x.rpartition(".")[0] == section}
        close = closest(name, beside)
        return beside[close] if close and _alike(name, close) else None
    tops = [x for x in keys if bool(section) == ("." in x)]
    near = get_close_matches(key, sorted(tops), cutoff=0.75)
    near.sort(key=lambda x: sorted(x) != sorted(key))
    return next((x for x in near if _alike(name, x.rpartition(".")[2])), None)


def _alike(name: str, other: str) -> bool:
    """Return whether one name may be a misspelling of the other: both have the same letters, or
    difflib's similarity ratio is at least 0.7."""
    if sorted(name) == sorted(other):
        return True
    return bool(get_close_matches(name, [other], cutoff=0.7))


def _options_with(key: str) -> list[str]:
    """Return the options, as GROUP=OPTION, whose files have the key `key`."""
    group, _, rest = key.partition(".")
    loader = GlobalHydra.instance().config_loader()
    named = rest and group != "hydra"
    options = []
    for option in loader.get_group_options(group, ObjectType.CONFIG) if named else []:
        path = f"{group}/{option}"
        source = next((s for s in loader.get_sources() if s.is_config(path)), None)
        try:
            content: object = source.load_config(path).config if source is not None else {}
        except Exception:  # a user's file that cannot be read
            continue
        if isinstance(content, DictConfig) and rest.split(".")[0] in list(content):
            options.append(f"{group}={option}")
    return options


def _any_of(options: list[str], most: int = 4) -> str:
    """Return the text `GROUP=A, B` for options of one group, with at most `most` names."""
    group = options[0].partition("=")[0]
    names = [option.partition("=")[2] for option in options]
    return f"{group}={listed(names, most)}"
