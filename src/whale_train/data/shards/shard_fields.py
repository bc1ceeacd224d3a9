"""Find the members of a field in the shards, and check that every sample has one."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from whale_train.data.shards.decoders import TEXTS, kind_in, split_extension
from whale_train.data.shards.shard_index import NO_NUMBER, NUMBERS, ShardIndex
from whale_train.data.shards.shard_reader import ShardReader
from whale_train.errors import ConfigError, Fault, listed


class ShardField:
    """A field of the samples.

    name: argument of the model's forward.
    members: index in `extensions` of each sample's member, int16 `[samples]`.
    extensions: extensions of which every sample has one, each with the part that is taken, or ''.
    numbers: the whole numbers of all samples, int64 `[samples]`; None for other kinds.
    """

    def __init__(self, name: str, given: Sequence[str], shards: ShardReader) -> None:
        """Find the members of a field. Raises ConfigError where a sample has none, or where a
        member of whole numbers holds something else."""
        self.name, self.extensions = name, [split_extension(x) for x in given]
        self.members: NDArray[np.int16] = np.concatenate(
            [self._members(index) for index in shards.indexes]
        )
        without = np.flatnonzero(self.members < 0)
        if len(without):
            raise self._lacking(shards, int(without[0]))
        self.numbers: NDArray[np.int64] | None = None
        if all(kind_in(x) in NUMBERS for x, _ in self.extensions):
            self.numbers = np.concatenate([self._numbers(index) for index in shards.indexes])
            wrong = np.flatnonzero(self.numbers == NO_NUMBER)
            if len(wrong):
                number = int(wrong[0])
                extension = self.extensions[self.members[number]][0]
                rule = f"is no whole number of 64 bits in {shards.named(number)}"
                remedy = "write it again, or name another field"
                raise ConfigError([Fault(f"data.fields.{name}", extension, rule, remedy)])

    @property
    def is_text(self) -> bool:
        """Return whether the members are texts, whatever their extension."""
        return all(kind_in(x) in TEXTS for x, _ in self.extensions)

    def member(self, number: int) -> tuple[str, str]:
        """Return the extension of the field's member in a sample, and the part that is taken."""
        extension, part = self.extensions[int(self.members[number])]
        return extension, part

    def _members(self, index: ShardIndex) -> NDArray[np.int16]:
        """Return for each sample the index of the first of the field's extensions that it has, or
        -1; int16 `[samples]`."""
        members = np.full(len(index), -1, np.int16)
        for number, (extension, _) in reversed(list(enumerate(self.extensions))):
            if extension in index.extensions:
                members[index.starts[:, index.extensions.index(extension)] >= 0] = number
        return members

    def _numbers(self, index: ShardIndex) -> NDArray[np.int64]:
        numbers = np.full(len(index), NO_NUMBER, np.int64)
        members = self._members(index)
        for number, (extension, _) in enumerate(self.extensions):
            if extension in index.extensions:
                own = members == number
                numbers[own] = index.numbers[own, index.extensions.index(extension)]
        return numbers

    def _lacking(self, shards: ShardReader, number: int) -> ConfigError:
        shard, row = shards.place(number)
        index = shards.indexes[shard]
        present = [x for x, at in zip(index.extensions, index.starts[row], strict=True) if at >= 0]
        wanted = " or ".join(dict.fromkeys(x for x, _ in self.extensions))
        rule = f"is missing in {shards.named(number)}, which has {listed(present, 6)}"
        remedy = "name what all samples have, or write the shard again with the members of each "
        remedy += "sample one after another"
        return ConfigError([Fault(f"data.fields.{self.name}", wanted, rule, remedy)])
