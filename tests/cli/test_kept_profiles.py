"""A model is measured once: later plans find its profile, unless something of it has changed."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.cli.command import whale_train, whale_train_process

# Imports are listed on stderr.
LISTED = {"PYTHONPROFILEIMPORTTIME": "1"}
LLAMA = (
    *("model=hf", "model.architecture=LlamaForCausalLM"),
    "model.config={hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2,"
    " num_key_value_heads: 1, intermediate_size: 24, vocab_size: 257}",
)
NET = """
from torch import nn
from sizes import WIDTH

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, WIDTH), nn.Linear(WIDTH, 4))

    def forward(self, features):
        return self.layers(features)
"""


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(("model.depth=1", "model.width=32"), id="gpt"),
        pytest.param(
            LLAMA,
            id="hf",
            marks=[
                pytest.mark.full,
                pytest.mark.skipif(not find_spec("transformers"), reason="no hf"),
            ],
        ),
    ],
)
def test_a_second_plan_is_the_same_without_torch(model: tuple[str, ...], tmp_path: Path) -> None:
    cache = {"WHALE_TRAIN_CACHE": str(tmp_path / ".cache")}
    arguments = ["mode=plan", "strategy=hybrid_split_dp", "hardware=v100_p100_mix", *model]
    first, second = (
        whale_train_process([*arguments, f"hydra.run.dir=runs/{name}"], tmp_path, cache | LISTED)
        for name in ("first", "second")
    )
    assert (first.status, second.status) == (0, 0)
    assert second.stdout == first.stdout.replace("/runs/first/", "/runs/second/")
    plans = [(tmp_path / "runs" / name / "plan.json").read_bytes() for name in ("first", "second")]
    assert plans[0] == plans[1]
    imported = re.compile(r"\| +(torch|transformers)$", re.MULTILINE)
    assert imported.search(first.stderr)
    assert not imported.search(second.stderr)


def test_a_changed_model_of_the_users_is_planned_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NET)
    arguments = [
        *("mode=plan", "model=custom", "model._target_=nets.Net", "model.loss=cross_entropy"),
        *("data=classes", "data.num_features=6", "data.num_classes=4", "hardware=cpu"),
    ]
    counts = []
    for width in (10, 1000):
        (tmp_path / "sizes.py").write_text(f"WIDTH = {width}\n")
        answer = whale_train(arguments, tmp_path)
        assert answer.status == 0, answer.stderr
        (count,) = re.findall(r"parameters +([^(]+)\(", answer.stdout)
        counts.append(count)
    assert len(set(counts)) == 2, counts
