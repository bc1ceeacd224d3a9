"""Choose how the members of a group that divides positions compute an attention together.

Owns the ways that can compute an attention, and the seconds that each takes beside its products:
all-to-alls by heads, keys and values that go around a ring, or their gather for rows of queries.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from whale_train.strategies.context_parallel.rules import ATTENTION
from whale_train.strategies.cost.collectives import gather_time_s
from whale_train.strategies.cost.op_work import KernelKind
from whale_train.strategies.cost.resharding import moved_bytes
from whale_train.strategies.cost.roofline import Times, kernel_of
from whale_train.strategies.graph.operation_graph import Operation, OperationGraph, Ref
from whale_train.strategies.hardware.cluster import Device, Link
from whale_train.strategies.layouts.types import GATHERED, HEADS, RING

WAYS = {"heads": HEADS, "ring": RING, "gathered": GATHERED}


@dataclass(frozen=True)
class AttentionGroup:
    """A group that divides the positions of attentions, and what they cost.

    graph: the graph of the attentions.
    repeated: how often each attention's keys are repeated for the queries that share them, by name.
    members: number of members.
    samples: samples of a micro-batch.
    precision: precision of the values.
    link: the link between members.
    device: a member's device.
    hides: True if transfers run under products (not where both use the same processors).
    """

    graph: OperationGraph
    repeated: Mapping[str, int]
    members: int
    samples: float
    precision: str
    link: Link
    device: Device
    hides: bool

    def possible(self, operation: Operation) -> tuple[str, ...]:
        """Return the ways in which the members can compute an attention, GATHERED always."""
        shapes = [self.graph[x.name].shape or () for x in operation.args[:3] if isinstance(x, Ref)]
        if any(len(shape) != 4 for shape in shapes):
            return (GATHERED,)
        ways = [HEADS] if shapes[0][1].fixed >= self.members else []
        if not self.unlike_in_ring(operation):
            ways.append(RING)
        return (*ways, GATHERED)

    def unlike_in_ring(self, operation: Operation) -> str:
        """Return the reason why a ring would not compute what an attention does; "" where it
        would."""
        if operation.random:
            return "its dropout draws for whole rows"
        first, second = (self.graph[x.name].shape for x in operation.args[:2] if isinstance(x, Ref))
        lengths = {shape[-2] for shape in (first, second) if shape}
        if _argument(operation, 5, "is_causal") and len(lengths) > 1:
            return "it is causal over unlike lengths"
        mask = _argument(operation, 3, "attn_mask")
        if isinstance(mask, Ref) and "float" in self.graph[mask.name].dtype:
            return "its mask is added to the scores"
        return ""

    def best(self, operation: Operation) -> str:
        """Return the way that takes the fewest seconds."""
        seconds = {way: self.seconds(operation, way) for way in self.possible(operation)}
        return min(seconds, key=seconds.__getitem__)

    def seconds(self, operation: Operation, way: str) -> float:
        """Return the seconds of an attention's exchanges and waits, forward and backward."""
        total = self.times(operation, way).total
        if way == GATHERED:  # its gathers are casts of their own
            total += 2 * gather_time_s(self._key_bytes(operation, 1), self.members, self.link)
        return total

    def times(self, operation: Operation, way: str) -> Times:
        """Return the times of the exchanges inside an attention, and of waits for the member with
        the most work."""
        groups = self.repeated.get(operation.name, 1)
        rows = self._bytes(operation, 0) + self._bytes(operation, None)
        computing = self._computing(operation)
        if way == HEADS:
            times = self._least_repetition(operation, groups)
            sent = self._exchange_s(rows + self._key_bytes(operation, groups) * times)
            return Times(sent, sent)
        if way == GATHERED:
            late = (1 - 1 / self.members) if _argument(operation, 5, "is_causal") else 0.0
            return computing.scaled(late)
        keys = self._key_bytes(operation, groups)
        round_s = gather_time_s(keys, self.members, self.link)
        turns = self._exchange_s(rows + keys) if self._turns(operation) else 0.0
        share = (1 - 1 / self.members) if self.hides else 0.0
        forward = max(0.0, round_s - share * computing.forward)
        backward = max(0.0, 2 * round_s - share * computing.backward_input)
        return Times(turns + forward, turns + backward)

    def _least_repetition(self, operation: Operation, groups: int) -> int:
        """Return the times that keys, shared by `groups` heads, are repeated: every member gets a
        head of theirs."""
        heads = self._key_heads(operation)
        times = (n for n in range(1, groups + 1) if groups % n == 0 and heads * n >= self.members)
        return next(times)

    def _turns(self, operation: Operation) -> bool:
        """Return True if a ring computes positions in zigzag order, to which they are exchanged."""
        causal = _argument(operation, 5, "is_causal")
        return bool(causal) or isinstance(_argument(operation, 3, "attn_mask"), Ref)

    def _computing(self, operation: Operation) -> Times:
        """Return the times of a member's part of the attention."""
        kernel = kernel_of(self.device, self.precision, KernelKind.ATTENTION)
        flops = operation.flops * self.samples / self.members
        return Times(kernel.forward.seconds(flops, 0.0), kernel.backward.seconds(flops, 0.0))

    def _exchange_s(self, num_bytes: float) -> float:
        """Return the seconds of an all-to-all of values of `num_bytes`, over all members."""
        return gather_time_s(num_bytes / self.members, self.members, self.link)

    def _bytes(self, operation: Operation, position: int | None) -> float:
        """Return the bytes of an argument of an attention, or of its result (None)."""
        name = operation.name
        if position is not None:
            argument = operation.args[position]
            assert isinstance(argument, Ref)
            name = argument.name
        return moved_bytes(self.graph, name, self.samples, self.precision)

    def _key_bytes(self, operation: Operation, groups: int) -> float:
        """Return the bytes of keys and values, of one head for `groups` heads of theirs."""
        return (self._bytes(operation, 1) + self._bytes(operation, 2)) / groups

    def _key_heads(self, operation: Operation) -> int:
        """Return the number of heads of the keys before they are repeated."""
        key = operation.args[1]
        assert isinstance(key, Ref)
        shape = self.graph[key.name].shape or ()
        return shape[1].fixed // self.repeated.get(operation.name, 1)


def attentions(graph: OperationGraph, names: tuple[str, ...]) -> tuple[Operation, ...]:
    """Return the attentions among the operations `names`."""
    chosen = set(names)
    return tuple(op for op in graph if op.target == ATTENTION and op.name in chosen)


def _argument(operation: Operation, position: int, name: str) -> object:
    if position < len(operation.args):
        return operation.args[position]
    return dict(operation.kwargs).get(name)
