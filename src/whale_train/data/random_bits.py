"""Random numbers as a function of (stream, counter), the same on every machine.

NumPy's own generators promise neither cheap random access nor the same stream in every version.
Ranks on hosts with different versions would silently disagree about the order of the data. Only
integer arithmetic is used, so that no bit depends on the processor either.
"""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint64]

# SplitMix64: the golden-ratio increment and the two multipliers of its finaliser. Steele, Lea and
# Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014 (variant 13 of Stafford).
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FIRST_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_MULTIPLIER = np.uint64(0x94D049BB133111EB)

_LOW_HALVES = np.uint64(0x0000FFFF0000FFFF)
_LOW_WORD = np.uint64(0xFFFFFFFF)


def stream_key(name: str, seed: int) -> Bits:
    """Return the key, uint64 `[1]`, of the stream named `name` with `seed`."""
    digest = blake2b(f"{name}/{seed}".encode(), digest_size=8).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def random_bits(key: Bits, counters: NDArray[np.integer]) -> Bits:
    """Return 64 random bits, a uint64, for each of `counters` (0 or more).

    `key` is broadcast against the counters. The bits are those of SplitMix64 started at `key` and
    read at position `counter`. A result can be the key of another stream.
    """
    bits = counters.astype(np.uint64) * _INCREMENT + (key + _INCREMENT)
    bits ^= bits >> np.uint64(30)
    bits *= _FIRST_MULTIPLIER
    bits ^= bits >> np.uint64(27)
    bits *= _SECOND_MULTIPLIER
    bits ^= bits >> np.uint64(31)
    return bits


def nearly_normal(bits: Bits) -> NDArray[np.float32]:
    """Return a float32 of mean 0 and standard deviation 1 for each 64 bits.

    It is the scaled sum of the four 16-bit numbers in the 64 bits. Such a number is uniform on
    0..65535, with variance (2^32 - 1) / 12; the sum of four has mean 131070 and standard deviation
    sqrt((2^32 - 1) / 3). Values lie within 3.47 of 0.
    """
    pairs = (bits & _LOW_HALVES) + ((bits >> np.uint64(16)) & _LOW_HALVES)
    total = ((pairs & _LOW_WORD) + (pairs >> np.uint64(32))).astype(np.float32)
    scale = np.float32(((2**32 - 1) / 3) ** -0.5)
    return (total - np.float32(131070)) * scale
