"""A ModelProfile as JSON and back, exactly: the profile that is read equals the one written.

The first line is the checksum of the rest, so that a damaged file is not read as a profile. An
operation is a list of its fields, in their order. In its arguments, an object stands for a value
that has no JSON type, and a list for a tuple.
"""

import json
from collections.abc import Iterable
from dataclasses import astuple
from hashlib import sha256
from typing import Any

from whale_train.strategies.graph.operation_graph import (
    Argument,
    InputField,
    Logits,
    ModelProfile,
    Operation,
    OperationGraph,
    Parameter,
    Ref,
    Size,
)


def profile_to_json(profile: ModelProfile) -> str:
    """Return the profile as two lines: the checksum, and the JSON."""
    mapping = {
        "name": profile.name,
        "parameters": _listed(profile.parameters),
        "frozen": _listed(profile.frozen),
        "inputs": [
            [f.name, f.shape, f.dtype, f.upper_bound, f.lower_bound] for f in profile.inputs
        ],
        "forward_flops": profile.forward_flops,
        "activation_bytes": profile.activation_bytes,
        "buffer_bytes": profile.buffer_bytes,
        "graph": None if profile.graph is None else [_written(op) for op in profile.graph],
        "export_error": profile.export_error,
        "batch_norm_modules": profile.batch_norm_modules,
        "linear_weights": profile.linear_weights,
        "unused_parameters": profile.unused_parameters,
        "perhaps_unused": profile.perhaps_unused,
        "varies": profile.varies,
        "own_draws": profile.own_draws,
        "logits": profile.logits and astuple(profile.logits),
        "batch_sizes": profile.batch_sizes,
    }
    content = json.dumps(mapping, separators=(",", ":"))
    return f"{_checksum(content)}\n{content}"


def profile_from_json(text: str) -> ModelProfile:
    """Return the profile that `profile_to_json` wrote as `text`. Raises ValueError for any other
    text."""
    checksum, _, content = text.partition("\n")
    if checksum != _checksum(content):
        raise ValueError("is no profile, or another than was written (its checksum is another)")
    try:
        mapping: dict[str, Any] = json.loads(content)
        parameters, frozen, inputs, graph, logits = (
            mapping.pop(x) for x in ("parameters", "frozen", "inputs", "graph", "logits")
        )
        rest: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in mapping.items()
        }
        return ModelProfile(
            parameters=_parameters(parameters),
            frozen=_parameters(frozen),
            inputs=tuple(
                InputField(name, tuple(shape), *others) for name, shape, *others in inputs
            ),
            graph=None if graph is None else OperationGraph(tuple(map(_read, graph))),
            logits=None if logits is None else Logits(tuple(logits[0]), *logits[1:]),
            **rest,
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"is no profile ({type(error).__name__}: {error})") from error


def _checksum(content: str) -> str:
    return sha256(content.encode()).hexdigest()


def _listed(parameters: Iterable[Parameter]) -> list[Any]:
    return [[p.path, p.shape, p.bytes_per_element, p.aliases] for p in parameters]


def _parameters(rows: list[Any]) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(path, tuple(shape), size, tuple(aliases)) for path, shape, size, aliases in rows
    )


def _written(operation: Operation) -> list[Any]:
    op = operation
    return [
        *(op.name, op.target, _plain(op.args), [[key, _plain(x)] for key, x in op.kwargs]),
        None if op.shape is None else [[size.fixed, size.per_sample] for size in op.shape],
        *(op.dtype, op.module, op.path, op.flops, op.saved, op.memory, op.after, op.random),
        *(op.writes, op.changes, op.saved_on_cpu),
    ]


def _read(row: list[Any]) -> Operation:
    name, target, args, kwargs, shape, dtype, module, path, flops, saved, *rest = row
    memory, after, random, writes, changes, on_cpu = rest
    return Operation(
        name,
        target,
        tuple(map(_argument, args)),
        tuple((key, _argument(x)) for key, x in kwargs),
        None if shape is None else tuple(Size(*size) for size in shape),
        *(dtype, module, path, flops, tuple((at, num_bytes) for at, num_bytes in saved)),
        *(memory, tuple(after), random, tuple(writes), changes),
        tuple((at, num_bytes) for at, num_bytes in on_cpu),
    )


def _plain(argument: Argument) -> Any:
    if isinstance(argument, Ref):
        return {"ref": argument.name}
    if isinstance(argument, Size):
        return {"size": [argument.fixed, argument.per_sample]}
    if isinstance(argument, tuple):
        return [_plain(part) for part in argument]
    return argument


def _argument(plain: Any) -> Argument:
    if isinstance(plain, list):
        return tuple(map(_argument, plain))
    if isinstance(plain, dict):
        return Ref(plain["ref"]) if "ref" in plain else Size(*plain["size"])
    return plain  # type: ignore[no-any-return]
