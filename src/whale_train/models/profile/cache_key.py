"""Make the key of a model's profile, without importing torch or building the model.

The key is a digest of all content that a profile depends on: two profiles with the same key are
equal. Where some of that content cannot be known, there is no key: the constructor of a user's
model may read anything.
"""

import os
import sys
from collections.abc import Iterable
from hashlib import sha256
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from whale_train.errors import ConfigError
from whale_train.models.options import ModelOptions
from whale_train.models.weights.saved_configs import saved_configs
from whale_train.strategies.graph.operation_graph import InputField

_PACKAGE = Path(__file__).parents[2]
OWN_SOURCES = (  # the code that makes a profile and writes it
    *sorted((_PACKAGE / "models").rglob("*.py")),
    *(
        _PACKAGE / "strategies" / "graph" / f"{name}.py"
        for name in ("saved_tensors", "operation_graph", "block_paths", "profile_json", "rewrites")
    ),
    *(
        _PACKAGE / f"{name}.py"
        for name in ("bounds", "errors", "extras", "hub", "other_trainers", "own_code")
    ),
    *(
        _PACKAGE / f"{name}.py"
        for name in ("checkpoints/safetensors_files", "checkpoints/url_path", "validation")
    ),
)
_OWN_MODELS = "whale_train.models."
# Prefixes of the environment variables that torch and transformers read. The compiler, which is not
# used here, sets a variable of its own.
_COMPILER_VARIABLES = "TORCHINDUCTOR"
_READ_VARIABLES = (
    *("ACCELERATE", "ATEN", "CUDA", "FAKE_", "FLASH", "FX_", "HF_", "HIP", "KERNELS", "LOCAL_"),
    *("NPU", "NVIDIA", "PJRT", "PT", "PYTORCH", "RANK", "ROC", "TORCH", "TRANSFORMERS", "TRITON"),
    *("TRUST_", "USE_", "WORLD_", "XLA"),
)
_NO_CODE = ("__pycache__", "include")
_IMPORTABLE = (".py", ".pyc", ".so", ".dist-info", ".egg-info", ".egg-link")


def profile_key(
    options: ModelOptions, fields: tuple[InputField, ...], *, by_folding: bool
) -> str | None:
    """Return the key of a profile that `profile_model` makes in this environment, a SHA-256 in hex.

    Return None for a model whose profile may depend on more than the key's content.
    """
    is_ours = options.target.startswith(_OWN_MODELS)
    given = (options.arguments, options.config, options.adapters)
    if not is_ours or options.own_loss is not None or not all(map(_is_plain, given)):
        return None
    search = [os.getcwd(), *sys.path]  # where a model's class is looked for
    try:
        saved = saved_configs(options.pretrained)
        if _names_others(options.config) or any(_names_others(config) for config in saved.values()):
            return None
        content = (
            options.model_dump(),
            fields,
            by_folding,
            saved,
            [sha256(path.read_bytes()).hexdigest() for path in OWN_SOURCES],
            _files_of("torch", sys.path),
            _files_of("transformers", search) if options.is_hugging_face else [],
            _files_of("peft", search) if options.adapters is not None else [],
            _importable(search),
            sys.version,
            _environment(),
            sorted(name for name in os.listdir("/dev") if name.startswith(("nvidia", "kfd"))),
        )
    except (OSError, ValueError, ConfigError):
        return None
    return sha256(repr(content).encode()).hexdigest()


def _environment() -> list[tuple[str, str]]:
    """Return (name, value) of the environment variables that torch and transformers may read,
    sorted."""
    return sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(_READ_VARIABLES) and not name.startswith(_COMPILER_VARIABLES)
    )


def _is_plain(value: Any) -> bool:
    """Return whether `repr(value)` determines `value`."""
    if type(value) is dict:
        return all(_is_plain(x) for pair in value.items() for x in pair)
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def _names_others(config: Any) -> bool:
    """Return whether a config of transformers may refer to parts elsewhere.

    Such parts are a backbone by its name, and code or kernels of a repository.
    """
    if isinstance(config, dict):
        return any(
            "backbone" in str(key) or (key != "_name_or_path" and _names_others(value))
            for key, value in config.items()
        )
    if isinstance(config, list):
        return any(map(_names_others, config))
    return isinstance(config, str) and "/" in config


def _files_of(package: str, search: list[str]) -> list[tuple[str, int, int]]:
    """Return (path, bytes, time of the last change in ns) of every source and library of a package.

    The version is not enough, because people edit installed packages. Raises ValueError for a
    package that is not installed as a folder.
    """
    spec = PathFinder.find_spec(package, search)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{package} is no folder")
    folders, files = list(spec.submodule_search_locations), []
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name.endswith((".py", ".so")):
                    status = entry.stat()
                    files.append((entry.path, status.st_size, status.st_mtime_ns))
                elif entry.is_dir() and entry.name not in _NO_CODE:
                    folders.append(entry.path)
    return sorted(files)


def _importable(search: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return for each folder of `search` (folder, names of importable modules and installed
    packages).

    Installed distributions have their versions in their names. Libraries behave differently by what
    else is installed.
    """
    here = os.getcwd()
    contents = []
    for folder in search:
        path = os.path.abspath(folder)
        names = sorted(os.listdir(path)) if os.path.isdir(path) else []
        importable = [n for n in names if n.endswith(_IMPORTABLE) or n.isidentifier()]
        contents.append(
            ("." if path == here else path, [n for n in importable if n != "__pycache__"])
        )
    return contents
