"""Read the shipped strategy files as candidates of a search.

A search must not be slower than a file that ships with it: each file that fits the devices is
estimated, and simulated if its estimate is near the fastest step. Owns reading the files, and
finding the mesh of each.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from whale_train.errors import Fault
from whale_train.strategies.estimate.candidates import Candidate, Mesh, Part
from whale_train.strategies.grammar.form import needs_graph
from whale_train.strategies.grammar.nodes import Replicate, Split, Strategy, read_strategy
from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.plan.training import Training
from whale_train.strategies.stages.micro_batches import PER_STAGE
from whale_train.strategies.stages.placement import form_of, place_ranks


@dataclass(frozen=True)
class Shipped:
    """A shipped strategy file and its candidate.

    name: name of the file, without its extension.
    written: content of the file.
    candidate: the candidate whose estimate stands for the strategy.
    """

    name: str
    written: Mapping[str, Any]
    candidate: Candidate


@cache
def strategy_files() -> Mapping[str, Mapping[str, Any]]:
    """Return the content of every shipped strategy file by name. Files that ask for a search are
    left out."""
    folder = files("whale_train.conf") / "strategy"
    by_name = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.name.endswith(".yaml"):
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            if content.get("graph") != "auto":
                by_name[path.name.removesuffix(".yaml")] = content
    return by_name


def shipped(cluster: Cluster, training: Training, balance: str) -> Sequence[Shipped]:
    """Return the shipped strategies that fit all devices of `cluster` and share work by `balance`.
    A file with a `devices` entry is left out, since it is for that number of devices."""
    fitting = []
    for name, content in strategy_files().items():
        faults: list[Fault] = []
        strategy = read_strategy(content, name, faults)
        if strategy is None or strategy.balance != balance or strategy.devices is not None:
            continue
        candidate = _candidate(strategy, cluster, training)
        if candidate is not None:
            fitting.append(Shipped(name, content, candidate))
    return fitting


def _candidate(strategy: Strategy, cluster: Cluster, training: Training) -> Candidate | None:
    """Return the candidate nearest to `strategy`; None where `strategy` does not fit `cluster`, and
    for splits of dense parts beside a replicated rest, which a search does not know."""
    count, devices = len(cluster.devices), tuple(cluster.kinds.items())
    faults: list[Fault] = []
    form = form_of(strategy, cluster, training, faults)
    if form is None or faults or form.members not in (1, count):
        return None
    if any(stage.body and "tensor" in (x.dim for x in stage.splits) for stage in form.stages):
        return None  # the search knows no dense parts beside a replicated rest
    if any(stage.shares_sequence for stage in form.stages):
        return None  # nor members that divide positions
    if not needs_graph(strategy) or form.members > 1:
        mesh = Mesh(devices, count, (Part("", 1, 1, 1),))
        has_experts = any(s.split is not None and s.split.dim == "experts" for s in form.stages)
        beside = (
            Candidate(mesh, experts=form.members)
            if has_experts
            else Candidate(mesh, split_head=form.members > 1)
        )
        return _kept(beside, form.keeper)
    seated = place_ranks([(s.device, s.copies, s.shards) for s in form.stages], form.copies,
                   cluster.devices)  # fmt: skip
    kinds = []
    for number in range(len(form.stages)):
        names = Counter(
            cluster.devices[rank].name
            for copy in seated.positions
            for position in seated.of_stage(number)
            for rank in copy[position]
        )
        kinds.append(next(iter(names)) if len(names) == 1 else "")
    parts = list[Part]()
    for stage, kind in zip(form.stages, kinds, strict=True):
        part = Part("" if "" in kinds else kind, 1, stage.copies, stage.shards)
        if parts and replace(parts[-1], stages=1) == part:
            parts[-1] = replace(part, stages=parts[-1].stages + 1)
        else:
            parts.append(part)
    if len({part.kind for part in parts}) == 1 and len(devices) == 1:
        parts = [replace(part, kind="") for part in parts]
    split = form.stages[0].split
    dim = split.dim if isinstance(split, Split) else "auto"
    mesh = Mesh(devices, form.copies, tuple(parts))
    pipeline, pieces = form.pipeline, 0
    if pipeline is not None:
        wanted = max(PER_STAGE * mesh.stages, mesh.widest)
        pieces = pipeline.micro_batches or max(1, min(wanted, training.global_batch // form.copies))
    schedule = pipeline.schedule if pipeline is not None else "1f1b"
    candidate = Candidate(mesh, pieces, schedule, dim=dim)
    return _kept(candidate, form.keeper)


def _kept(candidate: Candidate, keeper: Replicate | None) -> Candidate:
    """Return `candidate` with the ZeRO stage and offload of `keeper` (None: unchanged)."""
    if keeper is None:
        return candidate
    offload = "all" if keeper.offload_parameters == "cpu" else keeper.offload_optimizer
    return replace(candidate, zero=keeper.zero, offload=offload.replace("cpu", "optimizer"))
