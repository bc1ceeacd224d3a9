"""Run a segment's graph in blocks, each of which can be gathered or recomputed on its own.

ZeRO 3 gathers the parameters of a module when the module is called, so a segment under ZeRO 3
becomes one module per block. Recomputation (Chen et al. 2016, arXiv 1604.06174) saves the inputs of
a block and computes the block's other values again for its backward.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from whale_train.runtime.base.host_copies import HostCopies
from whale_train.runtime.base.node_meta import BLOCK, MODULE
from whale_train.runtime.base.recompute import Recomputed
from whale_train.runtime.graph.shard_rng import SharedRandom
from whale_train.strategies.graph.block_paths import unit_of


class BlockModule(nn.Module):
    """Consecutive operations of one block, with the tensors that only this block reads.

    `tensors` are these parameters and buffers, by attribute name. `random` is given where the block
    is recomputed for its backward: the random state that all members of a shard group share. None
    saves the block's values for the backward. What is saved is sent to `copies`, if given.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        random: SharedRandom | None,
        copies: HostCopies | None = None,
    ) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self._copies = copies
        self._updatable_from = 0  # the first argument that the graph may update in place
        self._again = None if random is None else Recomputed(lambda: _SameDraws(random))
        # The graphs are not submodules: they own nothing, and an engine must not walk into them.
        self._graphs: dict[bool, tuple[fx.GraphModule, tuple[str, ...]]] = {}

    def set_graph(
        self, training: bool, graph: fx.GraphModule, num_values: int, names: tuple[str, ...]
    ) -> None:
        """Use `graph` in training or in evaluation.

        The first `num_values` arguments of `graph` are values that other blocks have computed, the
        last ones the tensors held here under `names`. Those between are parameters and buffers that
        several blocks read.
        """
        self._graphs[training] = (graph, names)
        if training:
            self._updatable_from = 0 if _updates(graph) else num_values

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """Return the outputs of the block's graph for the inputs `values`.

        With `random`, a training forward saves its inputs only, and is recomputed in the backward.
        """
        if not self.training or not torch.is_grad_enabled():
            return self._run(*values)
        with self._sending(values):
            return self._run(*values) if self._again is None else self._run_twice(*values)

    def _sending(self, values: Sequence[Any]) -> AbstractContextManager[None]:
        """Return the context of a training forward."""
        if self._copies is None:
            return nullcontext()
        passed = (x for x in values if isinstance(x, nn.Parameter))
        return self._copies.sending((*self.parameters(), *self.buffers(), *passed))

    def _run(self, *values: Any) -> tuple[Any, ...]:
        graph, names = self._graphs[self.training]
        result: tuple[Any, ...] = graph(*values, *self._held(names))
        return result

    def _run_twice(self, *values: Any) -> tuple[Any, ...]:
        """Return the outputs, which are computed again in the backward."""
        # Tensors that several blocks read, and one of them may update, come as values.
        given = {
            i: x
            for i, x in enumerate(values)
            if i >= self._updatable_from and isinstance(x, Tensor) and _is_constant(x)
        }
        own = [(self._buffers, name) for name, x in self._buffers.items() if x is not None]
        buffers: Any = [*own, *((given, i) for i in given)]

        def run(*values: Any) -> tuple[Any, ...]:
            return self._run(*(given.get(i, x) for i, x in enumerate(values)))

        assert self._again is not None
        again: tuple[Any, ...] = self._again(run, buffers, *values)
        return again

    def _held(self, names: Sequence[str]) -> Iterator[Tensor]:
        return (getattr(self, name) for name in names)


def _updates(graph: fx.GraphModule) -> bool:
    """Return True if an operation of `graph` may update its arguments in place."""
    schemas = (getattr(node.target, "_schema", None) for node in graph.graph.nodes)
    return any(schema is not None and schema.is_mutable for schema in schemas)


def _is_constant(value: Tensor) -> bool:
    return value.is_leaf and not (value.requires_grad or isinstance(value, nn.Parameter))


