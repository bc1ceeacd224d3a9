"""Read facts about a call in an exported graph from torch's schemas and tags.

The facts are whether a call draws random numbers, which arguments it writes to, and which arguments
`module.eval()` changes. There is no list of operations: torch tags random operations and marks
written arguments, and an argument's name means the same in all operations.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

# Arguments that modules of torch.nn set by their mode, with the values in evaluation mode.
_IN_EVALUATION: dict[str, Any] = {
    "train": False,
    "training": False,
    "use_input_stats": False,
    "dropout_p": 0.0,
}
_SHARES = ("p", "dropout", "dropout_p")  # dropout probabilities; a probability of 0 draws nothing


def draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws random numbers. A dropout with probability 0 does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    given = by_name(target, args, kwargs)
    trains = all(given.get(name) is not False for name in ("train", "training"))
    return trains and all(given.get(name) != 0.0 for name in _SHARES)


def in_evaluation(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the (args, kwargs) that a call in a training graph has in evaluation mode."""
    given = by_name(target, args, kwargs)
    changed: Mapping[str, Any] = _IN_EVALUATION
    if given.get("running_mean", ...) is None:
        changed = {}  # without running statistics, the batch's are used in either mode
    names = [*given, *("" for _ in args)]  # a call without a schema has arguments without names
    return (
        [changed.get(name, x) for name, x in zip(names, args, strict=False)],
        {name: changed.get(name, x) for name, x in kwargs.items()},
    )


def written_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the values that a call itself writes to: in place, or as `out`."""
    for _, given in _written(node):
        values = given if isinstance(given, list | tuple) else [given]
        yield from (x for x in values if isinstance(x, fx.Node))


def changed_value(node: fx.Node) -> fx.Node | None:
    """Return the value that a call writes to and returns, or None."""
    schema = getattr(node.target, "_schema", None)
    aliases = [result.alias_info for result in schema.returns[:1]] if schema is not None else []
    returned = {name for alias in aliases if alias is not None for name in alias.before_set}
    for names, given in _written(node):
        if isinstance(given, fx.Node) and not returned.isdisjoint(names):
            return given
    return None


def _written(node: fx.Node) -> Iterator[tuple[set[str], Any]]:
    """Yield a pair for each argument that a call writes to: the alias names of its memory in the
    schema, and the given value."""
    schema = getattr(node.target, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            yield argument.alias_info.before_set, given


def by_name(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, in the order of its schema.

    Arguments that were left out have their defaults. A target without a schema gives {}.
    """
    schema = getattr(target, "_schema", None)
    if schema is None:
        return {}
    given = {argument.name: argument.default_value for argument in schema.arguments}
    return given | dict(zip(given, args, strict=False)) | dict(kwargs)
