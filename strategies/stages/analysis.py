"""The cache of everything derived from a model, shared by all strategies that a search considers.

Pipeline cuts, weight shardings and prices of slices are computed once: neighbours in a search need
the same ones.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

from whale_train.errors import PlanError
from whale_train.strategies.cost.op_cost import Prices
from whale_train.strategies.graph.operation_graph import (
    HELD,
    ModelProfile,
    Operation,
    OperationGraph,
    block_of,
)
from whale_train.strategies.graph.saved_tensors import View
from whale_train.strategies.independence.judge import Judgement, judge, states_of
from whale_train.strategies.independence.states import State
from whale_train.strategies.memory.engine_memory import weight_width
from whale_train.strategies.partition.equal_blocks import Likeness
from whale_train.strategies.partition.output_head import Head, find_heads
from whale_train.strategies.partition.pipeline_partition import Sequenced, sequenced
from whale_train.strategies.partition.routed_experts import (
    mixtures_of,
    route_experts,
    router_biases_of,
    under_rows,
)
from whale_train.strategies.partition.split_parts import SplitParts, SplitRefused
from whale_train.strategies.tensor_parallel.choose import Sharded

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Findings:
    """The analysis cache of `profile`, trained at `precision`."""

    profile: ModelProfile
    precision: str
    _results: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, compute: Callable[[], _Result]) -> _Result:
        """Return what `compute` returns, or raise the PlanError it raises, calling it only for the
        first use of `key`, which must name everything the result depends on."""
        if key not in self._results:
            try:
                self._results[key] = compute()
            except PlanError as error:
                self._results[key] = error
        result: _Result | PlanError = self._results[key]
        if isinstance(result, PlanError):
            raise result
        return result

    def sharded(self, key: Hashable, members: int, choose: Callable[[], Sharded]) -> Sharded:
        """Return the patterns that `choose` finds for a group of `members`, or those known already
        of another size of group that has the same. `key` names all else that they depend on."""
        known: list[Sharded] = self._results.setdefault(("sharded", key), [])
        found = next((each for each in known if members in each.groups), None)
        if found is None:
            known.append(found := choose())
        return found

    @property
    def graph(self) -> OperationGraph:
        assert self.profile.graph is not None
        return self.profile.graph

    @cached_property
    def samples(self) -> Judgement:
        """What the loss of the model's batch is of its samples, as far as its graph says."""
        profile = self.profile
        if profile.unequal_parts:
            return Judgement("meets", because=profile.unequal_parts)
        if profile.graph is None:
            return Judgement("unknown", because=profile.export_error)
        return judge(profile.graph, profile.batch_norm_modules)

    @cached_property
    def sample_states(self) -> Mapping[str, State]:
        """How every value of the graph depends on the samples of a batch."""
        return states_of(self.graph, self.profile.batch_norm_modules)

    @cached_property
    def prices(self) -> Prices:
        return Prices(self.graph, self.precision)

    @cached_property
    def likeness(self) -> Likeness:
        return Likeness(self.profile, self.prices.works)

    @cached_property
    def view(self) -> View:
        """The sizes of the graph's values at the precision of training."""
        return View.at(self.graph, self.precision)

    def weights_to_cut(self, members: int) -> tuple[int, ...]:
        """Return, for each possible cut in `order`, how many of the weights read before it can be
        sharded over a group of `members`."""
        return self.once(("to cut", members), lambda: self._weights_to_cut(members))

    @cached_property
    def tied(self) -> frozenset[str]:
        """The paths of parameters that several blocks read. Stages that hold the same one each
        have it whole, and its gradients are summed over all of them."""
        readers: dict[str, set[str]] = {}
        for name in self.order.operations:
            for read in (self.graph[x] for x in self.graph[name].inputs):
                if read.target == "parameter":
                    blocks = readers.setdefault(self.likeness.paths[read.path], set())
                    blocks.add(block_of(self.graph[name].module))
        return frozenset(path for path, blocks in readers.items() if len(blocks) > 1)

    def _weights_to_cut(self, members: int) -> tuple[int, ...]:
        def can_shard(name: str) -> bool:
            # A row-parallel weight needs a sharded input; a stage's own inputs are replicated.
            return any(
                min(cut.layout.pieces) >= members
                for cut in self.likeness.cuts[name]
                if cut.pattern != "row" and self.likeness.paths[cut.layout.axis] not in self.tied
            )

        before = [0, *accumulate(can_shard(name) for name in self.order.operations)]
        return tuple(before[place] for place in self.order.places)

    @cached_property
    def trained_elements(self) -> float:
        """The elements of all parameters that are trained."""
        unused = (self.profile.parameter_by_path[path] for path in self.profile.unused_parameters)
        return float(self.profile.parameter_elements - sum(p.elements for p in unused))

    def copied_elements(self, split_head: bool) -> float:
        """Return the trained elements that every copy holds: all, or all but a split head's."""
        return self.trained_elements - (self.head_elements if split_head else 0)

    @cached_property
    def head_elements(self) -> int:
        """The elements of the largest output projection's weight; 0 where none is known."""
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
    def mixtures(self) -> Mapping[str, int]:
        """The experts of every mixture, by the value that says where their rows end."""
        return mixtures_of(self.graph) if self.profile.graph is not None else {}

    @cached_property
    def blocks(self) -> Mapping[str, Sequence[Operation]]:
        """The operations of every block, in order."""
        found: dict[str, list[Operation]] = {}
        for operation in self.graph:
            if operation.target not in HELD:
                found.setdefault(block_of(operation.module), []).append(operation)
        return found

    def under_rows(self, value: str) -> tuple[str, ...]:
        """Return what runs while the rows `value` come back from their experts."""
        block = self.blocks[block_of(self.graph[value].module)]
        return self.once(("under", value), lambda: under_rows(self.graph, block, value))

    @cached_property
    def router_biases(self) -> Mapping[str, str]:
        """The buffers that the routers of mixtures choose experts by, as `mixtures` names these."""
        return router_biases_of(self.graph, self.mixtures) if self.mixtures else {}

    @cached_property
    def experts(self) -> SplitParts | None:
        """The experts of a mixture, as they lie over any devices; None where there are none that
        rows can be sent to."""
        graph = self.profile.graph
        if graph is None:
            return None
        names = tuple(operation.name for operation in graph)
        try:
            return route_experts(graph, names, (), self.profile.weights_read(names), 2, "experts")
        except SplitRefused:
            return None

    @cached_property
    def expert_elements(self) -> float:
        """The elements of the experts of a mixture that are trained."""
        weights = self.experts.sharded.weights if self.experts else ()
        by_path = self.profile.parameter_by_path
        return float(sum(by_path[path].elements for path in weights if path in by_path))

    @cached_property
    def order(self) -> Sequenced:
        return sequenced(self.graph)