class _SameDraws:
    """The context of a second run, in which the shared random draws are those that follow the
    making of this object. `torch.utils.checkpoint` restores the rank's own random state."""

    def __init__(self, random: SharedRandom) -> None:
        self._random, self._before = random, random.state

    def __enter__(self) -> None:
        self._now, self._random.state = self._random.state, self._before

    def __exit__(self, *_: object) -> None:
        self._random.state = self._now


@dataclass(frozen=True)
class Run:
    """Consecutive operations of one block, as a graph of their own.

    name: the block's path, `#`, and the number of the run in that block.
    graph: the operations. Its arguments are `takes`, then `tensors`; its outputs are `gives`.
    takes: names of the values that the run reads from earlier runs or from the segment's arguments.
    gives: names of the values that the run computes and others read.
    tensors: names of the placeholders of the parameters and buffers that the run reads.
    """

    name: str
    graph: fx.GraphModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    tensors: tuple[str, ...]


def in_runs(
    module: fx.GraphModule,
    tensors: Sequence[str],
    recomputed: Container[str] = (),
    offloaded: Container[str] = (),
) -> tuple[list[Run], tuple[str, ...]]:
    """Return the graph of `module` as runs of consecutive operations of one block, or of one of the
    modules in `recomputed` or else `offloaded`, and the names of the values that the graph returns.

    `tensors` are the names of the placeholders that are parameters and buffers.
    """
    parts: list[tuple[str, list[fx.Node]]] = []
    seen: dict[str, int] = {}
    last = None
    output: tuple[fx.Node, ...] = ()
    for node in module.graph.nodes:
        if node.op == "output":
            output = node.args[0]
        if node.op in ("placeholder", "output"):
            continue
        path = node.meta.get(MODULE, "")
        block = unit_of(path, recomputed) or unit_of(path, offloaded) or node.meta.get(BLOCK, "")
        if block != last:
            seen[block] = seen.get(block, -1) + 1
            parts.append((f"{block}#{seen[block]}", []))
            last = block
        parts[-1][1].append(node)
    runs = [_run(module, name, nodes, set(tensors)) for name, nodes in parts]
    return runs, tuple(node.name for node in output)


def _run(module: fx.GraphModule, name: str, nodes: list[fx.Node], tensors: set[str]) -> Run:
    """Return `nodes`, consecutive nodes of `module`, as the run `name`."""
    inside = set(nodes)
    read = dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in inside)
    held = [x for x in read if x.op == "placeholder" and x.name in tensors]
    takes = [x for x in read if x not in held]
    gives = [node for node in nodes if any(user not in inside for user in node.users)]
    graph = fx.Graph()
    copies = {x: graph.placeholder(x.name) for x in (*takes, *held)}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda x: copies[x])
    graph.output(tuple(copies[node] for node in gives))
    return Run(
        name,
        fx.GraphModule(module, graph),
        tuple(x.name for x in takes),
        tuple(x.name for x in gives),
        tuple(x.name for x in held),
    )


