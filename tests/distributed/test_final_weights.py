"""What a run leaves in `model/` is what it learned, and others open it.

Three steps are trained; the folder is opened, by `from_pretrained` for a model of transformers, and
the loss of the fourth batch is that of a run of four steps.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.distributed.equality import Jobs, run_job
from tests.distributed.served import Served
from tests.distributed.test_parallel_strategies import GLOBAL_BATCH, MODELS, Case

from whale_train.models.gpt import GPT

TRAINED = 3
TOLERANCE = 1e-5


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


@pytest.mark.parametrize("strategy", ["zero1_pipeline", "split3_uneven", "zero3_split2"])
@pytest.mark.parametrize("model", ["gpt2", "llama", "t5"])
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


@pytest.mark.parametrize("strategy", ["interleaved", "hybrid"])
@pytest.mark.parametrize("tied", ["true", "false"])
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
