"""What plans are asked for in these tests: strategies and clusters as they ship, and training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from whale_train.errors import Fault
from whale_train.strategies.cluster import Cluster
from whale_train.strategies.grammar import Strategy, read_strategy
from whale_train.strategies.inventory import MachineFacts, read_inventory
from whale_train.strategies.sharing import Training

CONF = Path(__file__).parents[2] / "conf"


def strategy_of(mapping: Mapping[str, Any], name: str = "mine") -> Strategy:
    faults: list[Fault] = []
    strategy = read_strategy(mapping, name, faults)
    assert strategy is not None, faults
    return strategy


def shipped(name: str) -> Strategy:
    return strategy_of(yaml.safe_load((CONF / f"strategy/{name}.yaml").read_text()), name)


def mixed() -> Cluster:
    mapping = yaml.safe_load((CONF / "hardware/v100_p100_mix.yaml").read_text())
    cluster = read_inventory(mapping, "v100_p100_mix", [], MachineFacts(2, 10**9, (), None))
    assert cluster is not None
    return cluster


def training(global_batch: int = 2000, precision: str = "fp32", **options: Any) -> Training:
    return Training(global_batch, precision, 0.0, "sgd", {"lr": 0.1, **options})
