"""Hydra's command line, checked before Hydra runs: its complaints in our words, exit status 2.

Hydra itself then composes, sweeps and makes the directories. Owns the few rewritings that let a
user's own model take arguments the config files cannot list.
"""

import re
from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_module
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from whale_train.config import close_key
from whale_train.errors import ConfigError, Fault, nearest

CONFIG_MODULE = "whale_train.conf"

# What the model group itself defines; every other key under model is an argument of its class.
_MODEL_KEYS = ("_target_", "loss", "sync_batchnorm", "architecture", "config", "pretrained")


def rewritten(arguments: Sequence[str]) -> list[str]:
    """The command line with `model._target_=` standing for model=custom, and arguments of a
    model's class allowed though no file lists them.

    Raises ConfigError for an override that cannot be parsed.
    """
    found = list(arguments)
    parsed = {i: o for i, a in enumerate(found) if (o := _parsed(a)) is not None}
    keys = {o.key_or_group for o in parsed.values()}
    own_class = "model._target_" in keys and "model" not in keys
    custom = own_class or any(
        o.key_or_group == "model" and o.value() == "custom" for o in parsed.values()
    )
    for i, override in parsed.items():
        first, _, name = override.key_or_group.partition(".")
        if custom and first == "model" and name and name.split(".")[0] not in _MODEL_KEYS:
            found[i] = "++" + found[i].lstrip("+")
    return ["model=custom", *found] if own_class else found


def check(arguments: Sequence[str]) -> None:
    """Compose as Hydra will, for every job of a sweep. Raises ConfigError with what is wrong."""
    options = get_args_parser().parse_args(list(arguments))
    if options.help or options.hydra_help or options.info or options.shell_completion:
        return
    for overrides in _jobs(options.overrides, options.multirun):
        composed(overrides)


def composed(overrides: Sequence[str]) -> DictConfig:
    """One job's config. Raises ConfigError."""
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        try:
            return compose("config", list(overrides))
        except MissingConfigException as error:
            raise ConfigError([_missing_option(error)]) from None
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError([_unknown_key(str(error), overrides)]) from None


def _jobs(overrides: Sequence[str], multirun: bool) -> list[list[str]]:
    """The overrides of each job: one, or the product of a sweep's choices."""
    parsed = [(text, _parsed(text)) for text in overrides]
    swept = [text for text, o in parsed if o is not None and o.is_sweep_override()]
    if swept and not multirun:
        remedy = f"add -m to sweep, or quote it: '{swept[0].split('=')[0]}=[...]'"
        raise ConfigError([Fault(swept[0], "", "gives several values to one run", remedy)])
    jobs: list[list[str]] = [[]]
    for text, override in parsed:
        choices = [text]
        if override is not None and override.is_sweep_override():
            key = text.split("=", 1)[0]
            choices = [f"{key}={value}" for value in override.sweep_string_iterator()]
        jobs = [[*job, choice] for job in jobs for choice in choices]
    return jobs


def _parsed(text: str) -> Override | None:
    """An override; None for a flag. Raises ConfigError."""
    if text.startswith("-") or ("=" not in text and not text.startswith("~")):
        if not text.startswith("-"):
            rule = "is neither KEY=VALUE nor a flag"
            raise ConfigError([Fault(text, "", rule, f"write {text}=VALUE")])
        return None
    try:
        return OverridesParser.create().parse_overrides([text])[0]
    except HydraException as error:
        reason = str(error).splitlines()[0].rstrip(".:")
        remedy = "quote values with spaces, commas or brackets, as in 'key={a: 1}'"
        raise ConfigError([Fault(text, "", f"cannot be read ({reason})", remedy)]) from None


def _missing_option(error: MissingConfigException) -> Fault:
    """`strategy=zero4`: a file that is not there."""
    group, _, option = str(error.missing_cfg_file or "").rpartition("/")
    remedy = nearest(option, error.options or [])
    return Fault(group or "config", option, "is not an option", remedy)


def _unknown_key(message: str, overrides: Sequence[str]) -> Fault:
    text = " ".join(message.split())
    key = re.search(
        r"Could not (?:override|append to config|delete from config)[^']*'([^']+)'", text
    )
    if key is None:
        key = re.search(r"[Nn]o match in the defaults list for '([^']+)'|In '([^']+)'", text)
        if key is None:
            return Fault("config", "", f"cannot be composed ({text})", "correct the file it names")
    name = next(part for part in key.groups() if part)
    value = next((o.split("=", 1)[1] for o in overrides if o.startswith(f"{name}=")), "")
    return Fault(name, value, "is not a key of the config", close_key(name, _known_keys()))


def _known_keys() -> list[str]:
    """Every key of the default config and every group."""
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        config: Any = OmegaConf.to_container(compose("config"), resolve=False)
    found: list[str] = []

    def visit(value: Any, path: str) -> None:
        if path:
            found.append(path)
        if isinstance(value, dict):
            for key, item in value.items():
                visit(item, f"{path}.{key}" if path else str(key))

    visit(config, "")
    return [*found, "experiment", "hydra.run.dir", "hydra.sweep.dir"]
