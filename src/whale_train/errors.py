"""Define the three errors of whale-train, and the fault that two of them are made of.

All faults of a request are reported at once: every check adds to one list, which is raised at the
end. `assert` is kept for our own bugs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True)
class Fault:
    """One fault of a request.

    key: the full path that a user would type (`strategy.graph.replicate.degree`).
    value: the value that the user gave; '' where none was given.
    rule: the rule that does not hold, as a predicate.
    remedy: the nearest thing that would hold.
    """

    key: str
    value: str
    rule: str
    remedy: str

    def __str__(self) -> str:
        subject = f"{self.key}={self.value}" if self.value else self.key
        return f"{subject} {self.rule}; {self.remedy}"


class RequestError(Exception):
    """A request cannot be served (exit status 2). The exception has all faults of the request."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


class ConfigError(RequestError):
    """The config itself is wrong: unknown keys, wrong types, missing files."""


class PlanError(RequestError):
    """The config is well formed, but no plan for this model and hardware can satisfy it."""


class LaunchError(Exception):
    """A run was started and failed (exit status 1)."""


_MOST_CHOICES = 40  # the most choices that a message names one by one


def closest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice that a mistyped name was probably meant to be, or None where none is close.

    Among close choices, the first with the same letters in another order is preferred, because
    difflib does not recognise transposed letters.
    """
    close = get_close_matches(name, sorted(choices), cutoff=0.6)
    same_letters = (choice for choice in close if sorted(choice) == sorted(name))
    return next(same_letters, close[0] if close else None)


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return a remedy for a mistyped name: the closest choice, if there is one, then all choices.

    Of more than 40 choices only 20 are named, those that begin with the name first.
    """
    ordered = sorted(choices)
    close = closest(name, ordered)
    if len(ordered) > _MOST_CHOICES:
        ordered.sort(key=lambda choice: not choice.lower().startswith(name.lower()))
        close = close or (ordered[0] if ordered[0].lower().startswith(name.lower()) else None)
        listing = listed(ordered, _MOST_CHOICES // 2)
    else:
        listing = ", ".join(ordered)
    return f"did you mean {close}? One of: {listing}" if close else f"use one of: {listing}"


def listed(names: Iterable[str], most: int = 3) -> str:
    """Return the first `most` names as text, followed by the number of further names."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def shortened(text: str, most: int = 200) -> str:
    """Return a value as messages show it: more than `most` characters are cut to their beginning
    and their number."""
    return text if len(text) <= most else f"{text[: most // 2]}... ({len(text):,} characters)"
