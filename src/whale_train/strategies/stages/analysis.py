"""The cache of everything derived from a model, shared by all strategies that a search considers.

Pipeline cuts, weight shardings and prices of slices are computed once: neighbouring candidates of a
search need the same ones.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

from whale_train.errors import PlanError
from whale_train.strategies.cost.op_cost import Prices
from whale_train.strategies.graph.block_paths import block_of
from whale_train.strategies.graph.operation_graph import (
    ModelProfile,
    OperationGraph,
)
from whale_train.strategies.graph.rewrites import Rewrite, RewriteScope
from whale_train.strategies.graph.saved_tensors import View
from whale_train.strategies.graph.scaled_weights import scaled_weights
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
    """The analysis cache of a model.

    profile: the model.
    precision: `train.precision` of the training.
    """

    profile: ModelProfile
    precision: str
    _results: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, compute: Callable[[], _Result]) -> _Result:
        """Return the result of `compute`, which is called only for the first use of `key`. A
        PlanError of `compute` is cached too, and raised at every use. `key` must name everything
        that the result depends on."""
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
        """Return the layouts for a shard group of `members`, chosen by `choose` or cached. Layouts
        cached for another group size are returned where they hold for both sizes
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
        """Return the class of the loss of a batch: a mean or a sum over the samples, a value in
        which samples meet, or unknown. It is unknown where the model has no graph or an operation
        has no rule."""
        profile = self.profile
        if profile.unequal_parts:
            return LossReduction("meets", because=profile.unequal_parts)
        if profile.graph is None:
            return LossReduction("unknown", because=profile.export_error)
        return classify_loss(profile.graph, profile.batch_norm_modules)

    @cached_property
    def sample_states(self) -> Mapping[str, State]:
        """Return the dependence of each value of the graph on the samples of a batch, by the name
        of the value."""
        return states_of(self.graph, self.profile.batch_norm_modules)

    @cached_property
    def prices(self) -> Prices:
        """Return the cache of operation times, in seconds, at the precision of training."""
        scope = RewriteScope.whole(self.graph)
        return Prices(
            self.graph, self.precision, frozenset(scope.scaled_products(self.scaled_names))
        )

    @cached_property
    def scaled_weights(self) -> tuple[str, ...]:
        """Return the paths of the weights whose products round their factors to 8 bits."""
        return scaled_weights(self.profile) if self.precision == "fp8" else ()

    @cached_property
    def scaled_names(self) -> frozenset[str]:
        """Return the names of `scaled_weights`, aliases included."""
        weights = (self.profile.weight_by_path[path] for path in self.scaled_weights)
        return frozenset(name for x in weights for name in (x.path, *x.aliases))

    @cached_property
    def likeness(self) -> CanonicalSlices:
        """Return the cache of numbers for slices of the model: slices that are equal but for names
        have the same number."""
        return CanonicalSlices(self.profile, self.prices.works)

    @cached_property
    def view(self) -> View:
        """Return the sizes of the graph's values at the precision of training."""
        return View.at(self.graph, self.precision)

    @cached_property
    def grouped_keys(self) -> Sequence[Rewrite]:
        """Return the attentions of the model in which queries share keys and values (grouped-query
        attention)."""
        return tuple(RewriteScope.whole(self.graph).grouped_keys())

    def weights_to_cut(self, members: int) -> tuple[int, ...]:
        """Return the cumulative number of weights that can be sharded over a group of `members`,
        before each place of `order`."""
        return self.once(("to cut", members), lambda: self._weights_to_cut(members))

    @cached_property
    def tied(self) -> frozenset[str]:
        """Return the paths of the parameters that several blocks read. A stage that holds such a
        parameter holds all of it, and the gradients are summed over all stages that hold it."""
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
        """Return the number of trained elements that every replica holds: all, or with `split_head`
        all but the head's weight."""
        return self.trained_elements - (self.head_elements if split_head else 0)

    @cached_property
    def head_elements(self) -> int:
        """Return the number of elements of the weight of the largest output projection; 0 where the
        model has no known one."""
        weight = self.head_weight
        return 0 if weight is None else self.profile.parameter_by_path[weight].elements

    @cached_property
    def head_weight(self) -> str | None:
        """Return the path of the weight of the largest output projection; None where the model has
        no known one."""
        heads = self.heads if self.profile.graph else ()
        by_path = self.profile.parameter_by_path
        paths = [by_path[head.weight].path for head in heads]
        return max(paths, key=lambda path: by_path[path].elements, default=None)

    def weight_width(self, zero: int) -> float:
        """Return the mean bytes per element of the model's parameters, as ranks hold them under
        ZeRO stage `zero`."""
        return self.once(("width", zero), lambda: weight_width(self.profile, self.precision, zero))

    @cached_property
    def heads(self) -> tuple[Head, ...]:
        """Return all output projections of the model, the one with the largest weight first."""
        return find_heads(self.profile)

    @cached_property
    def mixtures(self) -> Mapping[str, int]:
        """Return the number of experts of every mixture, by the name of the value that holds the
        end offsets of the experts' rows. The mapping is empty without a graph."""
        return mixtures_of(self.graph) if self.profile.graph is not None else {}

    @cached_property
    def router_biases(self) -> Mapping[str, str]:
        """Return the path of the buffer by which the router of a mixture chooses experts, by the
        mixture's name in `mixtures`."""
        return router_biases_of(self.graph, self.mixtures) if self.mixtures else {}

    @cached_property
    def experts(self) -> SplitParts | None:
        """Return the experts of the model's mixtures, laid out over a group of any size; None where
        the model has no experts to which rows can be sent."""
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
        """Return the number of trained elements of the experts."""
        weights = self.experts.sharded.weights if self.experts else ()
        by_path = self.profile.parameter_by_path
        return float(sum(by_path[path].elements for path in weights if path in by_path))

    @cached_property
    def order(self) -> Sequenced:
        """Return the operations that a pipeline assigns to stages, and the places where it may
        cut."""
        return sequenced(self.graph)
