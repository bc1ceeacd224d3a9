"""Compose a request within a program that may use Hydra itself.

Overrides are rewritten and checked as on the command line, with the same messages. Hydra's global
state is set aside in the meantime, and restored.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

from whale_train.config import Request, read_request
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.compose import command_line
from whale_train.launcher.compose.own_files import said_of_own_files
from whale_train.launcher.compose.sweeps import value_of

RUN_DIR = "hydra.run.dir"
_READ = (RUN_DIR, "hydra.searchpath")  # Hydra's own keys that have an effect from Python
# Flags that have an effect from Python, by argparse's names.
_FLAGS = ("config_dir", "config_name", "overrides")


@dataclass(frozen=True)
class Composed:
    """A request with the run directory of its config.

    request: the request.
    run_dir: the run directory, which may not exist yet.
    names_dir: whether an override names the run directory.
    """

    request: Request
    run_dir: Path
    names_dir: bool


def composed_request(arguments: Sequence[str]) -> Composed:
    """Return the request that the arguments of a command line make.

    Raises ConfigError with all faults, among them flags and keys of Hydra without effect on a
    single request.
    """
    with _hydra_set_aside():
        arguments = command_line.rewritten(arguments)
        options = command_line.parsed_flags(arguments)
        overrides = command_line.parsed_overrides(options.overrides)
        faults = [
            Fault(f"--{name.replace('_', '-')}", "", "is for the command", "leave it out")
            for name, value in vars(options).items()
            if value not in (None, False, []) and name not in _FLAGS
        ]
        faults += [
            Fault(key, value_of(o), "has no effect from Python", "leave it out")
            for o in overrides
            if (key := o.key_or_group).partition(".")[0] == "hydra" and key not in _READ
        ]
        if faults:
            raise ConfigError(faults)
        command_line.read_own_files(arguments)
        command_line.check(arguments)
        with command_line.initialised(options.config_dir):
            config = command_line.with_hydra(options.config_name, options.overrides)
            HydraConfig.instance().set_config(config)
            choices = config.hydra.runtime.choices
            names = {str(key): str(value) for key, value in choices.items() if value is not None}
            files = said_of_own_files(config.hydra)
            request = read_request(command_line.without_hydra(config), names, files)
            named = any(o.key_or_group == RUN_DIR for o in overrides)
            return Composed(request, Path(str(config.hydra.run.dir)), named)


@contextmanager
def _hydra_set_aside() -> Iterator[None]:
    """Set the global state of Hydra and OmegaConf aside within the context, and restore it.

    The state consists of Hydra's singletons (initialisation, Hydra's own config, plugins, sources
    of files) and OmegaConf's resolvers. The ConfigStore stays, since Hydra fills it only once, at
    import.
    """
    ConfigStore.instance()
    instances, resolvers = Singleton._instances, dict(BaseContainer._resolvers)
    Singleton._instances = {ConfigStore: instances[ConfigStore]}
    try:
        OmegaConf.register_new_resolver(
            "whale_suffix", lambda: token_hex(3), use_cache=True, replace=True
        )
        yield
    finally:
        Singleton._instances = instances
        BaseContainer._resolvers = resolvers
