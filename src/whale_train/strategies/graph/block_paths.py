"""Tell by the paths of modules which blocks a model repeats, and which a module is part of."""

from collections import Counter
from collections.abc import Container, Iterable

from whale_train.strategies.graph.operation_graph import GIVEN, Operation


def block_of(module: str) -> str:
    """Return the path of the block that a module belongs to.

    It is the module's path up to the last number (`encoder.layers.3`), as lists of equal blocks are
    named. A path without a number is returned unchanged.
    """
    parts = module.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbered[-1] + 1]) if numbered else module


def is_repeated(block: str) -> bool:
    """Return True if a block is an entry of a list of blocks, as in deep models."""
    return any(part.isdecimal() for part in block.split("."))


def blocks_of(operations: Iterable[Operation]) -> tuple[str, ...]:
    """Return the paths of a model's repeated blocks, in the order they run: of each module, the
    innermost entry of a list that has modules of its own. A list of single layers inside a block,
    such as a Sequential, is part of the block; entries without modules are blocks where they run
    several operations."""
    paths = [x.module for x in operations if x.target not in GIVEN]
    counts = Counter(paths)
    has_modules = {
        ".".join(parts[:number])
        for parts in (path.split(".") for path in counts)
        for number in range(1, len(parts))
    }
    block: dict[str, str] = {}
    for path in counts:
        parts = path.split(".")
        entries = [".".join(parts[: i + 1]) for i, x in enumerate(parts) if x.isdecimal()]
        within = [entry for entry in entries if entry in has_modules]
        several = [entry for entry in entries if counts[entry] > 1]
        block[path] = (within or several or [""])[-1]
    return tuple(dict.fromkeys(block[path] for path in paths if block[path]))


def unit_of(module: str, units: Container[str]) -> str:
    """Return the outermost of `units`, paths of modules, that the module at a path is part of; ''
    where it is part of none."""
    end = module.find(".")
    while end >= 0:
        if module[:end] in units:
            return module[:end]
        end = module.find(".", end + 1)
    return module if module in units else ""
