"""Time planning by number of devices and by depth of the model, and searches for a strategy.

python benchmarks/planning.py
python benchmarks/planning.py --parts search

Set-up and planning are timed separately, after imports, in this process. Set-up is the export and
the profile of the model, or the reading of a cached profile, as the best of three. Nodes have
8 V100, with 50 Gbit/s between nodes. The model is a GPT of width 512, with 64 tokens a sample and 4
samples a device. *Full speed* is a step's time if all devices computed at their highest rates and
nothing waited.
"""

import argparse
import logging
import os
import time
from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from whale_train.launcher.planning.profile_cache import keep_profile, kept_profile
from whale_train.models.options import ModelOptions
from whale_train.models.profile.cache_key import profile_key
from whale_train.models.profile.measure import profile_model
from whale_train.strategies.grammar.nodes import Strategy, read_strategy
from whale_train.strategies.graph.operation_graph import InputField, ModelProfile
from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.hardware.inventory import MachineFacts, read_inventory
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.resolve import resolve
from whale_train.strategies.search.search import search
from whale_train.strategies.stages.analysis import ModelAnalysis
from whale_train.user_cache import VARIABLE

TOKENS, VOCABULARY = 64, 257
SPLIT = {"split": {"degree": 8}}
STRATEGIES: Mapping[str, Any] = {
    "dp": {"replicate": {}},
    "zero3": {"replicate": {"zero": 3}},
    "copies of split 8": {"replicate": {"of": SPLIT}},
    "copies of pipeline 8": {"replicate": {"of": {"pipeline": {"stages": 8}}}},
    "3d": {"replicate": {"of": {"pipeline": {"micro_batches": 8, "stages": [SPLIT] * 4}}}},
}
V100, P100 = ("v100_sxm2_32gb", "nvlink2"), ("p100_pcie_16gb", "pcie3_x16")
A100 = ("a100_sxm_40gb", "nvlink3")
SEARCHES: Mapping[str, Sequence[tuple[int, str, str]]] = {
    "8 V100": [(8, *V100)],
    "256 V100": [(256, *V100)],
    "8 V100 + 8 P100": [(8, *V100), (8, *P100)],
    "128 V100 + 384 P100": [(128, *V100), (384, *P100)],
    **{
        f"{count} each of A100, V100, P100": [(count, *A100), (count, *V100), (count, *P100)]
        for count in (32, 64, 256)
    },
}


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.formatter_class = words
    parser.add_argument("--devices", nargs="+", type=int, default=[64, 1024, 10240])
    parser.add_argument("--depths", nargs="+", type=int, default=[12, 24, 48, 96, 192])
    parser.add_argument("--depth", type=int, default=24, help="of the model planned on many")
    parser.add_argument("--parts", nargs="+", choices=("plans", "search"), default=["plans"])
    parser.add_argument("--searches", nargs="+", choices=SEARCHES, default=list(SEARCHES))
    parser.add_argument("--time-limit", type=float, default=0.0, help="of a search, in seconds")
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    with TemporaryDirectory() as folder:
        os.environ[VARIABLE] = folder  # a cache of its own
        if "plans" in options.parts:
            measure(options)
        if "search" in options.parts:
            measure_searches(options)


def measure(options: argparse.Namespace) -> None:
    """Print the seconds of plans, by number of devices and by depth."""
    profiled(2)  # the first export also sets up torch, which is not part of a model's time
    console = Console(width=100)
    profile, setup_s, again_s = profiled(options.depth)
    console.print(f"set-up of {options.depth} blocks: {setup_s:.2f} s; kept: {again_s:.3f} s")
    table = Table(title=f"Seconds of a plan, {options.depth} blocks", title_justify="left")
    table.add_column("strategy")
    for devices in options.devices:
        table.add_column(f"{devices:,} devices", justify="right")
    for name in STRATEGIES:
        seconds = (planned(profile, name, devices) for devices in options.devices)
        table.add_row(name, *(f"{plan_s:.2f}" for plan_s in seconds))
    console.print(table)
    table = Table(title="Seconds on 1,024 devices, by depth", title_justify="left")
    for heading in ("blocks", "set-up", "kept", *STRATEGIES):
        table.add_column(heading, justify="right")
    for depth in options.depths:
        profile, setup_s, again_s = profiled(depth)
        plans = (planned(profile, name, 1024) for name in STRATEGIES)
        seconds = (f"{plan_s:.2f}" for plan_s in plans)
        table.add_row(str(depth), f"{setup_s:.2f}", f"{again_s:.3f}", *seconds)
    console.print(table)


