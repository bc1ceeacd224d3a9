"""Detect random numbers that a forward draws in Python or with NumPy, which a graph would freeze.

Every rank and every micro-batch calls the forward, and each call draws. A rank's first draw must be
the draw of a single process, and a second micro-batch draws once more. This file detects draws by
the states of all generators in the process, because only a model itself knows where it keeps a
generator.
"""

import gc
import pickle
import random
import sys
from itertools import compress
from typing import Any


class PythonDraws:
    """Generators of Python and NumPy in this process, with their states when this object was
    made."""

    def __init__(self) -> None:
        self._before = [(generator, _state(generator)) for generator in _generators()]

    def drawn(self) -> str:
        """Return the type of the first generator that has been drawn from, or ''."""
        for generator, state in self._before:
            if _state(generator) != state:
                return f"{type(generator).__module__}.{type(generator).__qualname__}"
        return ""

    def rewind(self) -> None:
        """Restore the states of all generators, so that they repeat their draws."""
        for generator, state in self._before:
            _set_state(generator, state)


def _generators() -> list[Any]:
    """Return the generators that a model may draw from, wherever they are stored.

    They are the global ones of `random` and `numpy.random`, and all that the garbage collector
    tracks. Objects that were frozen (`gc.freeze`) before the model's code was imported are not
    tracked, and do not belong to the model. `random.SystemRandom` has no state to compare, and is
    left out.
    """
    kinds: tuple[type, ...] = (random.Random,)
    shared = [random.getstate.__self__]  # type: ignore[attr-defined]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        kinds += (numpy.Generator, numpy.RandomState)
        shared.append(numpy.get_state.__self__)
    things = gc.get_objects()
    # There are few types and many objects: half a million once transformers is imported. Only
    # iterators written in C are fast enough.
    types = list(map(type, things))
    wanted = {
        kind
        for kind in set(types)
        if issubclass(kind, kinds) and not issubclass(kind, random.SystemRandom)
    }
    own = compress(things, map(wanted.__contains__, types))
    return [*shared, *(generator for generator in own if generator not in shared)]


def _state(generator: Any) -> Any:
    """Return the state that determines a generator's next draw, as a value to compare."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    # NumPy's states contain arrays, whose comparison is not a bool.
    return pickle.dumps(_bits(generator).state)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        _bits(generator).state = pickle.loads(state)


def _bits(generator: Any) -> Any:
    """Return the bit generator of NumPy's `generator`, a RandomState or a Generator."""
    return getattr(generator, "bit_generator", None) or generator._bit_generator