class Blocks(nn.Module):
    """Graphs of a segment that run block by block.

    `graphs` maps training (True) and evaluation (False) to a graph and the attributes of `owner`
    that hold the tensors of the graph's last placeholders. `recomputed` are the paths of the
    modules that are computed again in the backward, with `random`, the shared random state. What
    modules in `offloaded` save is sent to `copies`. A tensor that only one block reads moves out of
    `owner` into that block, unless its attribute is in `lent` (another engine owns it).
    """

    def __init__(
        self,
        owner: nn.Module,
        graphs: Mapping[bool, tuple[fx.GraphModule, tuple[str, ...]]],
        recomputed: frozenset[str],
        random: SharedRandom,
        lent: frozenset[str] = frozenset(),
        offloaded: frozenset[str] = frozenset(),
        copies: HostCopies | None = None,
    ) -> None:
        super().__init__()
        self._order: dict[bool, list[tuple[str, Run, tuple[str, ...], frozenset[str]]]] = {}
        self._arguments: dict[bool, tuple[list[str], tuple[str, ...]]] = {}
        self._gives: dict[bool, tuple[str, ...]] = {}
        runs: dict[bool, list[Run]] = {}
        attribute: dict[bool, dict[str, str]] = {}
        readers: dict[str, set[str]] = {}
        for training, (graph, names) in graphs.items():
            arguments = [n.name for n in graph.graph.nodes if n.op == "placeholder"]
            placeholders = arguments[len(arguments) - len(names) :]
            attribute[training] = dict(zip(placeholders, names, strict=True))
            runs[training], self._gives[training] = in_runs(
                graph, placeholders, recomputed, offloaded
            )
            self._arguments[training] = (arguments, names)
            for run in runs[training]:
                for placeholder in run.tensors:
                    readers.setdefault(attribute[training][placeholder], set()).add(run.name)
        own: dict[str, dict[str, Tensor]] = {}
        for name, blocks in readers.items():
            if len(blocks) == 1 and name not in lent:
                own.setdefault(next(iter(blocks)), {})[name] = getattr(owner, name)
                delattr(owner, name)
        self._kept = {name for name, blocks in readers.items() if len(blocks) > 1} | lent
        self.blocks = nn.ModuleDict()
        for training, graph_runs in runs.items():
            self._order[training] = []
            last = {name: number for number, run in enumerate(graph_runs) for name in run.takes}
            for name in self._gives[training]:
                last.pop(name, None)
            for number, run in enumerate(graph_runs):
                key = run.name.replace(".", "__")
                if key not in self.blocks:
                    held = own.get(run.name, {})
                    path = run.name.partition("#")[0]
                    sent = copies if unit_of(path, offloaded) else None
                    again = random if path in recomputed else None
                    self.blocks[key] = BlockModule(held, again, sent)
                block = self.blocks[key]
                assert isinstance(block, BlockModule)
                exclusive = [p for p in run.tensors if attribute[training][p] not in self._kept]
                passed = [p for p in run.tensors if p not in exclusive]
                # The block's own tensors come last, after the tensors that several blocks read.
                graph = _reordered(run.graph, (*run.takes, *passed, *exclusive))
                own_names = tuple(attribute[training][p] for p in exclusive)
                block.set_graph(training, graph, len(run.takes), own_names)
                done = frozenset(name for name in run.takes if last.get(name) == number)
                self._order[training].append((key, run, tuple(passed), done))

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """Return the outputs of the segment.

        `values` are the graph's plain arguments, then the tensors of the attributes in `kept`.
        """
        arguments, names = self._arguments[self.training]
        plain = arguments[: len(arguments) - len(names)]
        known = dict(zip(plain, values[: len(plain)], strict=True))
        shared = iter(values[len(plain) :])
        for placeholder, name in zip(arguments[len(plain) :], names, strict=True):
            if name in self._kept:
                known[placeholder] = next(shared)
        for key, run, passed, done in self._order[self.training]:
            # Drop each value after its last reader: an evaluation saves nothing for a backward.
            given = self.blocks[key](
                *(known.pop(name) if name in done else known[name] for name in run.takes),
                *(known[name] for name in passed),
            )
            known |= dict(zip(run.gives, given, strict=True))
        return tuple(known[name] for name in self._gives[self.training])

    def kept(self, training: bool) -> list[str]:
        """Return the attributes of the owner whose tensors are arguments of `forward`, in order.

        They are the lent tensors and the tensors that several blocks read.
        """
        return [name for name in self._arguments[training][1] if name in self._kept]


def _reordered(module: fx.GraphModule, arguments: Sequence[str]) -> fx.GraphModule:
    """Return the graph of `module` with its placeholders in the order of `arguments`."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    by_name = {node.name: node for node in module.graph.nodes if node.op == "placeholder"}
    for name in arguments:
        copies[by_name[name]] = graph.placeholder(name)
    for node in module.graph.nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, lambda x: copies[x])
    return fx.GraphModule(module, graph)
