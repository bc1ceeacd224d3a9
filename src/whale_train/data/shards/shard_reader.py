"""Read members of samples in shards, each at its place."""

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from zlib import crc32

import numpy as np

from whale_train.data.paths import path_error, unreadable
from whale_train.data.shards.shard_index import HEADER_BYTES, ShardIndex

_OPEN_FILES = 64  # shards that a process keeps open


class ShardReader:
    """Reader of the members of samples, which are numbered over all shards.

    files: paths of the shards.
    indexes: index of each shard.
    num_samples: number of samples of all shards.
    """

    def __init__(self, files: Sequence[str], indexes: Sequence[ShardIndex]) -> None:
        self.files, self.indexes = files, indexes
        self._stops = np.cumsum([len(x) for x in indexes]).tolist()
        self.num_samples = self._stops[-1]
        self._open: OrderedDict[int, int] = OrderedDict()

    def place(self, number: int) -> tuple[int, int]:
        """Return the shard of a sample, and the sample's row in the shard."""
        shard = bisect_right(self._stops, number)
        return shard, number - (self._stops[shard - 1] if shard else 0)

    def named(self, number: int) -> str:
        """Return a sample's shard and key, for messages."""
        shard, row = self.place(number)
        return f"sample {self.indexes[shard].key(row)} of {self.files[shard]}"

    def read(self, number: int, extension: str) -> bytes:
        """Return the content of a member of a sample. Raises ConfigError where it cannot be read,
        or where the shard has changed."""
        shard, row = self.place(number)
        index, file = self.indexes[shard], self.files[shard]
        column = index.extensions.index(extension)
        start, size = int(index.starts[row, column]), int(index.sizes[row, column])
        try:
            content = _read(self._opened(shard), start - HEADER_BYTES, HEADER_BYTES + size)
        except OSError as error:
            raise unreadable(error, file) from error
        header = content[:HEADER_BYTES]
        if len(content) < HEADER_BYTES + size or crc32(header) != index.checks[row, column]:
            rule = f"has changed while it was read (at {self.named(number)}, .{extension})"
            raise path_error(file, rule, "start again, with shards that stay as they are")
        return content[HEADER_BYTES:]

    def _opened(self, shard: int) -> int:
        """Return a file descriptor of a shard. Reads do not use its position, which forked
        processes share."""
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        if len(self._open) >= _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        self._open[shard] = os.open(self.files[shard], os.O_RDONLY | os.O_CLOEXEC)
        return self._open[shard]


def _read(file: int, start: int, count: int) -> bytes:
    """Return `count` bytes of an open file from byte `start` on, or fewer where the file ends
    before."""
    pieces = []
    while count and (piece := os.pread(file, count, start)):
        pieces.append(piece)
        start, count = start + len(piece), count - len(piece)
    return b"".join(pieces)
