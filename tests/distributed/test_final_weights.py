"""What a run leaves in `model/` is what it learned, and others open it.

Three steps are trained; the folder is opened, by `from_pretrained` for a model of transformers, and
the loss of the fourth batch is that of a run of four steps.
"""

import json
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.distributed.equality import Jobs, run_job
from tests.distributed.served import Served
from tests.distributed.test_parallel_strategies import GLOBAL_BATCH, MODELS, Case
from tests.pairs import covering, once, some

from whale_train.models.gpt import GPT

LLAMA = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "num_key_value_heads": 4,
}
TRAINED = 3
TOLERANCE = 1e-5
STRATEGIES = ("zero1_pipeline", "split3_uneven", "zero3_split2")


@dataclass(frozen=True)
class Trained:
    """A run of TRAINED steps, and the loss of the step that would follow."""

    run_dir: Path
    next_loss: float
    batch: dict[str, torch.Tensor]

    @property
    def model(self) -> Path:
        return self.run_dir / "model"


def trained(
    model: str, strategy: str, arrays: Path, jobs: Jobs, served: Served, folder: Path, *more: str
) -> Trained:
    case = Case(model, strategy, "adamw", more)
    longer = jobs.run(replace(case, strategy="single").overrides(arrays))
    overrides = case.overrides(arrays)
    overrides[overrides.index("train.steps=4")] = f"train.steps={TRAINED}"
    run_dir = folder / "run"
    said = served.ask(run_job, overrides=overrides, plainly=False, run_dir=str(run_dir))
    assert not said, said
    found = dict(np.load(arrays / f"{MODELS[model][0]}.npz"))
    start = TRAINED * GLOBAL_BATCH % len(found["labels"])
    rows = slice(start, start + GLOBAL_BATCH)
    batch = {name: torch.from_numpy(array[rows]) for name, array in found.items()}
    return Trained(run_dir, longer.losses[TRAINED], batch)


@pytest.mark.parametrize(
    ("model", "strategy"),
    covering([*product(("gpt2", "llama", "t5"), STRATEGIES)], lambda row: once(*row)),
)
def test_transformers_opens_what_was_learned(
    model: str, strategy: str, arrays: Path, jobs: Jobs, served: Served, tmp_path: Path
) -> None:
    run = trained(model, strategy, arrays, jobs, served, tmp_path)
    config = transformers.AutoConfig.from_pretrained(run.model)
    (name,) = config.architectures
    opened, said = getattr(transformers, name).from_pretrained(run.model, output_loading_info=True)
    assert not any(said.values()), said
    with torch.no_grad():
        loss = opened.train()(**run.batch).loss
    assert float(loss) == pytest.approx(run.next_loss, rel=TOLERANCE)
    assert (run.model / "generation_config.json").exists()


@pytest.mark.parametrize(
    ("tied", "strategy"),
    covering([*product(("true", "false"), ("interleaved", "hybrid"))], lambda row: once(*row)),
)
def test_a_model_of_ones_own_loads_what_was_learned(
    strategy: str, tied: str, arrays: Path, jobs: Jobs, served: Served, tmp_path: Path
) -> None:
    if tied == "true" and strategy == "hybrid":
        strategy = "zero1_split2"  # a tied head is not its own to split
    run = trained("gpt", strategy, arrays, jobs, served, tmp_path, f"model.tied={tied}")
    model = GPT(67, 12, 32, 4, 4, tied=tied == "true")
    missing, unexpected = model.load_state_dict(
        load_file(run.model / "model.safetensors"), strict=False
    )
    assert not unexpected
    assert missing == (["lm_head.weight"] if tied == "true" else [])
    with torch.no_grad():
        loss = model(**run.batch)
    loss = loss if isinstance(loss, torch.Tensor) else loss.loss
    assert float(loss) == pytest.approx(run.next_loss, rel=TOLERANCE)


OF_INPUTS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "spiece.model")


@pytest.mark.parametrize("strategy", some(STRATEGIES, ["split3_uneven"]))
def test_a_saved_model_is_trained_further(
    strategy: str, arrays: Path, jobs: Jobs, served: Served, tmp_path: Path
) -> None:
    """What `save_pretrained` wrote, under a plan: the steps that transformers' own model takes; and
    what reads its inputs goes with it."""
    given = tmp_path / "given"
    config = transformers.LlamaConfig(**LLAMA)
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(given)
    for name in OF_INPUTS:
        (given / name).write_text(f"the {name}")
    (given / "tokenizer").mkdir()  # a folder of that name is no file to copy
    (given / "notes.txt").write_text("of no use to anyone else")
    llama = ("model=hf", "model.architecture=LlamaForCausalLM", f"model.pretrained={given}")
    case = Case("llama", strategy, "adamw")
    overrides = [*llama, *case.overrides(arrays)[len(MODELS["llama"][1]) :]]
    single = [*llama, *Case("llama", "single", "adamw").overrides(arrays)[len(llama) :]]
    run_dir = tmp_path / "run"
    said = served.ask(run_job, overrides=overrides, plainly=False, run_dir=str(run_dir))
    assert not said, said
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    plain = jobs.run(single, plainly=True)
    np.testing.assert_allclose([json.loads(x)["loss"] for x in lines], plain.losses, rtol=2e-5)
    model = run_dir / "model"
    assert {path.name for path in model.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", *OF_INPUTS)
    }
    for name in ("generation_config.json", *OF_INPUTS):
        assert (model / name).read_bytes() == (given / name).read_bytes()
    assert transformers.AutoConfig.from_pretrained(model).use_cache
