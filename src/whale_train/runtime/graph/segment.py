"""One segment of the plan on one rank: a module that owns its parameters and runs graphs.

`shard_graph.py` writes the graphs. This file owns how the graphs are called, and the counts of an
evaluation.
"""

import operator
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, fx, nn

from whale_train.models.batch_parts.target_means import probability
from whale_train.models.batch_parts.value_losses import ValueLoss
from whale_train.runtime.base.answers import AnswerKeeper, Answers, Int64s
from whale_train.runtime.base.host_copies import HostCopies
from whale_train.runtime.compile.compiler import Compiler
from whale_train.runtime.compile.regions import compile_regions
from whale_train.runtime.graph.block_modules import Blocks
from whale_train.runtime.graph.shard_rng import SharedRandom
from whale_train.runtime.kernels.streamed_weights import Fetched, StreamedWeights


class Counts:
    """The counts of an evaluation graph's cross-entropies, one scalar tensor per loss call.

    correct: numbers of right answers.
    targets: numbers of targets.
    answers: the keeper that also gets the answers of a micro-batch; None: no keeper.
    predicts: whether answers must have probabilities (`AnswerKeeper.predicts`). It is the same on
        all ranks, some of which have no keeper.
    weight: the weight of the batch that is evaluated.
    samples: the numbers of the samples of the micro-batch whose forward runs.
    calls: the number of losses that this forward has called.
    """

    def __init__(self) -> None:
        self.correct: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.answers: AnswerKeeper | None = None
        self.predicts = False
        self.weight = 1.0
        self.samples: Int64s = np.empty(0, np.int64)
        self.calls = 0

    def begin(self, samples: Int64s) -> None:
        """Set the samples of the micro-batch whose forward runs next, int64 `[n]`."""
        self.samples, self.calls = samples, 0

    def add(self, answers: Answers) -> None:
        """Add the answers of one loss call."""
        right = (answers.predicted == answers.target) & answers.counted
        self.correct.append(right.sum())
        self.targets.append(answers.counted.sum())
        if self.answers is not None:
            self.answers.add(self.weight, self.samples, self.calls, answers)
        self.calls += 1

    def answered(self, logits: Tensor, target: Tensor, counted: Tensor, dim: int) -> Answers:
        """Return the answers of one loss call over unsharded classes, which are in dimension `dim`
        of the logits."""
        predicted = logits.argmax(dim)
        probabilities = probability(logits, predicted, dim) if self.predicts else None
        return Answers(predicted, target, counted, probabilities)

    def add_logits(self, logits: Tensor, target: Tensor, counted: Tensor, dim: int) -> None:
        """Add the answers of one loss call over unsharded logits, whose classes are in dimension
        `dim`."""
        self.add(self.answered(logits, target, counted, dim))

    def add_values(self, kind: ValueLoss, values: Tensor, target: Tensor) -> None:
        """Add the values of one loss call of `kind`, where the keeper has `predicts`."""
        if self.answers is not None and self.predicts:
            predicted, probabilities = kind.predicted(values)
            counted = torch.ones_like(target, dtype=torch.bool)
            answers = Answers(predicted, target, counted, probabilities)
            self.answers.add(self.weight, self.samples, self.calls, answers)
            self.calls += 1

    def take(self) -> tuple[float, float]:
        """Return (correct, targets) since the last call, and clear both."""
        counts = (float(sum(map(float, self.correct))), float(sum(map(float, self.targets))))
        self.correct.clear()
        self.targets.clear()
        return counts


