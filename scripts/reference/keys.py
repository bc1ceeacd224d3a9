"""Put together what is known of a key of the config, from its class and from the config files.

The classes of options say which keys there are, what they take and what they mean; the files of
`src/whale_train/conf` have their defaults, and comments.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from scripts.reference.field_texts import inner_model, texts_of, values_of
from scripts.reference.grammar_keys import MEANINGS, VALUES
from scripts.reference.yaml_comments import WrittenKey, written_keys

from whale_train.models.options import MISSING
from whale_train.own_code import PATH
from whale_train.validation import as_yaml

ARGUMENT = "ARGUMENT"  # in a path: the name of an argument of the user's own class
# Fields that hold what a user writes under other keys, as the arguments of a class.
_NOT_WRITTEN = frozenset(("own_loss", "listed"))
_ARGUMENTS = frozenset(("arguments", "given"))  # fields with the arguments of a class
_UNITS = {"_bytes_s": "bytes/s", "_bytes": "bytes", "_s": "s", "flops": "FLOP/s"}
Written = Mapping[str, list[tuple[str, WrittenKey]]]  # by key: the files that have it


@dataclass(frozen=True)
class Key:
    """A key of the config.

    path: the path that a user writes; `NAME` and `[]` stand for a name and a place in a list.
    values: which values it takes, in words; '' where its comment alone says it.
    default: the value where none is given; '' where one must be given.
    unit: the unit of its numbers; '' for none.
    meaning: what the class of its options says of it; '' for nothing.
    comment: what the config files say of it; '' for nothing.
    """

    path: str
    values: str
    default: str
    unit: str
    meaning: str
    comment: str


@dataclass(frozen=True)
class KeyGroup:
    """A group of keys under one heading, with a sentence about them."""

    title: str
    about: str
    keys: tuple[Key, ...]


def written_in(*paths: Path) -> dict[str, list[tuple[str, WrittenKey]]]:
    """Return the keys that config files write, each with the files that do."""
    keys: dict[str, list[tuple[str, WrittenKey]]] = {}
    for path in paths:
        for key in written_keys(path.read_text(encoding="utf-8"))[1]:
            keys.setdefault(key.path, []).append((path.stem, key))
    return keys


def below(written: Written, prefix: str) -> Written:
    """Return the keys with `prefix` before each."""
    return {f"{prefix}.{path}": keys for path, keys in written.items()}


def keys_of(kind: type[BaseModel], prefix: str, written: Written) -> Iterator[Key]:
    """Yield the keys of a class of options, those of the config files in their order first."""
    texts = texts_of(kind)
    fields = {_written_name(name, x): (name, x) for name, x in kind.model_fields.items()}
    places = {path: place for place, path in enumerate(written)}
    ordered = sorted(fields, key=lambda key: places.get(f"{prefix}{key}", len(places)))
    for key in ordered:
        name, field = fields[key]
        if name in _NOT_WRITTEN:
            continue
        if name in _ARGUMENTS:
            yield key_at(f"{prefix}{ARGUMENT}", "any value", "", texts[name], {})
            continue
        path = f"{prefix}{key}"
        default = field.get_default(call_default_factory=True)
        shown = "" if default is PydanticUndefined else _shown(default)
        meaning = texts.get(name, "")
        if name == "target" and not meaning:  # of classes of options that have nothing else
            meaning = " ".join((kind.__doc__ or "").split())
        yield key_at(path, values_of(field), shown, meaning, written)
        inner = inner_model(field.annotation)
        if inner is not None:
            model, between = inner
            yield from keys_of(model, f"{path}{between}", written)


def _written_name(name: str, field: FieldInfo) -> str:
    """Return the key under which a user writes a field: of the path of a class `_target_`."""
    is_path = any(getattr(item, "pattern", None) == PATH for item in field.metadata)
    return "_target_" if is_path else field.alias or name


def key_at(path: str, values: str, default: str, meaning: str, written: Written) -> Key:
    """Return the key at `path`, with what config files write beside it."""
    given = written.get(path, [])
    files = [file for file, _ in given]
    defaults = _by_file([(f, f"`{x.value}`") for f, x in given if x.value not in ("", MISSING)])
    return Key(
        path,
        VALUES.get(path, values),
        defaults or (default and f"`{default}`"),
        next((unit for end, unit in _UNITS.items() if path.endswith(end)), ""),
        meaning or MEANINGS.get(path, ""),
        _by_file([(file, x.comment) for file, x in given if x.comment], files),
    )


def _by_file(said: list[tuple[str, str]], files: list[str] | None = None) -> str:
    """Return one text as it is, and of several each with the names of the files that have it.

    files: the files that could say it; a text that only some of them have is given with those.
    """
    texts: dict[str, list[str]] = {}
    for file, text in said:
        texts.setdefault(text, []).append(file)
    if len(texts) == 1 and (files is None or len(said) == len(files)):
        return next(iter(texts))
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in texts.items())


def _shown(default: object) -> str:
    """Return a default as YAML has it; a mapping of options is shown as an empty one."""
    if isinstance(default, BaseModel):
        return "{}"
    return as_yaml(list(default) if isinstance(default, tuple) else default)


def with_own(rows: Iterator[Key], path: str, kind: type[BaseModel]) -> Iterator[Key]:
    """Yield keys, and after the one at `path` those of a class of the user's own in its place."""
    for row in rows:
        if not row.path.startswith(f"{path}."):
            yield row
        if row.path == path:
            yield from own_keys(kind, path)


def own_keys(kind: type[BaseModel], prefix: str) -> list[Key]:
    """Return the keys of something of the user's own: its class, and the arguments beside it."""
    keys = keys_of(kind, f"{prefix}.", {})
    return [key for key in keys if key.path.endswith(("._target_", f".{ARGUMENT}"))]
