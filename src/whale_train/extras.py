"""The packages that parts of whale-train need and an installation need not have."""

from importlib.metadata import requires


def how_to_install(package: str) -> str:
    """Return the remedy for a missing package: the command that installs it, in a version that
    this version of whale-train works with."""
    wanted = (text.partition(";")[0].strip() for text in requires("whale-train") or ())
    named = (text for text in wanted if text.startswith(package))
    return f"pip install '{next(named, package)}'"
