"""What the search says of itself: how many strategies it simulated, and what it left out."""

import re
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operation_graphs import gpt
from tests.unit.plan_requests import training
from tests.unit.test_auto import AUTO, FAST, SLOW, cluster, found_for

from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.resolve import consider


def test_it_counts_what_it_simulated_and_what_it_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as were resolved without a fault, of more that were estimated."""
    considered: list[bool] = []

    def counting(*given: Any, **keys: Any) -> Any:
        considered.append(False)
        found = consider(*given, **keys)
        considered[-1] = not keys.get("moving")
        return found

    monkeypatch.setattr("whale_train.strategies.search.search.consider", counting)
    monkeypatch.setattr("whale_train.strategies.search.search._IMPROVED", 0)
    devices = cluster(*[[FAST] * 4] * 4, *[[SLOW] * 4] * 4)
    found = found_for(gpt(), devices, training(128), replace(AUTO, time_limit_s=0.0))
    said = re.search(
        r"the fastest of (\d+) strategies simulated, of ([\d,]+) estimated",
        found.decisions[0].reason,
    )
    assert said is not None
    assert int(said[1]) == sum(considered)
    assert int(said[2].replace(",", "")) > int(said[1])


def test_it_counts_the_changes_of_the_fastest() -> None:
    reason = found_for(gpt(), cluster([FAST] * 2), training(4)).decisions[0].reason
    said = re.search(r"estimated, and of ([\d,]+) changes of the fastest; at their full", reason)
    assert said is not None
    assert int(said[1].replace(",", "")) > 10


def test_strategies_that_the_training_leaves_out_are_named() -> None:
    devices = cluster([FAST] * 2, [SLOW] * 2)
    every = found_for(gpt(), devices, training(16))
    found = found_for(gpt(), devices, replace(training(16), accumulate=4))
    families = {d.rejected: d.reason for d in found.decisions}
    for family in ("pipeline", "split", "pipeline by kind of device"):
        assert family in {d.rejected for d in every.decisions} | {every.decisions[0].chosen}
        assert "train.accumulate=4 cuts the batch of copies" in families[family]
    unexported = replace(gpt(), graph=None, export_error="it branches")
    reasons = {d.rejected: d.reason for d in found_for(unexported, devices, training(16)).decisions}
    for family in ("pipeline", "split", "copies beside a split head"):
        assert reasons[family] == "needs the model's graph, and gpt cannot be exported"
    lamb = Training(16, "fp32", 0.0, "lamb", {"lr": 0.1})
    reasons = {d.rejected: d.reason for d in found_for(gpt(), devices, lamb).decisions}
    assert "optimizer=lamb needs the norm of each parameter" in reasons["copies, ZeRO 1"]
