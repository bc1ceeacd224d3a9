"""Write the keys of the config as a page of the documentation."""

import re
from collections import Counter
from collections.abc import Iterator

from scripts.reference.keys import ARGUMENT, Key, KeyGroup


def keys_page(groups: tuple[KeyGroup, ...]) -> str:
    """Return the page of all keys as Markdown."""
    lines = ["# Every key", "", _INTRODUCTION, ""]
    times = Counter(anchor_of(key) for group in groups for key in group.keys)
    for group in groups:
        lines += [f"## {group.title}", ""]
        if group.about:
            lines += [group.about, ""]
        for key in group.keys:
            anchor = anchor_of(key)
            is_one = times[anchor] == 1  # several groups have data.path
            lines += [f"[`{key.path}`]{{#{anchor}}}" if is_one else f"`{key.path}`"]
            lines += [*_lines_of(key), ""]
    return "\n".join(lines)


def anchor_of(key: Key) -> str:
    """Return the anchor of a key: `train-steps` of `train.steps`."""
    return re.sub(r"\W+", "-", key.path).strip("-")


_INTRODUCTION = (
    "Made from the classes that read the config and from the files of "
    "[conf](../../src/whale_train/conf/config.yaml). `whale-train --cfg job` shows the values of a "
    "command. `NAME` stands for a name of your choice, `[]` for a place in a list."
)


def _lines_of(key: Key) -> Iterator[str]:
    """Yield what the page says of a key, a paragraph each."""
    if key.meaning:
        yield f": {sentence(escaped(_in_yaml(key.meaning)))}"
    if key.comment:
        yield f": {ended(escaped(key.comment))}"
    facts = [f"Values: {key.values}."] if key.values else []
    if key.default:
        facts.append(f"Default: {key.default}.")
    elif not key.path.endswith(ARGUMENT):
        facts.append("It must be given.")
    facts += [f"Unit: {key.unit}."] if key.unit else []
    yield f": {' '.join(facts)}"


def _in_yaml(text: str) -> str:
    """Return a docstring's text with the constants of Python as YAML has them."""
    return re.sub(r"\b(None|True|False)\b", lambda x: _CONSTANTS[x[1]], text)


_CONSTANTS = {"None": "`null`", "True": "`true`", "False": "`false`"}


def sentence(text: str) -> str:
    """Return a text with a capital at its beginning and a full stop at its end."""
    return ended(text[:1].upper() + text[1:])


def ended(text: str) -> str:
    """Return a text with a full stop at its end."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def escaped(text: str) -> str:
    """Return a text whose signs mean nothing in Markdown, but for spans of code."""
    parts = re.split(r"(`[^`]+`)", text)
    marks = re.compile(r"([\\*_\[\]<>|#{}~$])")
    return "".join(x if n % 2 else marks.sub(r"\\\1", x) for n, x in enumerate(parts))
