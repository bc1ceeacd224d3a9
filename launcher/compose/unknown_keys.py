"""Keys that a config does not have: what was meant, and what can be said of the rest.

A suggestion names only what this request may set: keys of the options that are chosen, of the
mode that is asked for; or else the option that has the key.
"""

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches

from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from whale_train.errors import Fault, closest, listed
from whale_train.other_trainers import known_elsewhere

# What a file of a group says of itself, which choosing another file changes.
_OF_FILES = ("kind", "name", "_target_")
_MODES = {
    "compare": ("plan",),
    "rehearse": ("plan", "rehearse"),
    "verify.steps": ("verify",),
    "verify.tolerance": ("verify",),
    "checkpoint.path": ("export",),
}
_WORD = r"\w[\w.]*\w"
_NO_GROUPS = ("train", "verify", "checkpoint")  # sections that no name can be given to


def remedy_for(key: str, config: DictConfig | None) -> str:
    """Return the remedy for a key that `config`, of which the rest of the request is composed, does
    not have. Hydra is initialised; None is a request that cannot be composed."""
    if config is None:
        return "see whale-train --cfg job for all keys"
    mode = OmegaConf.select(config, "mode")
    keys = _settable(config, mode)
    instead = known_elsewhere(key) if mode != "export" else None
    options = _options_with(key) if mode != "export" else []
    name = key.rpartition(".")[2]
    same = [x for x in keys if x.rpartition(".")[2] == name and x.count(".") < 2]
    close = same[0] if len(same) == 1 else _spelled(key, keys)
    if options:
        return f"{_any_of(options)} {'has' if len(options) == 1 else 'have'} it"
    if instead is not None:
        return instead.remedy
    if close:
        return f"did you mean {close}?"
    if mode == "export":
        return "leave it out: the checkpoint has it"
    return "see whale-train --cfg job for all keys"


def remedy_for_flag(text: str) -> str:
    """Return the remedy for a flag that Hydra does not have."""
    instead = known_elsewhere(text.partition("=")[0])
    if instead is not None:
        return instead.remedy
    return "see whale-train --hydra-help for the flags; settings are KEY=VALUE"


def is_choice(override: Override) -> bool:
    """Return whether an override chooses the option of a group, or says where files are."""
    sources = GlobalHydra.instance().config_loader().get_sources()
    group = override.key_or_group
    is_group = any(source.is_group(group) for source in sources if source.available())
    return group == "hydra.searchpath" or (is_group and not isinstance(override.value(), dict))


def unread(missing: Iterable[str], config: DictConfig, chosen: Collection[str]) -> set[str]:
    """Return the sections of `config` of which nothing can be said, as the options of the groups
    `missing` are none: these groups, and where one of them may choose others' options, as an
    experiment does, all groups that are not `chosen` by themselves."""
    groups = {str(key) for key in config.hydra.runtime.choices if "/" not in str(key)}
    sections = groups & {str(key) for key in config}
    missing = set(missing)
    everywhere = missing & (groups - sections)
    return missing | ((sections - set(chosen)) if everywhere else set())


def without_doubtful(
    faults: Iterable[Fault], unknown: Iterable[Fault], given: Collection[str]
) -> list[Fault]:
    """Return the faults but those that name a key that one of the `unknown` keys was perhaps meant
    to be, where the request has not `given` it as well: they go by a value that nobody wants."""
    words = {word for fault in unknown for word in re.findall(_WORD, fault.remedy)}
    meant = {word for word in words if "." in word or word in ("checkpoint", "seed", "mode")}
    meant -= set(given)
    return [x for x in faults if not meant & set(re.findall(_WORD, str(x)))]


def _settable(config: DictConfig, mode: object) -> list[str]:
    """Return the keys that a request of this mode may set, and what is often set of Hydra's own."""
    if mode == "export":
        return ["mode", "checkpoint", "hydra.run.dir"]
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
    """Return the key that a mistyped one was meant to be: of its own section, by its last name; or
    of a mistyped section."""
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
    """Return whether one name may be the other mistyped: they begin alike, or have the same
    letters, and are about equally long."""
    if sorted(name) == sorted(other):
        return True
    return bool(get_close_matches(name, [other], cutoff=0.7))


def _options_with(key: str) -> list[str]:
    """Return the options, as GROUP=OPTION, whose files have a key that the chosen one lacks."""
    group, _, rest = key.partition(".")
    loader = GlobalHydra.instance().config_loader()
    named = rest and group != "hydra"
    found = []
    for option in loader.get_group_options(group, ObjectType.CONFIG) if named else []:
        path = f"{group}/{option}"
        source = next((s for s in loader.get_sources() if s.is_config(path)), None)
        try:
            written: object = source.load_config(path).config if source is not None else {}
        except Exception:  # a file of the user's own that cannot be read has no key
            continue
        if isinstance(written, DictConfig) and rest.split(".")[0] in list(written):
            found.append(f"{group}={option}")
    return found


def _any_of(options: list[str], most: int = 4) -> str:
    group = options[0].partition("=")[0]
    names = [option.partition("=")[2] for option in options]
    return f"{group}={listed(names, most)}"
