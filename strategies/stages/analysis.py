"""What is found about a model once, however many strategies are considered for it.

Cuts into stages, patterns of weights, prices of pieces: what one strategy needs of these, its
neighbours in a search need as well.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

from whale_train.errors import PlanError
from whale_train.strategies.cost.op_cost import Prices
from whale_train.strategies.graph.operation_graph import ModelProfile, OperationGraph, block_of
from whale_train.strategies.graph.saved_tensors import View
from whale_train.strategies.memory.engine_memory import weight_width
from whale_train.strategies.partition.equal_blocks import Likeness
from whale_train.strategies.partition.output_head import Head, find_heads
from whale_train.strategies.partition.pipeline_partition import Sequenced, sequenced

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Findings:
    """Of `profile`, trained at `precision`."""

    profile: ModelProfile
    precision: str
    _kept: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, find: Callable[[], _Found]) -> _Found:
        """Return what `find` returns, or the PlanError it raises; `key` stands for all it depends
        on."""
        if key not in self._kept:
            try:
                self._kept[key] = find()
            except PlanError as error:
                self._kept[key] = error
        found: _Found | PlanError = self._kept[key]
        if isinstance(found, PlanError):
            raise found
        return found

    @property
    def graph(self) -> OperationGraph:
        assert self.profile.graph is not None
        return self.profile.graph

    @cached_property
    def prices(self) -> Prices:
        return Prices(self.graph, self.precision)

    @cached_property
    def likeness(self) -> Likeness:
        return Likeness(self.profile, self.prices.works)

    @cached_property
    def view(self) -> View:
        """What values are at the precision of training."""
        return View.at(self.graph, self.precision)

    def weights_to_cut(self, members: int) -> tuple[int, ...]:
        """Before each place of `order`, how many of the weights read could be cut over a shard
        group of so many."""
        return self.once(("to cut", members), lambda: self._weights_to_cut(members))

    @cached_property
    def tied(self) -> frozenset[str]:
        """The paths of parameters that several blocks read, which several stages may hold: each
        then has them whole, and they are summed over all their holders."""
        readers: dict[str, set[str]] = {}
        for name in self.order.operations:
            for read in (self.graph[x] for x in self.graph[name].inputs):
                if read.target == "parameter":
                    blocks = readers.setdefault(self.likeness.paths[read.path], set())
                    blocks.add(block_of(self.graph[name].module))
        return frozenset(path for path, blocks in readers.items() if len(blocks) > 1)

    def _weights_to_cut(self, members: int) -> tuple[int, ...]:
        def is_cut(name: str) -> bool:
            # Rows follow an input that is cut, which what enters a stage is not.
            return any(
                min(cut.layout.pieces) >= members
                for cut in self.likeness.cuts[name]
                if cut.pattern != "row" and self.likeness.paths[cut.layout.axis] not in self.tied
            )

        cut = [is_cut(name) for name in self.order.operations]
        before = [0, *accumulate(cut)]
        return tuple(before[place] for place in self.order.places)

    @cached_property
    def trained_elements(self) -> float:
        """Of all parameters that are trained."""
        left = (self.profile.parameter_by_path[path] for path in self.profile.unused_parameters)
        return float(self.profile.parameter_elements - sum(each.elements for each in left))

    def copied_elements(self, split_head: bool) -> float:
        """Return how many trained elements copies have: all, or all but those of a head that is
        split."""
        return self.trained_elements - (self.head_elements if split_head else 0)

    @cached_property
    def head_elements(self) -> int:
        """Of the largest output projection; 0 where none is known."""
        weight = self.head_weight
        return 0 if weight is None else self.profile.parameter_by_path[weight].elements

    @cached_property
    def head_weight(self) -> str | None:
        """The path of the weight of the largest output projection; None where none is known."""
        heads = self.heads if self.profile.graph else ()
        by_path = self.profile.parameter_by_path
        paths = [by_path[head.weight].path for head in heads]
        return max(paths, key=lambda path: by_path[path].elements, default=None)

    def weight_width(self, zero: int) -> float:
        """Return the mean bytes of an element of the model's parameters as ranks hold them."""
        return self.once(("width", zero), lambda: weight_width(self.profile, self.precision, zero))

    @cached_property
    def heads(self) -> tuple[Head, ...]:
        return find_heads(self.profile)

    @cached_property
    def order(self) -> Sequenced:
        return sequenced(self.graph)
