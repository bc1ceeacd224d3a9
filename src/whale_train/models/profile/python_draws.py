"""Random numbers that a forward draws in Python or with NumPy: a graph would hold one draw of them.

Every rank and every micro-batch calls the forward, and each call draws. A rank's first draw has to
be the draw of one process, and a second micro-batch draws once more. This file owns detecting that
a call has drawn, by the states of all generators in the process: only a model itself knows where it
keeps one.
"""

import gc
import pickle
import random
import sys
from itertools import compress
from typing import Any


class PythonDraws:
    """Generators of Python and NumPy in this process, and their states at its making."""

    def __init__(self) -> None:
        self._before = [(generator, _state(generator)) for generator in _generators()]

    def drawn(self) -> str:
        """Return the type of the first generator that was drawn from since, or ''."""
        for generator, state in self._before:
            if _state(generator) != state:
                return f"{type(generator).__module__}.{type(generator).__qualname__}"
        return ""

    def rewind(self) -> None:
        """Set all generators back, so that they draw again what they drew since."""
        for generator, state in self._before:
            _set_state(generator, state)


def _generators() -> list[Any]:
    """Return the generators that a model may draw from, wherever they are held.

    They are those behind the functions of `random` and `numpy.random`, and all that the garbage
    collector knows. What was frozen (`gc.freeze`) before the model's own code was imported is not
    its. `random.SystemRandom` has no state to compare, and is left out.
    """
    kinds: tuple[type, ...] = (random.Random,)
    shared = [random.getstate.__self__]  # type: ignore[attr-defined]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        kinds += (numpy.Generator, numpy.RandomState)
        shared.append(numpy.get_state.__self__)
    things = gc.get_objects()
    # Types are few and things are many: half a million where transformers was imported, which only
    # iterators written in C pass quickly.
    types = list(map(type, things))
    wanted = {
        kind
        for kind in set(types)
        if issubclass(kind, kinds) and not issubclass(kind, random.SystemRandom)
    }
    own = compress(things, map(wanted.__contains__, types))
    return [*shared, *(generator for generator in own if generator not in shared)]


def _state(generator: Any) -> Any:
    """Return the state of a generator, which its next draw follows from, as a value to compare."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    # NumPy's states have arrays, whose comparison is no truth value.
    return pickle.dumps(_bits(generator).state)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        _bits(generator).state = pickle.loads(state)


def _bits(generator: Any) -> Any:
    """Return the bit generator of NumPy's `generator`, a RandomState or a Generator."""
    return getattr(generator, "bit_generator", None) or generator._bit_generator
