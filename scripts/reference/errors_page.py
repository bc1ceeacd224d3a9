"""Write the refusals of the product as a page of the documentation."""

import re
from collections.abc import Iterable

from scripts.reference.keys_page import escaped, sentence
from scripts.reference.refusals import GROUPS, Refusal

_INTRODUCTION = (
    "A request that cannot be served is refused before anything starts, with all its faults. Each "
    "says the key and its value, what is wrong, and what to do. Made from the source; `<name>` "
    "stands for what differs from time to time. Exit status 2, and 1 for a run that has begun."
)


def errors_page(refusals: Iterable[Refusal]) -> str:
    """Return the page of all refusals as Markdown."""
    remedies: dict[str, dict[tuple[str, str], list[str]]] = {group: {} for group in GROUPS}
    for refusal in refusals:
        key = (refusal.subject, refusal.rule)
        remedies[refusal.group].setdefault(key, []).append(refusal.remedy)
    lines = ["# Every refusal", "", _INTRODUCTION, ""]
    for group, messages in remedies.items():
        lines += [f"## {group}", ""] if messages else []
        for (subject, rule), cures in messages.items():
            lines += [" ".join(x for x in (_code(subject), escaped(rule)) if x)]
            given = [sentence(escaped(cure)) for cure in cures if cure]
            lines += [f": {cure}" for cure in given or [_NO_CURE]]
            lines.append("")
    return "\n".join(lines)


_NO_CURE = "The message says no more."


def _code(text: str) -> str:
    """Return a text as a span of code, between as many backticks as it needs."""
    if not text:
        return ""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    ticks = "`" * (longest + 1)
    return f"{ticks}{text}{ticks}"
