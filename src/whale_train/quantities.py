"""Write quantities (`1.32 GB`, `98.1 ms`, `51.3 M`) and lists of names (`h.0-11`) as short text.

Bytes are written in decimal units (1 GB = 1e9 bytes), as in the inventory of devices.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby


def in_bytes(number: float) -> str:
    """Return bytes as text such as `1.32 GB`, with three digits and decimal units."""
    return _scaled(number, ("B", "kB", "MB", "GB", "TB", "PB"))


def in_count(number: float) -> str:
    """Return a count as text such as `51.3 M`, with three digits. A count below a thousand is
    written in full."""
    return _scaled(number, ("", "k", "M", "B", "T")).rstrip()


def in_seconds(seconds: float) -> str:
    """Return seconds as text such as `98.1 ms`, with three digits. Seconds are the largest unit."""
    if seconds < 0.9995e-3:
        return f"{_digits(seconds * 1e6)} us"
    return f"{_digits(seconds * 1e3)} ms" if seconds < 0.9995 else f"{_digits(seconds)} s"


def in_rate(per_s: float) -> str:
    """Return samples per second as text: three digits below 100, else a whole number with thousands
    separators."""
    return f"{per_s:,.0f}" if per_s >= 100 else _digits(per_s)


def fold_numbers(numbers: Iterable[int], most: int = 4) -> str:
    """Return numbers as text such as `0-7, 12`, in which runs of consecutive numbers are joined.

    Only the first `most` runs are written; of more, the text ends with the count of all numbers.
    """
    ordered = sorted(numbers)
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])
    ]
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:most]]
    rest = f", ... ({len(ordered):,} in all)" if len(runs) > most else ""
    return ", ".join(shown) + rest


def fold_parts(parts: Sequence[int]) -> str:
    """Return relative parts as percentages of their sum, with runs of equal ones joined: `8 x 8.8%,
    8 x 3.7%`."""
    percentages = (f"{100 * part / sum(parts):.1f}%" for part in parts)
    runs = ((len(list(equal)), text) for text, equal in groupby(percentages))
    return ", ".join(f"{times} x {text}" for times, text in runs)


def fold_modules(paths: Sequence[str], most: int = 4) -> str:
    """Return module paths as text such as `wte, h.0-11, ln_f`, in which numbered neighbours are
    joined.

    Of more than `most` names, only the first ones, the last one and the count of modules are
    written.
    """
    keys = []
    for index, path in enumerate(paths):
        words = path.split(".")
        where = max((i for i, word in enumerate(words) if word.isdigit()), default=None)
        # Along a run the number grows with the index, so that their difference is constant.
        run = path if where is None else str(int(words[where]) - index)
        keys.append((words[:where], where, [] if where is None else words[where + 1 :], run))
    names = []
    for (_, where, _, _), indices in groupby(range(len(paths)), key=keys.__getitem__):
        first, *others = (paths[index].split(".") for index in indices)
        if others and where is not None:
            first[where] += f"-{others[-1][where]}"
        names.append(".".join(first) or "the whole model")
    if len(names) > most:
        names = [*names[: most - 1], "...", f"{names[-1]} ({len(paths):,} modules)"]
    return ", ".join(names)


def of_all(used: str, all_of_it: str) -> str:
    """Return a part and its total as text such as `10.3 / 32.0 GB`. Both units are written where
    they differ."""
    number, unit = used.split(" ")
    return f"{number if all_of_it.endswith(' ' + unit) else used} / {all_of_it}"


def _scaled(number: float, units: Sequence[str]) -> str:
    """Return a number with three digits in the smallest unit that leaves it below 1000. Each unit
    is a thousand of the unit before it."""
    if number < 999.5:
        return f"{number:.0f} {units[0]}"
    for unit in units[1:]:
        number /= 1000
        if number < 999.5:
            return f"{_digits(number)} {unit}"
    return f"{number:,.0f} {units[-1]}"


def _digits(number: float) -> str:
    """Return a number with three digits: `1.32`, `13.2`, `132`."""
    if number >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"
