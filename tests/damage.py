"""Damages values and texts as disks, other versions and people do, by a seed."""

import json
from copy import deepcopy
from random import Random
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 10**9, 10**12, 10**30, -(10**12), 0.5, 1e-308, 1e308),
    *(float("inf"), float("-inf"), float("nan"), "", "x", "auto", "null", "1e9", "a/b", "\0"),
    *([], [1], ["x", None], [[[]]], {}, {"x": 1}, {"": {}}, "x" * 3000),
)


def damaged(value: Any, random: Random) -> Any:
    """Return a copy of plain values with one to three faults: keys dropped, doubled under another
    name or joined by unknown ones, values of other types, scales and depths."""
    value = deepcopy(value)
    for _ in range(random.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return random.choice(ODD)
        inside, key = random.choice(places)
        match random.randrange(7):
            case 0:
                del inside[key]
            case 1 if isinstance(inside, dict):
                inside[f"{key}_"] = inside[key]
            case 2 if isinstance(inside, list):
                inside += inside[key : key + 1] * random.choice((1, 2, 1000))
            case 3:
                for _ in range(random.choice((1, 5, 45, 500))):
                    inside[key] = random.choice(([inside[key]], {"x": inside[key]}))
            case 4 if isinstance(inside[key], int | float):
                inside[key] *= random.choice((-1, 0, 1e-300, 1e300, 1.5))
            case _:
                inside[key] = deepcopy(random.choice(ODD))
    return value


def damaged_text(text: str, random: Random) -> bytes:
    """Return the bytes of a text with one fault: cut off, a part lost or doubled, bytes flipped."""
    content = bytearray(text.encode())
    start = random.randrange(len(content))
    end = min(len(content), start + random.choice((1, 2, 10, 1000)))
    match random.randrange(5):
        case 0:
            del content[start:]
        case 1:
            del content[start:end]
        case 2:
            content[start:start] = content[start:end] * random.choice((1, 2, 100))
        case 3:
            content[start] ^= 1 << random.randrange(8)
        case _:
            content[start] = random.choice(b'0123456789-.eE{}[]",:#&* \n\0\xff')
    return bytes(content)


def as_json(value: Any) -> str:
    """Return values as JSON, of any depth that Python writes."""
    try:
        return json.dumps(value)
    except (RecursionError, ValueError):
        return "[" * 5000


def _places(value: Any, level: int = 0) -> Any:
    """Yield every (container, key) of plain values, but of those very deep."""
    if isinstance(value, dict | list) and level < 20:
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key], level + 1)