class SegmentModule(nn.Module):
    """One segment of the plan on one rank.

    Call it with the values `takes`, then the model inputs `inputs`; it returns the values `gives`,
    as a tuple. Its parameters are attributes of this module, or of its blocks once it is divided;
    the graphs take them as arguments.

    takes: names of the values that other segments pass to this one.
    gives: names of the values that it returns.
    tensors: parameters and buffers that it owns, by path in the model.
    lent: parameters that it reads and another module owns, by path in the model.
    """

    def __init__(
        self,
        takes: tuple[str, ...],
        gives: tuple[str, ...],
        tensors: Mapping[str, Tensor],
        lent: Mapping[str, nn.Parameter] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.takes, self.gives = takes, gives
        self.tensor_names: dict[str, str] = {}  # path in the model -> attribute
        # Lent parameters are not registered: another engine owns them.
        self._lent = {path.replace(".", "__"): parameter for path, parameter in lent.items()}
        self.tensor_names |= dict(zip(lent, self._lent, strict=True))
        for path, tensor in tensors.items():
            name = path.replace(".", "__")
            self.tensor_names[path] = name
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self.inputs: tuple[str, ...] = ()
        self._streamed: StreamedWeights | None = None
        # The graphs are not submodules: they own nothing, and an engine must not walk into them.
        self._graphs: dict[bool, tuple[fx.GraphModule, tuple[str, ...]]] = {}
        self.blocks: Blocks | None = None

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers that the segment owns, each with its path in the
        model."""
        paths = {name: path for path, name in self.tensor_names.items()}
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            yield paths[name.rpartition(".")[2]], tensor

    def divide(
        self,
        recomputed: frozenset[str],
        random: SharedRandom,
        offloaded: frozenset[str] = frozenset(),
        copies: HostCopies | None = None,
    ) -> None:
        """Run the segment's graphs block by block from the next call on.

        `recomputed` are the paths of the modules that are computed again in the backward, with the
        shared random state `random`. What the modules in `offloaded` save is sent to `copies`.
        """
        blocks = (self, self._graphs, recomputed, random, frozenset(self._lent))
        self.blocks = Blocks(*blocks, offloaded, copies)
        self._graphs = {}

    def set_graph(
        self, training: bool, graph: fx.GraphModule, paths: tuple[str, ...], inputs: tuple[str, ...]
    ) -> None:
        """Use `graph` in training or in evaluation.

        The arguments of `graph` are the values `takes`, the model inputs `inputs`, then the tensors
        at `paths`.
        """
        self._graphs[training] = (graph, tuple(self.tensor_names[path] for path in paths))
        self.inputs = inputs

    def stream(self, weights: StreamedWeights) -> None:
        """Make the graphs fetch the lent parameters that are in `weights`, each before its first
        reader.

        Call it before the segment is divided.
        """
        if not any(parameter in weights for parameter in self.lent):
            return
        self._streamed = weights
        for graph, names in self._graphs.values():
            order = {node: number for number, node in enumerate(graph.graph.nodes)}
            for argument, name in _tensor_arguments(graph, names):
                parameter = self._lent.get(name)
                if parameter is None or parameter not in weights or not argument.users:
                    continue
                first = min(argument.users, key=order.__getitem__)
                graph.add_module(f"fetched_{name}", Fetched(weights, parameter))
                with graph.graph.inserting_before(first):
                    fetched = graph.graph.call_module(f"fetched_{name}", (argument,))
                fetched.meta = dict(first.meta)
                argument.replace_all_uses_with(fetched, partial(operator.is_not, fetched))
            graph.recompile()

    def compile(self, compiler: Compiler, *units: Container[str]) -> None:
        """Compile regions of the training graph with `compiler`, each inside or outside of a module
        in one of `units`.

        Call it before the segment is divided.
        """
        compile_regions(self._graphs[True][0], compiler, *units)

    @property
    def lent(self) -> Iterable[nn.Parameter]:
        """Return the parameters that the segment reads and another module owns."""
        return self._lent.values()

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._lent[name] if name in self._lent else getattr(self, name)
        return tensor

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the values `gives`, for the values `takes` and then the model inputs `inputs`."""
        if self._streamed is None:
            return self._run(*values)
        with self._streamed.keeping_none():
            return self._run(*values)

    def _run(self, *values: Tensor) -> tuple[Tensor, ...]:
        if self.blocks is not None:
            shared = (self._tensor(name) for name in self.blocks.kept(self.training))
            given: tuple[Tensor, ...] = self.blocks(*values, *shared)
            return given
        graph, names = self._graphs[self.training]
        result: tuple[Tensor, ...] = graph(*values, *(self._tensor(name) for name in names))
        return result


def _tensor_arguments(graph: fx.GraphModule, names: Sequence[str]) -> Iterator[tuple[fx.Node, str]]:
    """Return pairs of placeholder and tensor name: the last placeholders of `graph` take
    `names`."""
    arguments = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return zip(arguments[len(arguments) - len(names) :], names, strict=True)