def measure_searches(options: argparse.Namespace) -> None:
    """Print the seconds of searches for a strategy, and the strategies that were found."""
    profiled(2)
    profile, setup_s, again_s = profiled(options.depth)
    title = f"strategy=auto, {options.depth} blocks (set-up {setup_s:.2f} s; kept {again_s:.3f} s)"
    table = Table(title=title, title_justify="left")
    for heading in ("devices", "seconds", "resolved", "found", "step", "full speed"):
        left = heading in ("devices", "found")
        table.add_column(heading, justify="left" if left else "right", overflow="fold")
    for name in options.searches:
        cluster = read(SEARCHES[name])
        batch = 4 * len(cluster.devices)
        training = Training(batch, "fp32", 0.0, "adamw", {"lr": 1e-3})
        asked = Strategy("auto", (), time_limit_s=options.time_limit)
        started = time.perf_counter()
        outcome = search(asked, cluster, ModelAnalysis(profile, "fp32"), training)
        seconds = time.perf_counter() - started
        step = outcome.considered.step.spans.seconds
        cells = (f"{seconds:.2f}", str(outcome.resolved), outcome.decisions[0].chosen)
        table.add_row(name, *cells, f"{step * 1e3:.1f} ms", f"{outcome.floor_s * 1e3:.1f} ms")
    Console(width=100).print(table)


def profiled(depth: int) -> tuple[ModelProfile, float, float]:
    """Return the profile of a GPT of `depth` blocks, the seconds of measuring it, and the seconds
    of reading it from the cache."""
    arguments = {"width": 512, "heads": 8, "depth": depth, "vocab_size": VOCABULARY}
    model = ModelOptions(_target_="whale_train.models.gpt.GPT", arguments=arguments)
    fields = tuple(
        InputField(name, (TOKENS,), "int64", VOCABULARY) for name in ("input_ids", "labels")
    )
    started = time.perf_counter()
    profile = profile_model(model, "gpt", fields, by_folding=True)
    seconds = time.perf_counter() - started
    key = profile_key(model, fields, by_folding=True)
    assert key is not None
    keep_profile(key, profile)
    again = []
    for _ in range(3):
        started = time.perf_counter()
        reloaded = kept_profile(profile_key(model, fields, by_folding=True) or "")
        again.append(time.perf_counter() - started)
        if reloaded != profile:
            raise SystemExit(f"what was kept of {depth} blocks is not what was measured")
    return profile, seconds, min(again)


def planned(profile: ModelProfile, name: str, devices: int) -> float:
    """Return the seconds of planning a strategy on V100s.

    profile: the profile of the model.
    name: name of the strategy, in STRATEGIES.
    devices: number of devices.
    """
    strategy = read_strategy({"graph": STRATEGIES[name]}, name, [])
    assert strategy is not None
    cluster = cluster_of(devices)
    training = Training(4 * devices, "fp32", 0.0, "adamw", {"lr": 1e-3})
    started = time.perf_counter()
    resolve(strategy, cluster, profile, training)
    return time.perf_counter() - started


def cluster_of(devices: int) -> Cluster:
    """Return a cluster of `devices` V100s."""
    return read([(devices, *V100)])


def read(kinds: Sequence[tuple[int, str, str]]) -> Cluster:
    """Return a cluster of nodes of 8 devices.

    kinds: the (number of devices, device, link) of each kind. Fewer than 8 devices are one node.
    """
    nodes = [
        {"count": max(1, n // 8), "devices": min(n, 8), "device": device, "link": link}
        for n, device, link in kinds
    ]
    mapping = {"nodes": nodes, "network": "ethernet_50g"}
    cluster = read_inventory(mapping, "many", [], MachineFacts(1, 10**9, (), None))
    assert cluster is not None
    return cluster


if __name__ == "__main__":
    main()
