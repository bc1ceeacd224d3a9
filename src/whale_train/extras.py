"""Name the optional packages that parts of whale-train need."""

from importlib.metadata import requires


def how_to_install(package: str) -> str:
    """Return the remedy for a missing package: the pip command that installs a version within the
    range of whale-train's requirements."""
    requirements = (text.partition(";")[0].strip() for text in requires("whale-train") or ())
    matching = (text for text in requirements if text.startswith(package))
    return f"pip install '{next(matching, package)}'"
