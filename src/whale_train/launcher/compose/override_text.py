"""Parse one override of the command line by Hydra's grammar, or find the fault of its text."""

import re
import shlex
from typing import get_args

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from whale_train.bounds import too_large
from whale_train.config import Mode
from whale_train.errors import Fault, shortened
from whale_train.other_trainers import known_elsewhere

_QUOTED_KEY = re.compile(r"""(?<=[{,])\s*(["'])((?:(?!\1).)*)\1\s*:""")
_SEVERAL = re.compile(r"[\w./@+~]+=[^\s{}\[\]()]*(\s+[\w./@+~]+=[^\s{}\[\]()]*)+")
_BARE = re.compile(r"[\w/\-+.$%*@?|]")


def read_override(text: str, faults: list[Fault]) -> Override | None:
    """Return the parsed override, or None after adding a fault."""
    if "=" not in text and not text.startswith("~"):
        instead = known_elsewhere(text)
        remedy = f"write {text}=VALUE" if instead is None else instead.remedy
        if text in get_args(Mode):
            remedy = f"write mode={text}"
        faults.append(Fault(text, "", "is neither KEY=VALUE nor a flag", remedy))
        return None
    passed = too_large(text)
    if passed is not None:
        key, _, value = text.partition("=")
        faults.append(Fault(key, shortened(value), *passed))
        return None
    try:
        return OverridesParser.create().parse_overrides([text])[0]
    except HydraException as error:
        reason = str(error).splitlines()[0].rpartition("Exception: ")[2].rstrip(".:")
        rule = f"cannot be read ({reason})" if reason != text else "cannot be read"
        remedy = "quote values with spaces, commas or brackets, as in 'key={a: 1}'"
        if (plain := _without_quoted_keys(text)) is not None:
            rule = "has quotes around keys, which a command line's have none"
            remedy = f"write {shlex.quote(plain)}"
        elif _SEVERAL.fullmatch(text):
            rule, remedy = "is several overrides in one text", "give each as a text of its own"
        faults.append(Fault(text, "", rule, remedy))
        return None


def _without_quoted_keys(text: str) -> str | None:
    """Return the override `text` without quotes around the keys of mappings.

    YAML and JSON allow such quotes, and Hydra does not. Returns None where the text has no such
    quotes, or cannot be parsed without them either.
    """

    def plain(match: re.Match[str]) -> str:
        key = "".join(x if _BARE.match(x) else f"\\{x}" for x in match[2])
        return f" {key}:" if match[0][0].isspace() else f"{key}:"

    changed = _QUOTED_KEY.sub(plain, text)
    try:
        OverridesParser.create().parse_overrides([changed])
    except HydraException:
        return None
    return changed if changed != text else None
