"""The user's config files as Hydra reads them, within bounds."""

from contextlib import suppress
from pathlib import Path

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult

from whale_train.bounds import check_yaml


class BoundedFiles(FileConfigSource):
    """Hydra's folder of config files, each of which is looked at before it is made a config."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the config of a file. Raises ConfigError for one that passes a bound, and what
        Hydra raises."""
        path = Path(self.path, self._normalize_file_name(config_path))
        if path.exists():
            with suppress(yaml.YAMLError):  # which Hydra will say of it, and where
                check_yaml(path)
        return super().load_config(config_path)


def read_within_bounds() -> None:
    """Have Hydra read folders of config files by `BoundedFiles`, from the next composing on."""
    Plugins.instance()  # registers Hydra's own
    SourcesRegistry.instance().types[FileConfigSource.scheme()] = BoundedFiles
