"""Read the strategy grammar: the content of a strategy file becomes frozen nodes.

Owns the keys, their types and defaults, and which nestings are meaningful. `normal_form.py` reduces
the nodes to a form on a number of devices. Every fault carries the full path of its key, such as
`strategy.graph.replicate.of.pipeline.stages[2].split.degree`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, cast

from whale_train.errors import Fault, closest, nearest
from whale_train.other_trainers import known_elsewhere
from whale_train.strategies.grammar.offload import read_offload
from whale_train.strategies.grammar.recompute import Recompute, read_recompute
from whale_train.strategies.grammar.state import AUTO, StateCut, read_state

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
SPLIT_DIMS = ("auto", "tensor", "vocabulary", "experts", "sequence", "context")
BESIDE_DIMS = ("auto", "tensor", "vocabulary", "experts")  # dims of a split beside a replicate
ATTENTIONS = ("auto", "heads", "ring", "gathered")  # of a split with dim: context
PATTERNS = ("replicate", "column", "row", "vocabulary", "experts")
BALANCE = ("hardware", "even")
MOST_MICRO_BATCHES = 10_000  # most micro-batches of a step; a plan orders each
_KEYS = ("graph", "balance", "devices", "prefer_intra_node", "time_limit_s", "logical_workers")
_BY_GLOB, _LISTED = "{*.q_proj.weight: column}", '[{weight: "*.q_proj.weight", pattern: column}]'


@dataclass(frozen=True)
class Replicate:
    """Replicas that divide the batch.

    path: path of the node's key in the strategy.
    degree: number of replicas (None: auto).
    zero: ZeRO stage of the replicas.
    offload_optimizer: `cpu` where the optimizer's state is in the host's memory, `nvme` where it is
        in files, `none`, or `auto` where the planner chooses (`resolver/open_offload.py`).
    offload_parameters: the same for the parameters.
    modules: paths or globs of the modules that are replicated.
    of: nodes inside each replica (empty: the model, or the stage around it).
    recompute: what is computed again in the backward (None: what a node around it says).
    offload_activations: `cpu` where what blocks save for their backward is on the host, `auto`
        where the planner chooses the blocks, or `none` (None: what a node around it says).
    offload_path: folder on every host in which ranks make the files of `nvme` (None: none are).
    state: how ZeRO cuts the replicas' state.
    """

    path: str
    degree: int | None = None
    zero: int = 0
    offload_optimizer: str = "none"
    offload_parameters: str = "none"
    modules: tuple[str, ...] = ("*",)
    of: tuple["Node", ...] = ()
    recompute: Recompute | None = None
    offload_activations: str | None = None
    offload_path: str | None = None
    state: StateCut = AUTO

    @property
    def offloads(self) -> bool:
        """Return True if replicas offload parameters or optimizer state to their hosts."""
        return (self.offload_optimizer, self.offload_parameters) != ("none", "none")

    @property
    def is_open(self) -> bool:
        """Return True if the planner chooses whether to offload parameters or optimizer state."""
        return "auto" in (self.offload_optimizer, self.offload_parameters)

    @property
    def streams(self) -> bool:
        """Return True if weights are streamed from the host when they are read, without ZeRO
        (docs/adr/051)."""
        return not self.zero and self.offload_parameters == "cpu"


@dataclass(frozen=True)
class Split:
    """One replica whose tensors are sharded over its devices.

    path: path of the node's key in the strategy.
    degree: number of devices (None: auto).
    dim: the dimension that is divided, one of `SPLIT_DIMS`.
    modules: paths or globs of the modules that are sharded.
    patterns: pairs (glob of weights or modules, pattern). The first pair counts whose glob matches
        a weight and whose pattern the weight can have.
    of: nodes inside of the split.
    recompute: what is computed again in the backward (None: what a node around it says).

    attention: how attention is computed over divided positions, one of `ATTENTIONS`.

    With `dim: context`, the weights stay whole and the positions of every sample are divided.
    """

    path: str
    degree: int | None = None
    dim: str = "auto"
    modules: tuple[str, ...] = ("*",)
    patterns: tuple[tuple[str, str], ...] = ()
    of: tuple["Node", ...] = ()
    recompute: Recompute | None = None
    attention: str = "auto"

    @property
    def shares_sequence(self) -> bool:
        """Return True if the devices divide the positions of every sample (context parallelism)."""
        return self.dim == "context"


@dataclass(frozen=True)
class Stage:
    """A slice of the model's forward; the stages of a pipeline are consecutive.

    path: path of the node's key in the strategy.
    modules: paths or globs of the modules that it must hold (None: auto).
    recompute: what is computed again in the backward (None: what a node around it says).
    device: kind of the devices that hold it (None: auto).
    of: nodes inside the stage (empty: one device).
    """

    path: str
    modules: tuple[str, ...] | None = None
    recompute: Recompute | None = None
    device: str | None = None
    of: tuple["Node", ...] = ()


@dataclass(frozen=True)
class Pipeline:
    """Stages on disjoint devices.

    path: path of the node's key in the strategy.
    stages: number of stages (a balanced cut), or the nodes of the stages.
    micro_batches: micro-batches of a replica's samples (None: auto).
    schedule: one of `SCHEDULES`.
    """

    path: str
    stages: "int | tuple[Node, ...]"
    micro_batches: int | None = None
    schedule: str = "1f1b"


Node = Replicate | Split | Stage | Pipeline


@dataclass(frozen=True)
class Strategy:
    """A complete strategy file.

    name: name of the strategy.
    graph: the nodes; empty (auto) where the planner searches for them.
    balance: how work is divided among devices, one of `BALANCE`.
    devices: devices of the inventory that it may use: the first so many, so many of each kind, or
        all (None).
    prefer_intra_node: True if neighbours in a copy of the model share a host where they can; False
        if copies of one part of it do.
    time_limit_s: seconds that the planner searches. 0: it simulates a fixed number of tasks. None:
        it simulates all candidates whose estimates are near the fastest.
    logical_workers: equal parts of the global batch that devices share, with the same bits on any
        number of devices (docs/adr/084). None: every device takes a share of its own size.
    """

    name: str
    graph: tuple[Node, ...]
    balance: str = "hardware"
    devices: int | Mapping[str, int] | None = None
    prefer_intra_node: bool = True
    time_limit_s: float | None = None
    logical_workers: int | None = None

    @property
    def is_auto(self) -> bool:
        """Return True if the planner searches for the nodes."""
        return not self.graph


def every_node(nodes: "tuple[Node, ...]") -> Iterator[Node]:
    """Yield `nodes` and all nodes inside them, each before its children."""
    for node in nodes:
        yield node
        inside = node.stages if isinstance(node, Pipeline) else node.of
        yield from every_node(inside if isinstance(inside, tuple) else ())


def read_strategy(mapping: Mapping[str, Any], name: str, faults: list[Fault]) -> Strategy | None:
    """Return the strategy described by `mapping`, of plain YAML values; None after adding to
    `faults`."""
    reader = _Reader(faults)
    before = len(faults)
    given = reader.keys(mapping, "strategy", _KEYS)
    if "graph" not in given:
        reader.fault("strategy.graph", "", "is missing", "give a node or a list of nodes")
        return None
    auto = given["graph"] == "auto"
    graph = () if auto else reader.nodes(given["graph"], "strategy.graph", inside=None)
    balance = reader.choice(given, "strategy", "balance", BALANCE, "hardware")
    devices = reader.devices(given, "strategy", "devices")
    limit = reader.seconds(given, "strategy", "time_limit_s")
    if limit is not None and not auto:
        rule = "limits the search of graph: auto, and the graph is given"
        reader.fault("strategy.time_limit_s", limit, rule, "use null, or strategy=auto")
    intra = given.get("prefer_intra_node", True)
    if not isinstance(intra, bool):
        reader.fault("strategy.prefer_intra_node", intra, "is no truth value", "use true or false")
    elif auto and not intra:
        rule = "places the stages of a given graph, and graph: auto is searched for"
        reader.fault("strategy.prefer_intra_node", "false", rule, "use true, or give a graph")
    workers = reader.workers(given, auto)
    if len(faults) > before:
        return None
    return Strategy(name, graph, balance, devices, intra, limit, workers)


class _Reader:
    """Reader of nodes, which collects faults in one list; a faulty value reads as its default."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults

    def fault(self, key: str, value: object, rule: str, remedy: str) -> None:
        """Add a fault of `key`, with `value` written as in YAML."""
        text = "null" if value is None else str(value)
        self.faults.append(Fault(key, text, rule, remedy))

    def nodes(self, value: Any, path: str, inside: str | None) -> tuple[Node, ...]:
        """Return the nodes described by `value`: one node, or a list of colocated nodes. `inside`
        is the primitive around them (None: the strategy itself)."""
        if not isinstance(value, list):
            node = self.node(value, path, inside)
            return (node,) if node else ()
        if not value:
            self.fault(path, "[]", "is an empty list", "give at least one node")
        shared = inside != "pipeline"  # stages of a pipeline have devices of their own
        beside = shared and any(_primitive(item) == "replicate" for item in value)
        read = [self.node(item, f"{path}[{i}]", inside, beside) for i, item in enumerate(value)]
        return tuple(node for node in read if node)

    def node(
        self, value: Any, path: str, inside: str | None, beside_copies: bool = False
    ) -> Node | None:
        """Return the node described by `value`, or None after a fault. `beside_copies` is True if
        the node is in a list with a replicate."""
        readers: dict[str, Callable[[Mapping[str, Any], str], Node | None]] = {
            "replicate": self.replicate,
            "split": self.split_beside if beside_copies else self.split,
            "stage": self.stage,
            "pipeline": self.pipeline,
        }
        if isinstance(value, str) and value in readers:  # `- replicate` for `- replicate: {}`
            value = {value: None}
        if not isinstance(value, Mapping):
            self.fault(path, value, "is not a node", f"use one of: {', '.join(sorted(readers))}")
            return None
        for primitive in value:
            if primitive not in readers:
                rule, remedy = "is not a primitive", nearest(str(primitive), readers)
                self.fault(f"{path}.{primitive}", "", rule, remedy)
        if not all(primitive in readers for primitive in value):
            return None
        if len(value) != 1:
            keys = ", ".join(map(str, value)) or "none"
            self.fault(path, "", f"has {len(value)} keys ({keys})", "a node has one, its primitive")
            return None
        ((primitive, body),) = value.items()
        path = f"{path}.{primitive}"
        refusal = _meaningless(primitive, inside)
        if refusal:
            self.fault(path, "", *refusal)
            return None
        if body is None:
            body = {}
        if not isinstance(body, Mapping):
            self.fault(path, body, "is not a mapping", f"use {primitive}: {{key: value}}")
            return None
        return readers[primitive](body, path)

    def replicate(self, body: Mapping[str, Any], path: str) -> Replicate:
        """Return the replicate whose keys are in `body`."""
        known = ("degree", "zero", "state", "offload", "modules", "recompute", "of")
        given = self.keys(body, path, known)
        zero = given.get("zero", 0)
        if type(zero) is not int or zero not in (0, 1, 2, 3):  # True == 1 == 1.0
            self.fault(f"{path}.zero", zero, "is not a ZeRO stage", "use 0, 1, 2 or 3")
            zero = 0
        offload = read_offload(given.get("offload"), f"{path}.offload", zero, self.faults)
        state = read_state(given.get("state"), f"{path}.state", self.faults)
        if zero == 0 and state.mode != "auto":
            rule = "needs ZeRO: without it every copy keeps all of its state"
            self.fault(f"{path}.state", state, rule, f"use {path}.zero=1, 2 or 3")
        elif state.is_uneven and (offload.optimizer, offload.parameters) != ("none", "none"):
            rule = "cuts what devices keep, and offload keeps it on the hosts"
            self.fault(f"{path}.state", state, rule, "use even, or no offload")
        return Replicate(
            path,
            degree=self.count_or_auto(given, path, "degree"),
            zero=zero,
            offload_optimizer=offload.optimizer,
            offload_parameters=offload.parameters,
            modules=self.modules(given, path) or ("*",),
            of=self.children(given, path, "replicate"),
            recompute=self.recompute(given, path),
            offload_activations=offload.activations,
            offload_path=offload.path,
            state=state,
        )

    def split(self, body: Mapping[str, Any], path: str) -> Split:
        """Return the split whose keys are in `body`."""
        return self.any_split(body, path, SPLIT_DIMS, ("recompute", "attention"))

    def split_beside(self, body: Mapping[str, Any], path: str) -> Split:
        """Return a split beside a replicate: of the head's classes, of experts, or of other
        modules."""
        return self.any_split(body, path, BESIDE_DIMS)

    def any_split(
        self, body: Mapping[str, Any], path: str, dims: tuple[str, ...], more: tuple[str, ...] = ()
    ) -> Split:
        """Return the split whose keys are in `body`, and whose `dim` must be one of `dims`. `more`
        are the keys that only some splits have."""
        given = self.keys(body, path, ("degree", "dim", "modules", "patterns", "of", *more))
        if given.get("dim") == "context":
            for key in ("modules", "patterns"):
                if given.get(key) not in (None, "*"):
                    rule = "says which weights are cut, and dim: context leaves all of them whole"
                    self.fault(f"{path}.{key}", given[key], rule, "leave it out, or use dim: auto")
        elif "attention" in given:
            rule = "divides attention by positions, and only dim: context divides positions"
            self.fault(f"{path}.attention", given["attention"], rule, "add dim: context")
        return Split(
            path,
            degree=self.count_or_auto(given, path, "degree"),
            dim=self.choice(given, path, "dim", dims, "auto"),
            modules=self.modules(given, path) or ("*",),
            patterns=self.patterns(given, path),
            of=self.children(given, path, "split"),
            recompute=self.recompute(given, path),
            attention=self.choice(given, path, "attention", ATTENTIONS, "auto"),
        )

    def stage(self, body: Mapping[str, Any], path: str) -> Stage:
        """Return the stage whose keys are in `body`."""
        given = self.keys(body, path, ("modules", "recompute", "device", "of"))
        return Stage(
            path,
            modules=None if given.get("modules") == "auto" else self.modules(given, path),
            recompute=self.recompute(given, path),
            device=self.device(given, path),
            of=self.children(given, path, "stage"),
        )

    def pipeline(self, body: Mapping[str, Any], path: str) -> Pipeline | None:
        """Return the pipeline whose keys are in `body`; None where its stages are missing or
        faulty."""
        given = self.keys(body, path, ("micro_batches", "schedule", "stages"))
        micro_batches = self.count_or_auto(given, path, "micro_batches")
        if micro_batches is not None and micro_batches > MOST_MICRO_BATCHES:
            rule = f"is more than the {MOST_MICRO_BATCHES:,} micro-batches that are planned for"
            remedy = f"use at most {MOST_MICRO_BATCHES}"
            self.fault(f"{path}.micro_batches", micro_batches, rule, remedy)
            micro_batches = None
        schedule = self.choice(given, path, "schedule", SCHEDULES, "1f1b")
        stages = given.get("stages")
        key = f"{path}.stages"
        if stages is None:
            self.fault(key, "", "is missing", "give their number, or a list of nodes")
            return None
        if isinstance(stages, list):
            nodes = self.nodes(stages, key, inside="pipeline")
            return Pipeline(path, nodes, micro_batches, schedule)
        if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
            rule = "is neither a number of stages nor a list of nodes"
            self.fault(key, stages, rule, "use a whole number of at least 1, or a list")
            return None
        return Pipeline(path, stages, micro_batches, schedule)

    def children(self, given: Mapping[str, Any], path: str, inside: str) -> tuple[Node, ...]:
        """Return the nodes under the key `of`; () without it."""
        return self.nodes(given["of"], f"{path}.of", inside) if given.get("of") is not None else ()

    def keys(self, body: Any, path: str, known: tuple[str, ...]) -> dict[str, Any]:
        """Return `body` without its unknown keys, each of which is a fault."""
        for key in body:
            if key not in known:
                foreign = path == "strategy" and not closest(str(key), known)
                instead = known_elsewhere(str(key)) if foreign else None
                of_search = () if body.get("graph") == "auto" else ("time_limit_s",)
                settable = [name for name in known if name not in of_search]
                remedy = nearest(str(key), settable) if instead is None else instead.remedy
                self.fault(f"{path}.{key}", "", "is not a key here", remedy)
        return {key: value for key, value in body.items() if key in known}

    def choice(
        self, given: Mapping[str, Any], path: str, key: str, choices: tuple[str, ...], default: str
    ) -> str:
        """Return the value of `key`; `default` where it is missing or, after a fault, none of
        `choices`."""
        value = given.get(key, default)
        if value not in choices:
            self.fault(f"{path}.{key}", value, "is unknown", nearest(str(value), choices))
            return default
        return cast(str, value)

    def count_or_auto(self, given: Mapping[str, Any], path: str, key: str) -> int | None:
        """Return the value of `key` as a number of at least 1; None for auto or after a fault."""
        value = given.get(key, "auto")
        if value == "auto":
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            rule = "is not a whole number of at least 1"
            self.fault(f"{path}.{key}", value, rule, "use such a number, or auto")
            return None
        return value

    def devices(
        self, given: Mapping[str, Any], path: str, key: str
    ) -> int | Mapping[str, int] | None:
        """Return a number of devices, a number for each kind of device, or None for all devices."""
        value = given.get(key)
        if not isinstance(value, Mapping):
            return self.count_or_auto(given, path, key)
        if not value:
            self.fault(f"{path}.{key}", "{}", "names no device", "name one, or use auto")
        counts = {str(kind): self.count_or_auto(value, f"{path}.{key}", kind) for kind in value}
        for kind in (kind for kind, count in value.items() if count == "auto"):
            rule, remedy = "is not a whole number of at least 1", "use such a number"
            self.fault(f"{path}.{key}.{kind}", "auto", rule, remedy)
        return {kind: count for kind, count in counts.items() if count is not None}

    def workers(self, given: Mapping[str, Any], auto: bool) -> int | None:
        """Return the number of logical workers; None where there are none, or after a fault. `auto`
        is True if the planner searches for the graph."""
        key, value = "strategy.logical_workers", given.get("logical_workers")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            rule, remedy = "is not a whole number of at least 1", "use such a number, or null"
            self.fault(key, value, rule, remedy)
        elif value > MOST_MICRO_BATCHES:
            rule = f"is more than the {MOST_MICRO_BATCHES:,} parts of a step that are planned for"
            self.fault(key, value, rule, f"use at most {MOST_MICRO_BATCHES}")
        elif auto:
            rule = "are copies of the whole model, and graph: auto may divide it"
            self.fault(key, value, rule, "use strategy=elastic_dp, or null")
        else:
            return value
        return None

    def recompute(self, given: Mapping[str, Any], path: str) -> Recompute | None:
        """Return the value of `recompute` of a node; None without one, or after a fault."""
        return read_recompute(given.get("recompute"), f"{path}.recompute", self.faults)

    def seconds(self, given: Mapping[str, Any], path: str, key: str) -> float | None:
        """Return the value of `key` as seconds of at least 0; None where it is missing or
        faulty."""
        value = given.get(key)
        if value is None:
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < inf:
            self.fault(f"{path}.{key}", value, "is not a number of seconds", "use 10, or null")
            return None
        return float(value)

    def device(self, given: Mapping[str, Any], path: str) -> str | None:
        """Return the kind of device that a stage names; None for auto or after a fault."""
        value = given.get("device", "auto")
        if not _is_name(value):
            rule, remedy = "is not the name of a device", "use one of hardware's, or auto"
            self.fault(f"{path}.device", value, rule, remedy)
            return None
        return None if value == "auto" else cast(str, value)

    def patterns(self, given: Mapping[str, Any], path: str) -> tuple[tuple[str, str], ...]:
        """Return the pairs (glob of weights, pattern) of a split, from a mapping or a list."""
        value = given.get("patterns")
        if value is None:
            return ()
        key = f"{path}.patterns"
        if isinstance(value, list):
            read = (self.pattern(item, f"{key}[{i}]") for i, item in enumerate(value))
            return tuple(pair for pair in read if pair is not None)
        if not isinstance(value, Mapping):
            rule, remedy = "is neither a mapping nor a list", f"use {_BY_GLOB} or {_LISTED}"
            self.fault(key, value, rule, remedy)
            return ()
        return tuple((str(k), self.choice(value, key, k, PATTERNS, "replicate")) for k in value)

    def pattern(self, item: Any, path: str) -> tuple[str, str] | None:
        """Return the pair (glob of weights, pattern) of one item of a list; None after a fault."""
        if not isinstance(item, Mapping):
            self.fault(path, item, "is not a weight with its pattern", f"use {_LISTED[1:-1]}")
            return None
        given = self.keys(item, path, ("weight", "pattern"))
        for key in ("weight", "pattern"):
            if key not in given:
                self.fault(f"{path}.{key}", "", "is missing", f"use {_LISTED[1:-1]}")
        weight = given.get("weight", "*")
        if not _is_name(weight):
            self.fault(f"{path}.weight", weight, "is not a glob of weights", f"use {_LISTED[1:-1]}")
            return None
        return weight, self.choice(given, path, "pattern", PATTERNS, "replicate")

    def modules(self, given: Mapping[str, Any], path: str) -> tuple[str, ...] | None:
        """Return the module paths or globs of a node; None where they are missing or faulty."""
        value = given.get("modules")
        if value is None:
            return None
        paths = [value] if isinstance(value, str) else value
        if not isinstance(paths, list) or not paths or not all(_is_name(x) for x in paths):
            rule = "is not a module path"
            remedy = 'use a path or glob such as "encoder.*", or a list of them'
            self.fault(f"{path}.modules", value, rule, remedy)
            return None
        return tuple(paths)


def _primitive(value: Any) -> str:
    """Return the primitive that `value` names, assuming that it is a node."""
    if isinstance(value, Mapping):
        return str(next(iter(value), ""))
    return str(value)


def _is_name(value: object) -> bool:
    """Return True if `value` is a non-empty string."""
    return isinstance(value, str) and bool(value)


def _meaningless(primitive: str, inside: str | None) -> tuple[str, str] | None:
    """Return why `primitive` directly inside `inside` has no meaning, and what to write instead;
    None where the nesting has a meaning."""
    if primitive == "stage" and inside != "pipeline":
        return "is a slice of a pipeline and stands only in its stages", "put it in pipeline.stages"
    if primitive == "pipeline" and inside in ("pipeline", "stage"):
        return "is a pipeline inside a stage", "list its stages in the outer pipeline instead"
    if inside == "split" and primitive in ("replicate", "pipeline"):
        rule = f"is a {primitive} inside a split, and a shard has no {primitive} of its own"
        return rule, f"put the split inside: {primitive}.{_child_key(primitive)}"
    return None


def _child_key(primitive: str) -> str:
    """Return the key and value that put a split inside of `primitive`, for messages."""
    return "stages: [{split: ...}]" if primitive == "pipeline" else "of: {split: ...}"
