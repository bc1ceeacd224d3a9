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
    ModelProfile,
    OperationGraph,
    block_of,
)
from whale_train.strategies.graph.rewrites import Rewrite, RewriteScope
from whale_train.strategies.graph.saved_tensors import View
from whale_train.strategies.independence.judge import LossReduction, classify_loss, states_of
from whale_train.strategies.independence.states import State
from whale_train.strategies.memory.engine_memory import weight_width
from whale_train.strategies.partition.equal_blocks import CanonicalSlices
from whale_train.strategies.partition.output_head import Head, find_heads
from whale_train.strategies.partition.pipeline_partition import Sequenced, sequenced
from whale_train.strategies.partition.routed_experts import (
    mixtures_of,
    route_experts,
    router_biases_of,
)
from whale_train.strategies.partition.split_parts import SplitParts, SplitRefused
from whale_train.strategies.tensor_parallel.choose import Sharded

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class ModelAnalysis:
    """The analysis cache of `profile`, trained at `precision`."""

    profile: ModelProfile
    precision: str
    _results: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, compute: Callable[[], _Result]) -> _Result:
        """Return the result of `compute`, called only for the first use of `key`. A PlanError that
        `compute` raises is raised at every use. `key` must name everything that the result depends
        on."""
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
        """Return the layouts that `choose` finds for a group of `members`. Layouts that are known
        of a group of another size are returned instead where both sizes have the same ones
        (`Sharded.groups`). `key` names everything else that the layouts depend on."""
        known: list[Sharded] = self._results.setdefault(("sharded", key), [])
        chosen = next((patterns for patterns in known if members in patterns.groups), None)
        if chosen is None:
            known.append(chosen := choose())
        return chosen

    @property
    def graph(self) -> OperationGraph:
        """Return the exported graph of the model, which must have one."""
        assert self.profile.graph is not None
        return self.profile.graph

    @cached_property
    def samples(self) -> LossReduction:
        """Return the judgement of the loss of a batch by the model's graph: a mean or a sum over
        the samples, a value in which samples meet, or unknown, where there is no graph or no rule
        for an operation."""
        profile = self.profile
        if profile.unequal_parts:
            return LossReduction("meets", because=profile.unequal_parts)
        if profile.graph is None:
            return LossReduction("unknown", because=profile.export_error)
        return classify_loss(profile.graph, profile.batch_norm_modules)

    @cached_property
    def sample_states(self) -> Mapping[str, State]:
        """Return the way in which every value of the graph depends on the samples of a batch, by
        name."""
        return states_of(self.graph, self.profile.batch_norm_modules)

    @cached_property
    def prices(self) -> Prices:
        """Return the cache of the seconds of operations at the precision of training."""
        return Prices(self.graph, self.precision)

    @cached_property
    def likeness(self) -> CanonicalSlices:
        """Return the cache that numbers slices of the model which are equal but for names."""
        return CanonicalSlices(self.profile, self.prices.works)

    @cached_property
    def view(self) -> View:
        """Return the sizes of the graph's values at the precision of training."""
        return View.at(self.graph, self.precision)

    @cached_property
    def grouped_keys(self) -> Sequence[Rewrite]:
        """Return the attentions of the model whose queries share keys and values."""
        return tuple(RewriteScope.whole(self.graph).grouped_keys())

    def weights_to_cut(self, members: int) -> tuple[int, ...]:
        """Return the number of weights read before each place of `order` that can be sharded over a
        group of `members`."""
        return self.once(("to cut", members), lambda: self._weights_to_cut(members))

    @cached_property
    def tied(self) -> frozenset[str]:
        """Return the paths of parameters that several blocks read. A stage that holds such a
        parameter has it whole, and its gradients are summed over all stages that do."""
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
        """Return the number of elements of all parameters that are trained."""
        unused = (self.profile.parameter_by_path[path] for path in self.profile.unused_parameters)
        return float(self.profile.parameter_elements - sum(p.elements for p in unused))

    def copied_elements(self, split_head: bool) -> float:
        """Return the number of trained elements that every copy holds: all, or with `split_head`
        all but the head's weight."""
        return self.trained_elements - (self.head_elements if split_head else 0)

    @cached_property
    def head_elements(self) -> int:
        """Return the number of elements of the largest output projection's weight; 0 where none is
        known."""
        weight = self.head_weight
        return 0 if weight is None else self.profile.parameter_by_path[weight].elements

    @cached_property
    def head_weight(self) -> str | None:
        """Return the path of the weight of the largest output projection; None where none is
        known."""
        heads = self.heads if self.profile.graph else ()
        by_path = self.profile.parameter_by_path
        paths = [by_path[head.weight].path for head in heads]
        return max(paths, key=lambda path: by_path[path].elements, default=None)

    def weight_width(self, zero: int) -> float:
        """Return the mean bytes of an element of the model's parameters as ranks hold them under
        ZeRO stage `zero`."""
        return self.once(("width", zero), lambda: weight_width(self.profile, self.precision, zero))

    @cached_property
    def heads(self) -> tuple[Head, ...]:
        """Return all output projections of the model, the one with the largest weight first."""
        return find_heads(self.profile)

    @cached_property
    def mixtures(self) -> Mapping[str, int]:
        """Return the number of experts of every mixture, by the name of the value that holds the
        ends of the experts' rows. Empty without a graph."""
        return mixtures_of(self.graph) if self.profile.graph is not None else {}

    @cached_property
    def router_biases(self) -> Mapping[str, str]:
        """Return the paths of the buffers by which the routers of mixtures choose experts, by the
        names of the mixtures in `mixtures`."""
        return router_biases_of(self.graph, self.mixtures) if self.mixtures else {}

    @cached_property
    def experts(self) -> SplitParts | None:
        """Return the experts of the model's mixtures, laid over a group of any size; None where
        there are none to which rows can be sent."""
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
        """Return the number of elements of the experts that are trained."""
        weights = self.experts.sharded.weights if self.experts else ()
        by_path = self.profile.parameter_by_path
        return float(sum(by_path[path].elements for path in weights if path in by_path))

    @cached_property
    def order(self) -> Sequenced:
        """Return the operations that a pipeline deals out to stages, and the places where it may be
        cut."""
        return sequenced(self.graph)
