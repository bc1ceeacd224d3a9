"""Forwards that run again in the backward: the same bits, in less memory."""

from pathlib import Path

import numpy as np
import pytest
from tests.distributed.equality import Jobs
from tests.distributed.served import Served
from tests.distributed.test_parallel_strategies import Case, hf
from tests.distributed.test_rehearse import LARGE, rehearsed

from whale_train.rehearsal import Rehearsal

DROPS = hf(
    "BertForMaskedLM",
    "vocab_size: 67, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 3, "
    "num_attention_heads: 4, max_position_embeddings: 16",
)


@pytest.mark.parametrize(
    ("model", "graph", "more"),
    [
        ("bert", "{{replicate: {0}}}", ()),
        ("bert", "{{split: {0}}}", ()),
        pytest.param("bert", "{{replicate: {0}}}", ("train.compile=true",), marks=pytest.mark.full),
        # One copy, whose BatchNorms are torch's, and two that share theirs.
        ("resnet", "{{replicate: {0}}}", ("strategy.devices=1",)),
        pytest.param("resnet", "{{replicate: {0}}}", (), marks=pytest.mark.full),
    ],
)
def test_masks_and_statistics_are_those_of_one_forward(
    model: str, graph: str, more: tuple[str, ...], jobs: Jobs, arrays: Path
) -> None:
    """Dropout draws the same masks again, and running statistics are updated once."""
    case = Case(model, "copies_again", "adamw", more)
    overrides = [x for x in case.overrides(arrays) if not x.startswith("strategy.graph=")]
    if model == "bert":
        overrides = [*DROPS, *(x for x in overrides if not x.startswith("model"))]
    made = {
        value: jobs.run([*overrides, f"strategy.graph={graph.format(value)}"])
        for value in ("{}", "{recompute: full}")
    }
    once, again = made.values()
    assert once.losses == again.losses
    assert once.norms == again.norms
    for path, copies in once.values.items():
        for one, other in zip(copies, again.values[path], strict=True):
            assert np.array_equal(one, other), path
    assert "recomputed" not in str(once.plan)
    assert "recomputed" in str(again.plan)


def test_less_is_kept_and_no_more_than_asked_for(served: Served) -> None:
    kept: dict[str, float] = {}
    for value in ("none", "{memory: 0.5}", "['*.attention']", "full"):
        more = [f"strategy.graph={{replicate: {{recompute: {value}}}}}", "train.precision=fp32"]
        said = Rehearsal.from_json(served.ask(rehearsed, overrides=[*LARGE, *more]))
        assert said.is_clean
        kept[value] = said.kinds[0].peak_bytes["activations"]
    assert kept["full"] < kept["{memory: 0.5}"] < kept["none"]
    assert kept["full"] < kept["['*.attention']"] < kept["none"]
    assert kept["full"] < 0.3 * kept["none"]
