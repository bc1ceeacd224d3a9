"""The strategy grammar: what a strategy file may say, read into frozen nodes.

Owns the keys, their types and defaults, and which nestings have a meaning. What form they come
down to on how many devices is `normal_form.py`'s. Every fault carries the full path of its key,
such as `strategy.graph.replicate.of.pipeline.stages[2].split.degree`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, cast

from whale_train.errors import Fault, closest, nearest
from whale_train.other_trainers import known_elsewhere

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
SPLIT_DIMS = ("auto", "tensor", "vocabulary", "experts", "sequence")
BESIDE_DIMS = ("auto", "tensor", "vocabulary", "experts")  # of a split beside a replicate
PATTERNS = ("replicate", "column", "row", "vocabulary", "experts")
RECOMPUTE = ("none", "full", "auto")
OFFLOAD = ("none", "cpu")
BALANCE = ("hardware", "even")
MOST_MICRO_BATCHES = 10_000  # of a step; a plan orders each
_BY_GLOB, _LISTED = "{*.q_proj.weight: column}", '[{weight: "*.q_proj.weight", pattern: column}]'


@dataclass(frozen=True)
class Replicate:
    """Copies that share the batch; `zero` says how they keep what they have in common."""

    path: str
    degree: int | None = None
    zero: int = 0
    offload_optimizer: str = "none"
    offload_parameters: str = "none"
    modules: tuple[str, ...] = ("*",)
    of: tuple["Node", ...] = ()

    @property
    def offloads(self) -> bool:
        """Whether copies keep anything on their hosts."""
        return (self.offload_optimizer, self.offload_parameters) != ("none", "none")

    @property
    def streams(self) -> bool:
        """Whether weights come from the host when they are read, without ZeRO (docs/adr/051)."""
        return not self.zero and self.offload_parameters == "cpu"


@dataclass(frozen=True)
class Split:
    """One copy whose tensors are sharded over its devices. `patterns` are (glob of weights or
    modules, pattern) given by hand, the first that matches a weight and that it can have
    counting."""

    path: str
    degree: int | None = None
    dim: str = "auto"
    modules: tuple[str, ...] = ("*",)
    patterns: tuple[tuple[str, str], ...] = ()
    of: tuple["Node", ...] = ()


@dataclass(frozen=True)
class Stage:
    """A named slice of the model's forward, one after another in a pipeline; held by devices of
    the kind `device`, where it says one."""

    path: str
    modules: tuple[str, ...] | None = None
    recompute: str = "none"
    device: str | None = None
    of: tuple["Node", ...] = ()


@dataclass(frozen=True)
class Pipeline:
    """Stages on disjoint devices; `stages` is their number (a balanced cut) or the nodes."""

    path: str
    stages: "int | tuple[Node, ...]"
    micro_batches: int | None = None
    schedule: str = "1f1b"


Node = Replicate | Split | Stage | Pipeline


@dataclass(frozen=True)
class Strategy:
    """A whole strategy file. `devices` are those of the inventory it may use: the first so many, so
    many of each kind, or all (None). Without a node in `graph` (auto) it is for the planner to
    find, within `time_limit_s` (0: once a fixed number of tasks have been simulated; None: until
    all have been whose estimates are near the fastest)."""

    name: str
    graph: tuple[Node, ...]
    balance: str = "hardware"
    devices: int | Mapping[str, int] | None = None
    time_limit_s: float | None = None

    @property
    def is_auto(self) -> bool:
        return not self.graph


def every_node(nodes: "tuple[Node, ...]") -> Iterator[Node]:
    """`nodes` and all that is inside them."""
    for node in nodes:
        yield node
        inside = node.stages if isinstance(node, Pipeline) else node.of
        yield from every_node(inside if isinstance(inside, tuple) else ())


def read_strategy(mapping: Mapping[str, Any], name: str, faults: list[Fault]) -> Strategy | None:
    """Return a strategy from plain YAML values; None when `faults` grew."""
    reader = _Reader(faults)
    before = len(faults)
    given = reader.keys(mapping, "strategy", ("graph", "balance", "devices", "time_limit_s"))
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
    return Strategy(name, graph, balance, devices, limit) if len(faults) == before else None


class _Reader:
    """Reads nodes, appending to one list of faults; a faulty value reads as its default."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults

    def fault(self, key: str, value: object, rule: str, remedy: str) -> None:
        text = "null" if value is None else str(value)
        self.faults.append(Fault(key, text, rule, remedy))

    def nodes(self, value: Any, path: str, inside: str | None) -> tuple[Node, ...]:
        """Return a node, or a list of colocated nodes."""
        if not isinstance(value, list):
            node = self.node(value, path, inside)
            return (node,) if node else ()
        if not value:
            self.fault(path, "[]", "is an empty list", "give at least one node")
        shared = inside != "pipeline"  # whose stages have devices of their own
        beside = shared and any(_primitive(item) == "replicate" for item in value)
        read = [self.node(item, f"{path}[{i}]", inside, beside) for i, item in enumerate(value)]
        return tuple(node for node in read if node)

    def node(
        self, value: Any, path: str, inside: str | None, beside_copies: bool = False
    ) -> Node | None:
        """Return a node; `beside_copies`, in a list with a replicate."""
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
        given = self.keys(body, path, ("degree", "zero", "offload", "modules", "of"))
        offload = given.get("offload")
        if offload is None:
            offload = {}
        if not isinstance(offload, Mapping):
            rule = "is not a mapping"
            remedy = "use {optimizer: cpu, parameters: none}"
            self.fault(f"{path}.offload", offload, rule, remedy)
            offload = {}
        kept = self.keys(offload, f"{path}.offload", ("optimizer", "parameters"))
        zero = given.get("zero", 0)
        if type(zero) is not int or zero not in (0, 1, 2, 3):  # True == 1 == 1.0
            self.fault(f"{path}.zero", zero, "is not a ZeRO stage", "use 0, 1, 2 or 3")
            zero = 0
        optimizer = self.choice(kept, f"{path}.offload", "optimizer", OFFLOAD, "none")
        parameters = self.choice(kept, f"{path}.offload", "parameters", OFFLOAD, "none")
        if zero == 0 and optimizer != "none":
            rule = "needs ZeRO: the copies' optimizer state is only moved once it is partitioned"
            remedy = f"use {path}.zero=1, 2 or 3"
            self.fault(f"{path}.offload.optimizer", optimizer, rule, remedy)
        if zero != 3 and parameters != "none":
            rule = "needs ZeRO 3: only partitioned parameters can live elsewhere"
            self.fault(f"{path}.offload.parameters", parameters, rule, f"use {path}.zero=3")
        return Replicate(
            path,
            degree=self.count_or_auto(given, path, "degree"),
            zero=zero,
            offload_optimizer=optimizer,
            offload_parameters=parameters,
            modules=self.modules(given, path) or ("*",),
            of=self.children(given, path, "replicate"),
        )

    def split(self, body: Mapping[str, Any], path: str) -> Split:
        return self.any_split(body, path, SPLIT_DIMS)

    def split_beside(self, body: Mapping[str, Any], path: str) -> Split:
        """Return a split beside a replicate: of the head's classes, experts, or other modules."""
        return self.any_split(body, path, BESIDE_DIMS)

    def any_split(self, body: Mapping[str, Any], path: str, dims: tuple[str, ...]) -> Split:
        given = self.keys(body, path, ("degree", "dim", "modules", "patterns", "of"))
        return Split(
            path,
            degree=self.count_or_auto(given, path, "degree"),
            dim=self.choice(given, path, "dim", dims, "auto"),
            modules=self.modules(given, path) or ("*",),
            patterns=self.patterns(given, path),
            of=self.children(given, path, "split"),
        )

    def stage(self, body: Mapping[str, Any], path: str) -> Stage:
        given = self.keys(body, path, ("modules", "recompute", "device", "of"))
        return Stage(
            path,
            modules=None if given.get("modules") == "auto" else self.modules(given, path),
            recompute=self.choice(given, path, "recompute", RECOMPUTE, "none"),
            device=self.device(given, path),
            of=self.children(given, path, "stage"),
        )

    def pipeline(self, body: Mapping[str, Any], path: str) -> Pipeline | None:
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
        return self.nodes(given["of"], f"{path}.of", inside) if given.get("of") is not None else ()

    def keys(self, body: Any, path: str, known: tuple[str, ...]) -> dict[str, Any]:
        """`body` without the keys nobody knows, each of which is a fault."""
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
        value = given.get(key, default)
        if value not in choices:
            self.fault(f"{path}.{key}", value, "is unknown", nearest(str(value), choices))
            return default
        return cast(str, value)

    def count_or_auto(self, given: Mapping[str, Any], path: str, key: str) -> int | None:
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
        """Read a number of devices, or a number for each kind; None is all."""
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

    def seconds(self, given: Mapping[str, Any], path: str, key: str) -> float | None:
        value = given.get(key)
        if value is None:
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < inf:
            self.fault(f"{path}.{key}", value, "is not a number of seconds", "use 10, or null")
            return None
        return float(value)

    def device(self, given: Mapping[str, Any], path: str) -> str | None:
        value = given.get("device", "auto")
        if not _is_name(value):
            rule, remedy = "is not the name of a device", "use one of hardware's, or auto"
            self.fault(f"{path}.device", value, rule, remedy)
            return None
        return None if value == "auto" else cast(str, value)

    def patterns(self, given: Mapping[str, Any], path: str) -> tuple[tuple[str, str], ...]:
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
        """Return the glob and the pattern of an item of a list of patterns."""
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
        value = given.get("modules")
        if value is None:
            return None
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not listed or not all(_is_name(x) for x in listed):
            rule = "is not a module path"
            remedy = 'use a path or glob such as "encoder.*", or a list of them'
            self.fault(f"{path}.modules", value, rule, remedy)
            return None
        return tuple(listed)


def _primitive(value: Any) -> str:
    """Return the primitive of what may be a node."""
    if isinstance(value, Mapping):
        return str(next(iter(value), ""))
    return str(value)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _meaningless(primitive: str, inside: str | None) -> tuple[str, str] | None:
    """Why `primitive` directly inside `inside` says nothing, and what to write instead."""
    if primitive == "stage" and inside != "pipeline":
        return "is a slice of a pipeline and stands only in its stages", "put it in pipeline.stages"
    if primitive == "pipeline" and inside in ("pipeline", "stage"):
        return "is a pipeline inside a stage", "list its stages in the outer pipeline instead"
    if inside == "split" and primitive in ("replicate", "pipeline"):
        rule = f"is a {primitive} inside a shard, which holds no whole {primitive} to make"
        return rule, f"put the split inside: {primitive}.{_child_key(primitive)}"
    return None


def _child_key(primitive: str) -> str:
    return "stages: [{split: ...}]" if primitive == "pipeline" else "of: {split: ...}"
