"""Name the optional packages that parts of whale-train need."""

import re
from importlib.metadata import requires


def how_to_install(package: str) -> str:
    """Return the remedy for a missing package: the pip command that installs a version within the
    range of whale-train's requirements."""
    matching = (text for text in _requirements() if text.startswith(package))
    return f"pip install '{next(matching, package)}'"


def is_required(package: str) -> bool:
    """Return whether `package` is among whale-train's requirements, those of its extras
    included."""
    return package in {re.split(r"[<>=!~\[ ]", text)[0] for text in _requirements()}


def _requirements() -> list[str]:
    """Return whale-train's requirements, without the extras that they belong to."""
    return [text.partition(";")[0].strip() for text in requires("whale-train") or ()]
