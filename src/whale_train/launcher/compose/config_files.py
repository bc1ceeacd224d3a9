"""Have Hydra refuse config files that are larger than a bound."""

from contextlib import suppress
from pathlib import Path

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult

from whale_train.bounds import check_yaml


class BoundedFiles(FileConfigSource):
    """Hydra's source of config files in a folder, with every file checked against bounds before it
    is parsed."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the config in a file. Raises ConfigError for a file that exceeds a bound, and the
        errors of Hydra's own source."""
        path = Path(self.path, self._normalize_file_name(config_path))
        if path.exists():
            with suppress(yaml.YAMLError):  # Hydra reports the error with line and column
                check_yaml(path)
        return super().load_config(config_path)


def read_within_bounds() -> None:
    """Have Hydra read config files through `BoundedFiles`, from the next composition on."""
    Plugins.instance()  # registers Hydra's own sources
    SourcesRegistry.instance().types[FileConfigSource.scheme()] = BoundedFiles
