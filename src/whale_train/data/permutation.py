"""A random permutation of 0..n-1 that is computed one element at a time.

There is no table: any position of any epoch costs the same, with a thousand samples or a billion,
and a resumed run needs no state of earlier steps.
"""

from math import isqrt

import numpy as np
from numpy.typing import NDArray

from whale_train.data.random_bits import Bits, random_bits

# Four rounds of random functions already give a strong pseudorandom permutation (Luby and Rackoff,
# SIAM J. Comput. 1988); four more serve small sets, where a round can only choose a few shifts.
_ROUNDS = 8
# Halves are below 2^32 for any size an int64 can count, so each round has counters of its own.
_COUNTERS_PER_ROUND = 2**32


def permute(indices: NDArray[np.int64], num_elements: int, key: Bits) -> NDArray[np.int64]:
    """Return the images of `indices` in the permutation of 0..num_elements-1 that `key` selects.

    `indices` are int64 `[n]`, each in 0..num_elements-1, and so is the result. `key` is uint64
    `[1]`, or `[n]` for a permutation of its own for each index.

    A generalised Feistel network with cycle walking (Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", CT-RSA 2002): an index is a cell of a nearly square grid at least as large as
    the set. Rounds alternate: one shifts the row by a random function of the column, the next the
    column by a random function of the row. A cell outside the set goes through the network again
    until it lands inside.
    """
    if not len(indices):
        return np.empty(0, np.int64)
    rows = isqrt(num_elements - 1) + 1
    columns = -(-num_elements // rows)
    keys = np.broadcast_to(key, indices.shape)
    values = indices.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        walked = _shift_cells(values[outside], rows, columns, keys[outside])
        values[outside] = walked
        outside = outside[walked >= num_elements]
    return values.astype(np.int64)


def _shift_cells(values: Bits, rows: int, columns: int, keys: Bits) -> Bits:
    row, column = np.divmod(values, np.uint64(columns))
    for number in range(_ROUNDS):
        counters = np.uint64(number * _COUNTERS_PER_ROUND)
        if number % 2:
            column = _shift(column, random_bits(keys, counters + row), columns)
        else:
            row = _shift(row, random_bits(keys, counters + column), rows)
    return row * np.uint64(columns) + column


def _shift(values: Bits, amount: Bits, modulus: int) -> Bits:
    return (values + amount % np.uint64(modulus)) % np.uint64(modulus)
