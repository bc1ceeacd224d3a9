"""What is found of one slice of a model holds of those alike: plans as if there were none."""

from itertools import count
from typing import Any

import pytest
from tests.distributed.test_folding import HUGGING_FACE_MODELS, TOKENS
from tests.pairs import some
from tests.unit.plan_requests import mixed, strategy_of, training

from whale_train.errors import PlanError
from whale_train.models.options import HUGGING_FACE, ModelOptions
from whale_train.models.profile.measure import profile_model
from whale_train.strategies.grammar.nodes import Strategy
from whale_train.strategies.partition.equal_blocks import CanonicalSlices
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.resolve import consider
from whale_train.strategies.stages.analysis import ModelAnalysis

# Of every kind of block there are two alike, and four places for a pipeline to be cut at.
BLOCKS = {"num_hidden_layers": 4, "num_layers": 4, "num_decoder_layers": 4}
SPLIT = {"split": {"degree": 2}}
GRAPHS: dict[str, Any] = {
    "split": {"replicate": {"of": SPLIT}},
    "pipeline": {"replicate": {"of": {"pipeline": {"stages": 4}}}},
    "pipeline of splits": {"replicate": {"of": {"pipeline": {"stages": [SPLIT] * 4}}}},
    "recomputed": {"pipeline": {"stages": [{"stage": {"recompute": "full", "of": SPLIT}}] * 4}},
    "unlike stages": {"pipeline": {"stages": [SPLIT, {"split": {"degree": 4}}, SPLIT]}},
}


def planned(strategy: Strategy, findings: ModelAnalysis, asked: Training) -> Any:
    """The plan, or why there is none."""
    try:
        return consider(strategy, mixed(), findings, asked).plan()
    except PlanError as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "precision"),
    some(
        [*((name, "fp32") for name in HUGGING_FACE_MODELS), ("LlamaForCausalLM", "fp16")],
        [("T5ForConditionalGeneration", "fp32"), ("LlamaForCausalLM", "fp16")],
    ),
)
def test_plans_are_those_of_a_planner_that_finds_no_two_slices_alike(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    options = ModelOptions.from_mapping(
        {
            **{"_target_": HUGGING_FACE, "architecture": name, "loss": "model"},
            "config": {k: BLOCKS.get(k, v) for k, v in HUGGING_FACE_MODELS[name].items()},
        }
    )
    profile = profile_model(options, "m", TOKENS, by_folding=True)
    asked = training(32, precision)

    def plans() -> list[Any]:
        findings = ModelAnalysis(profile, precision)
        strategies = (strategy_of({"graph": graph, "devices": 8}) for graph in GRAPHS.values())
        return [planned(each, findings, asked) for each in strategies]

    found, numbers = plans(), count()
    monkeypatch.setattr(CanonicalSlices, "number", lambda *_: next(numbers))
    assert any(isinstance(plan, Plan) for plan in found)
    assert found == plans()
