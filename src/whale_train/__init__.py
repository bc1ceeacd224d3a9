"""Train any PyTorch model on any mix of devices from one declarative config.

`compose`, `plan`, `train`, `verify`, `evaluate` and `predict` do from Python what the modes of the
command `whale-train` do.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whale_train.errors import ConfigError as ConfigError
    from whale_train.errors import LaunchError as LaunchError
    from whale_train.errors import PlanError as PlanError
    from whale_train.launcher.python.from_python import compose as compose
    from whale_train.launcher.python.from_python import evaluate as evaluate
    from whale_train.launcher.python.from_python import plan as plan
    from whale_train.launcher.python.from_python import predict as predict
    from whale_train.launcher.python.from_python import train as train
    from whale_train.launcher.python.from_python import verify as verify

_FUNCTIONS = ("compose", "evaluate", "plan", "predict", "train", "verify")
_ERRORS = ("ConfigError", "LaunchError", "PlanError")


def __getattr__(name: str) -> Any:
    """Return a public name, importing its module at the first use."""
    if name in _ERRORS:
        from whale_train import errors as module
    elif name in _FUNCTIONS:
        from whale_train.launcher.python import from_python as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)


def __dir__() -> list[str]:
    """Return the module's names, including those that are imported at their first use."""
    return sorted({*globals(), *_FUNCTIONS, *_ERRORS})
