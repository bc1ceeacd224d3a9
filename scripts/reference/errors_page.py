"""Write the refusals of the product as a page of the documentation."""

import hashlib
import json
import re
from collections.abc import Iterable

from scripts.reference.keys_page import escaped, sentence
from scripts.reference.refusals import GROUPS, HOLE, Refusal

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
            said = " ".join(x for x in (_code(subject), escaped(rule)) if x)
            lines += [f"[{said}]{{#{anchor_of(group, subject, rule)}}}"]
            given = [sentence(escaped(cure)) for cure in cures if cure]
            lines += [f": {cure}" for cure in given or [_NO_CURE]]
            lines.append("")
    return "\n".join(lines)


def refusals_script(refusals: Iterable[Refusal]) -> str:
    """Return the script that gives the page of search results all refusals, as `REFUSALS`: the
    fixed parts of each message up to its remedy, its text, and its anchor on the page."""
    rows: dict[str, str] = {}  # the first of the groups that have a message stands for all
    for one in refusals:
        text = " ".join(x for x in (one.subject, one.rule) if x)
        rows.setdefault(text, anchor_of(one.group, one.subject, one.rule))
    found = [{"anchor": x, "text": text, "parts": HOLE.split(text)} for text, x in rows.items()]
    return f"const REFUSALS = {json.dumps(found)};\n"


def anchor_of(group: str, subject: str, rule: str) -> str:
    """Return the anchor of a message on the page."""
    return "refusal-" + hashlib.sha256(f"{group} {subject} {rule}".encode()).hexdigest()[:10]


_NO_CURE = "The message says no more."


def _code(text: str) -> str:
    """Return a text as a span of code, between as many backticks as it needs."""
    if not text:
        return ""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    ticks = "`" * (longest + 1)
    return f"{ticks}{text}{ticks}"
