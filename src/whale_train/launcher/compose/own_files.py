"""Have Hydra read the user's own config files first, and note in the plan which files they shadow.

Hydra itself reads an application's files before the folder of `--config-dir` and the folders of
`hydra.searchpath`. With this file, a name that the user and the application both use means the
user's file. The primary config, `config.yaml`, stays the application's, since it defines the keys.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.importlib_resources_config_source import (
    ImportlibResourcesConfigSource,
)
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode

from whale_train.launcher.compose.config_files import BoundedFiles
from whale_train.strategies.plan.plan import Decision

PRIMARY = "config"  # the name of the primary config, which a user's file cannot replace
_BUILT_IN = ("main", "hydra", "schema")  # providers of files that are not the user's own
_OWN = "own"


class _OwnFiles(BoundedFiles):  # type: ignore[misc, unused-ignore]
    """A source of the user's config files in a folder; a primary config there is ignored."""

    @staticmethod
    def scheme() -> str:
        return "own-file"

    def is_config(self, config_path: str) -> bool:
        return config_path not in (PRIMARY, f"{PRIMARY}.yaml") and super().is_config(config_path)


class _OwnPackage(ImportlibResourcesConfigSource):  # type: ignore[misc, unused-ignore]
    """A source of the user's config files in a package; a primary config there is ignored."""

    @staticmethod
    def scheme() -> str:
        return "own-pkg"

    def is_config(self, config_path: str) -> bool:
        return config_path not in (PRIMARY, f"{PRIMARY}.yaml") and super().is_config(config_path)


def put_own_files_first(config_dir: str | None, overrides: Sequence[Override]) -> None:
    """Have Hydra, in this process, read the user's own files before the built-in ones.

    config_dir: the folder of `--config-dir`, which is read first; None without the flag.
    overrides: all overrides. Folders and packages in an override of `hydra.searchpath` are read
        after `config_dir`.
    """
    folders = [] if config_dir is None else [f"own-file://{Path(config_dir).absolute()}"]
    for override in overrides:
        value = override.value() if override.key_or_group == "hydra.searchpath" else None
        for path in value if isinstance(value, list) else []:
            scheme, separator, where = str(path).rpartition("://")
            if scheme in ("", "file") or not separator:
                folders.append(f"own-file://{Path(where).absolute()}")
            elif scheme == "pkg":
                folders.append(f"own-pkg://{where}")

    class OwnFilesFirst(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            for folder in reversed(folders):
                search_path.prepend(_OWN, folder)

    for source in (_OwnFiles, _OwnPackage):
        SourcesRegistry.instance().register(source)
    if folders:
        Plugins.instance().register(OwnFilesFirst)


def said_of_own_files(hydra: Any) -> tuple[Decision, ...]:
    """Return notes for the plan on the user's files that have the name of a built-in file of this
    job. Hydra must be initialised.

    hydra: Hydra's own part of the job's config.
    """
    if all(source.provider in _BUILT_IN for source in hydra.runtime.config_sources):
        return ()
    loader = GlobalHydra.instance().config_loader()
    name, overrides = str(hydra.job.config_name), [*hydra.overrides.task, *hydra.overrides.hydra]
    defaults = loader.compute_defaults_list(name, overrides, RunMode.RUN).defaults
    sources = [_source(x.schema, x.provider, x.path) for x in hydra.runtime.config_sources]
    notes: dict[str, Decision] = {}
    for path in dict.fromkeys([PRIMARY, *(default.config_path for default in defaults)]):
        having = [source for source in sources if source is not None and source.is_config(path)]
        built_in = next((source for source in having if source.provider in _BUILT_IN), None)
        own = [source for source in having if source.provider not in _BUILT_IN]
        if built_in is None:
            continue
        group, _, option = path.rpartition("/")
        known = f"the built-in {group}={option}" if group else f"the built-in {option}.yaml"
        for source in own:
            where = _path(source, path)
            if path == PRIMARY:
                decision = Decision(PRIMARY, known, where, _OF_PRIMARY)
            elif source is having[0]:
                decision = Decision(group, where, known, "files of your own are read first")
            else:
                why = "another of your files, or the built-in one, is read first"
                decision = Decision(group, _path(having[0], path), where, why)
            notes.setdefault(where, decision)
    return tuple(notes.values())


_OF_PRIMARY = (
    "a primary config is read under another name, by --config-name; files of groups are read"
)


def _source(schema: str, provider: str, path: str) -> ConfigSource | None:
    """Return Hydra's source of config files at a path; None for a kind of source that is not
    registered."""
    try:
        return SourcesRegistry.instance().resolve(schema)(provider, f"{schema}://{path}")
    except ValueError:  # a kind of source that is not registered
        return None


def _path(source: ConfigSource, config_path: str) -> str:
    """Return the path of a config for messages, relative if it is below the working directory."""
    if not source.scheme().endswith("file"):
        return f"{source.path}/{config_path}.yaml"
    path = Path(source.path, f"{config_path}.yaml")
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
