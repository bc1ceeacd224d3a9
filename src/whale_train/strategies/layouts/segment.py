"""The operations that a rank runs without interruption, as the resolver decides them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from whale_train.strategies.graph.operation_graph import OperationGraph
from whale_train.strategies.graph.rewrites import (
    OWN_GRADIENTS,
    SCALED_PRODUCTS,
    Rewrite,
    RewriteScope,
)
from whale_train.strategies.layouts.propagation import Assignment, Shard
from whale_train.strategies.layouts.types import SEQUENCE, UNREPEATED, Cast


def _gathers_tokens(cast: Cast) -> bool:
    """Return True for a cast that gathers a value along the sequence for sharded work."""
    source = cast.source
    return cast.kind == "gather_enter" and isinstance(source, Shard) and SEQUENCE in source.axis


@dataclass(frozen=True)
class Segment:
    """Operations that one TaskGraph runs without interruption.

    task_graph: the index of the TaskGraph.
    operations: the names of the operations.
    takes: the values that come from other chunks.
    gives: the values that go to other chunks; the last chunk gives the loss.
    assignment: the layouts over the TaskGraph's shard group; None where every rank just runs its
        own samples.
    sums: the degrees of the sums over the batch of which replicas exchange their parts, by name.
    """

    task_graph: int
    operations: tuple[str, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    assignment: Assignment | None
    sums: Mapping[str, int] = field(default_factory=dict)

    def scope(self, graph: OperationGraph) -> RewriteScope:
        """Return the scope in which rewrites of the operations are found. `graph` is their
        graph."""
        typed = self.assignment
        if typed is None:
            return RewriteScope(graph, self.operations, self.gives, replaced=self.sums)
        drawn = [name for name, how in typed.random.items() if how == "shared"]
        return RewriteScope(
            *(graph, self.operations, self.gives),
            casts={(x.user, x.value): (x.kind, x.source, x.target) for x in typed.casts},
            gathered=[(x.user, x.value) for x in typed.casts if _gathers_tokens(x)],
            replaced={*self.sums, *typed.becomes, *drawn},
            cut={name: x.dim for name, x in typed.layouts.items() if isinstance(x, Shard)},
            unrepeated={name for name, kind in typed.becomes.items() if kind in UNREPEATED},
        )

    def rewrites(
        self,
        graph: OperationGraph,
        on_cpu: bool,
        defers: bool,
        own_gradients: bool,
        scaled: Collection[str] = (),
    ) -> tuple[Rewrite, ...]:
        """Return the rewrites of the operations.

        graph: the graph of the operations.
        on_cpu: True if the ranks are CPU processes; False if they have GPUs.
        defers: True if weight gradients are computed apart from the backward.
        own_gradients: True if products and lookups compute the gradients of their weights
            themselves.
        scaled: the paths of the weights, with their aliases, whose products round their factors to
            8 bits.
        """
        scope = self.scope(graph)
        joined = () if defers else tuple(scope.joined_products())
        by_joined = {name for rewrite in joined for name in rewrite.operations}
        names = scope.own_gradients() if own_gradients else ()
        own = tuple(name for name in names if name not in by_joined)
        rounded = tuple(scope.scaled_products(scaled)) if scaled else ()
        return (
            *scope.rms_norms(),
            *(
                x
                for x in scope.grouped_keys()
                if not on_cpu or x.operations[-1] in scope.unrepeated
            ),
            *joined,
            *((Rewrite(OWN_GRADIENTS, own),) if own else ()),
            *((Rewrite(SCALED_PRODUCTS, rounded),) if rounded else ()),
            *scope.overlapped_rows(),
        )
