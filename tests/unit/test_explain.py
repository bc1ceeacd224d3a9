"""Why not this strategy: every line of the answer is a plan that the resolver makes as well."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operation_graphs import classifier
from tests.unit.plan_requests import mixed, strategy_of, training

from whale_train.errors import PlanError
from whale_train.launcher.ui.show_explanation import command_of, condition_line, trial_rows
from whale_train.strategies.explain.explain_strategy import (
    Condition,
    Explanation,
    explain_strategy,
)
from whale_train.strategies.explain.reliefs import Setting, reliefs, with_memory
from whale_train.strategies.resolver.resolve import resolve

PIPELINE = {"pipeline": {"micro_batches": 4, "stages": [{"stage": {}}, {"stage": {}}]}}

UNLIKE = {"pipeline": {"stages": [{"stage": {}}, {"split": {}}]}}  # whose ends move


def explained(graph: Any, **changes: Any) -> Explanation:
    setting = Setting({"graph": graph}, mixed(), replace(training(), **changes))
    return explain_strategy(setting, "asked", classifier())


def test_a_strategy_with_a_plan_is_its_own_nearest() -> None:
    answer = explained({"replicate": {"zero": 3}})
    assert answer.nearest is answer.asked
    assert answer.least_memory is None
    plan = resolve(
        strategy_of({"graph": {"replicate": {"zero": 3}}}, "asked"),
        mixed(),
        classifier(),
        training(),
    )
    assert answer.asked.step_s == plan.predicted.step_time_s
    assert answer.asked.plan == plan


def test_the_fastest_is_never_slower_than_a_change_of_the_same_batch() -> None:
    answer = explained({"split": {}})
    assert answer.fastest is not None
    assert answer.fastest.step_s is not None
    same = [x for x in answer.trials if x.step_s and x.kind == "strategy"]
    assert same
    assert all(answer.fastest.step_s <= x.step_s * 1.001 for x in same if x.step_s)


@pytest.mark.parametrize("graph", [{"replicate": {"of": PIPELINE}}, UNLIKE])
def test_every_change_resolves_to_what_is_said(graph: Any) -> None:
    setting = Setting({"graph": graph}, mixed(), training())
    answer = explain_strategy(setting, "asked", classifier())
    by_change = {trial.change: trial for trial in answer.trials}
    assert len(by_change) == len(answer.trials)
    for relief in reliefs(setting):
        trial, changed = by_change[relief.change], relief.setting
        strategy = strategy_of(changed.written, "asked")
        if not trial.is_legal:
            with pytest.raises(PlanError) as raised:
                resolve(strategy, changed.cluster, classifier(), changed.training)
            assert trial.faults == tuple(map(str, raised.value.faults))
            continue
        plan = resolve(strategy, changed.cluster, classifier(), changed.training)
        assert trial.samples == plan.global_batch
        assert trial.step_s == plan.predicted.step_time_s


def test_a_degree_that_does_not_divide_is_relieved_by_leaving_it_out() -> None:
    answer = explained({"replicate": {"degree": 3}})
    assert not answer.asked.is_legal
    assert "does not divide the 16 devices" in answer.asked.faults[0]
    assert answer.nearest is not None
    assert answer.nearest.change == "replicate: no degree"
    assert command_of(answer.nearest, ["hardware=mix", "strategy=x", "explain=x", "seed=1"]) == (
        "whale-train mode=plan hardware=mix seed=1 'strategy.graph={replicate: {}}'"
    )


def test_a_file_may_write_nodes_in_short() -> None:
    """`replicate` is `replicate: {}`, and `auto` is what a key without a value is."""
    stages = ["stage", {"split": None}]
    short = {"pipeline": {"micro_batches": "auto", "stages": stages}}
    long = {"pipeline": {"stages": [{"stage": {}}, {"split": {}}]}}
    pairs = [(short, long), (["replicate", "split"], [{"replicate": {}}, {"split": {}}])]
    for brief, full in [*pairs, ({"replicate": {"offload": None}}, {"replicate": {}})]:
        steps = {x.change: x.step_s for x in explained(brief).trials}
        assert steps == {x.change: x.step_s for x in explained(full).trials}


def test_what_is_not_the_fastest_even_with_little_memory_has_a_plan_with_it() -> None:
    setting = Setting({"graph": {"replicate": {"zero": 3}}}, mixed(), training())
    answer = explain_strategy(setting, "asked", classifier())
    (memory,) = (x for x in answer.conditions if x.quantity == "memory")
    smallest = min(device.memory_bytes for device in setting.cluster.devices)
    for times, is_legal in ((1.0, True), (0.5, False)):
        changed = with_memory(setting, times * memory.amount / smallest)
        again = explain_strategy(changed, "asked", classifier())
        assert again.asked.is_legal is is_legal


def test_what_a_strategy_has_too_much_of_is_taken_away() -> None:
    """LAMB wants the norm of each parameter, which ZeRO partitions anywhere; a pipeline cuts the
    batch itself."""
    answer = explained({"replicate": {"zero": 2}}, optimizer="lamb")
    assert not answer.asked.is_legal
    assert answer.nearest is not None
    assert answer.nearest.written == {"graph": {"replicate": {"zero": 0}}}
    offload = {"zero": 2, "offload": {"optimizer": "cpu"}}
    changes = {trial.change for trial in explained({"replicate": offload}).trials}
    assert "replicate: nothing on the host" in changes
    assert "replicate: zero: 0, nothing on the host" in changes
    parted = {x.change: x for x in explained(PIPELINE, accumulate=2).trials}["train.accumulate=1"]
    assert parted.overrides == ("train.accumulate=1",)
    assert parted.faults == explained(PIPELINE).asked.faults  # of another kind


def tight(factor: float) -> Setting:
    """A setting whose devices have so little memory that copies with all state do not fit."""
    setting = Setting({"graph": {"replicate": {}}}, mixed(), training(1024))
    strategy = strategy_of(setting.written, "asked")
    plan = resolve(strategy, setting.cluster, classifier(), setting.training)
    needed = max(rank.memory_bytes.total for rank in plan.ranks)
    reserved = setting.cluster.devices[0].reserved_bytes
    room = reserved + factor * needed
    return with_memory(setting, room / setting.cluster.devices[0].memory_bytes)


def test_the_least_memory_is_where_plans_begin() -> None:
    setting = tight(0.02)
    answer = explain_strategy(setting, "asked", classifier())
    assert not answer.asked.is_legal
    times = answer.least_memory
    assert times is not None
    for factor, is_legal in ((times, True), (0.96 * times, False)):
        changed = with_memory(setting, factor)
        arguments = (changed.cluster, classifier(), changed.training)
        strategy = strategy_of(changed.written, "asked")
        if is_legal:
            assert resolve(strategy, *arguments)
        else:
            with pytest.raises(PlanError):
                resolve(strategy, *arguments)


def test_what_makes_it_the_fastest() -> None:
    """ZeRO 3 is the fastest where the parameters of copies do not fit, and not before."""
    answer = explained({"replicate": {"zero": 3}})
    conditions = {x.quantity: x for x in answer.conditions}
    assert set(conditions) == {"samples", "memory", "network"}
    for condition in answer.conditions:
        assert condition.times is None or condition.times in {2.0**x for x in range(-6, 7)}


def test_lines() -> None:
    assert condition_line(Condition("samples", 4.0, 1024)) == (
        "it would be the fastest with 1,024 samples a step, 4 times as here"
    )
    assert condition_line(Condition("network", None, 4e11)) == (
        "not even 400 GB/s between nodes would make it the fastest"
    )
    rows = trial_rows(explained({"replicate": {"degree": 3}}))
    assert rows[0][0]
    assert all(len(row) == 6 for row in rows)


def test_a_file_may_write_a_node_by_its_name_alone() -> None:
    short = Setting({"graph": {"replicate": {"of": "split", "offload": None}}}, mixed(), training())
    whole = Setting({"graph": {"replicate": {"of": {"split": {}}}}}, mixed(), training())
    changes = [relief.change for relief in reliefs(short)]
    assert changes == [relief.change for relief in reliefs(whole)]
    stages = {"pipeline": {"micro_batches": "auto", "stages": ["stage", "stage"]}}
    written = [x.setting.written for x in reliefs(Setting({"graph": stages}, mixed(), training()))]
    recomputing = [{"stage": {"recompute": "full"}}] * 2
    assert any(x["graph"]["pipeline"]["stages"] == recomputing for x in written if "graph" in x)


def test_copies_and_splits_recompute_and_what_is_beside_copies_does_as_they_do() -> None:
    def changes(graph: Any) -> list[str]:
        return [x.change for x in reliefs(Setting({"graph": graph}, mixed(), training()))]

    again = {"recompute: full", "recompute: none"}
    for primitive in ("replicate", "split"):
        said = changes({primitive: {"recompute": "auto"}})
        assert {f"{primitive}: {x}" for x in again} <= set(said)
    said = changes([{"replicate": {}}, {"split": {"modules": "head"}}])
    assert "replicate: recompute: full" in said
    assert not any(x.startswith("split: recompute") for x in said)
