"""Low-rank additions to a Llama's weights, under plans: what they are trained to, what a checkpoint
has of them, and what peft opens."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors import safe_open
from tests.distributed.equality import Jobs, run_job
from tests.distributed.served import Served
from tests.distributed.test_final_weights import GLOBAL_BATCH, LLAMA
from tests.distributed.test_parallel_strategies import MODELS, Case
from tests.pairs import some

from whale_train.errors import ConfigError
from whale_train.models.adapters import adapter_faults, add_adapters
from whale_train.models.gpt import GPT

ADAPTERS = "{r: 4, lora_alpha: 8, target_modules: [q_proj, v_proj, down_proj]}"
TRAINED = 3
# In a run of some of the tests, each of them is in one: `zero3_split2` goes on with a checkpoint.
PLANS = ("zero3", "zero3_split2", "zero1_pipeline", "split3_uneven")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama, as anyone may have one."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Adapted:
    """Runs of that Llama with additions."""

    base: Path
    arrays: Path
    served: Served

    def overrides(self, strategy: str, steps: int = TRAINED) -> list[str]:
        name = "split2" if strategy == "zero3" else strategy
        case = Case("llama", name, "adamw").overrides(self.arrays)[len(MODELS["llama"][1]) :]
        case[case.index("train.steps=4")] = f"train.steps={steps}"
        if strategy == "zero3":  # of the module as it is
            case[case.index("strategy.graph={split: {}}")] = "strategy.graph={replicate: {zero: 3}}"
        architecture = "model.architecture=LlamaForCausalLM"
        model = ("model=hf", architecture, f"model.pretrained={self.base}")
        return [*model, f"model.adapters={ADAPTERS}", *case]

    def run(self, run_dir: Path, strategy: str, *more: str, steps: int = TRAINED) -> list[float]:
        wanted = [*self.overrides(strategy, steps), *more]
        said = self.served.ask(run_job, overrides=wanted, plainly=False, run_dir=str(run_dir))
        assert not said, said
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]


@pytest.fixture
def adapted(base: Path, arrays: Path, served: Served) -> Adapted:
    return Adapted(base, arrays, served)


@pytest.mark.parametrize("strategy", some(PLANS, ["zero1_pipeline"]))
def test_peft_opens_what_was_learned(
    strategy: str, adapted: Adapted, jobs: Jobs, tmp_path: Path
) -> None:
    longer = jobs.run(adapted.overrides("single", TRAINED + 1), plainly=True).losses
    losses = adapted.run(tmp_path / "run", strategy)
    np.testing.assert_allclose(losses, longer[:TRAINED], rtol=2e-5)
    folder = tmp_path / "run" / "model"
    assert {path.name for path in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    opened = peft.AutoPeftModel.from_pretrained(folder).train()
    found = np.load(adapted.arrays / "tokens.npz")
    start = TRAINED * GLOBAL_BATCH % len(found["labels"])
    batch = {
        name: torch.from_numpy(found[name][start : start + GLOBAL_BATCH]) for name in found.files
    }
    with torch.no_grad():
        assert float(opened(**batch).loss) == pytest.approx(longer[TRAINED], rel=1e-5)
        with opened.disable_adapter():
            assert float(opened(**batch).loss) != pytest.approx(longer[TRAINED], rel=1e-3)


@pytest.mark.parametrize(("saved", "resumed"), [("split3_uneven", "zero3_split2")])
def test_a_checkpoint_has_the_additions_alone(
    saved: str, resumed: str, adapted: Adapted, jobs: Jobs, tmp_path: Path
) -> None:
    """What they are added to is where it was."""
    begun = tmp_path / "begun"
    adapted.run(begun, saved, "checkpoint.every=2")
    checkpoint = begun / "checkpoints" / "step_2"
    names = set()
    for path in (checkpoint / "model").iterdir():
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    assert len(names) == 2 * 3 * LLAMA["num_hidden_layers"]
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    losses = adapted.run(tmp_path / "on", resumed, f"train.resume={checkpoint}", steps=4)
    plain = jobs.run(adapted.overrides("single", 4), plainly=True).losses
    np.testing.assert_allclose(losses, plain[2:], rtol=2e-5)


def test_a_new_head_is_trained_beside_them(
    base: Path, arrays: Path, served: Served, tmp_path: Path
) -> None:
    """`modules_to_save`, in peft's words: whole, and in its file."""
    architecture = "model.architecture=LlamaForSequenceClassification"
    given = [f"model.pretrained={base}", "model.config={num_labels: 5, pad_token_id: 0}"]
    additions = "model.adapters={target_modules: [q_proj], modules_to_save: [score]}"
    tokens = np.load(arrays / "tokens.npz")["input_ids"]
    np.savez(tmp_path / "classes.npz", input_ids=tokens, labels=tokens[:, 0] % 5)
    strategy = Case("llama", "split2_pipeline2", "sgd").overrides(arrays)
    rest = strategy[len(MODELS["llama"][1]) :]
    rest[rest.index(f"data.path={arrays / 'tokens.npz'}")] = f"data.path={tmp_path}/classes.npz"
    run_dir = tmp_path / "run"
    wanted = ["model=hf", architecture, *given, additions, *rest]
    said = served.ask(run_job, overrides=wanted, plainly=False, run_dir=str(run_dir))
    assert not said, said
    with safe_open(run_dir / "model" / "adapter_model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert "base_model.model.score.weight" in names
    assert len(names) == 1 + 2 * LLAMA["num_hidden_layers"]


@pytest.mark.parametrize("strategy", some(["single", *PLANS], ["split3_uneven"]))
def test_in_16_bits_what_is_added_to_is_of_16_bits(
    strategy: str, adapted: Adapted, jobs: Jobs, tmp_path: Path
) -> None:
    """But for what autocast leaves alone: norms and the embedding. Nothing else is computed."""
    bf16 = "train.precision=bf16"
    plain = jobs.run([*adapted.overrides("single"), bf16], plainly=True).losses
    losses = adapted.run(tmp_path / "run", strategy, bf16)
    np.testing.assert_allclose(losses, plain, rtol=2e-3)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    narrow = {path for each in plan["task_graphs"] for path in each["narrow"]}
    frozen = {path for path in narrow if "lora_" not in path}
    assert len(frozen) == 7 * LLAMA["num_hidden_layers"] + 1
    assert not any("norm" in path or "embed" in path for path in frozen)


@pytest.mark.parametrize("strategy", some(["single", "zero3", "split3_uneven"], ["zero3"]))
def test_ranks_hold_it_in_16_bits(strategy: str, adapted: Adapted, tmp_path: Path) -> None:
    """As a checkpoint shows that has what is frozen: nobody could have it from a folder."""
    wanted = adapted.overrides(strategy)
    config = ", ".join(f"{key}: {value}" for key, value in LLAMA.items())
    wanted[wanted.index(f"model.pretrained={adapted.base}")] = f"model.config={{{config}}}"
    more = [*wanted, "train.precision=bf16", "checkpoint.every=3"]
    said = adapted.served.ask(run_job, overrides=more, plainly=False, run_dir=str(tmp_path / "run"))
    assert not said, said
    dtypes = {}
    for path in (tmp_path / "run" / "checkpoints" / "step_3" / "model").iterdir():
        with safe_open(path, framework="pt") as file:
            dtypes |= {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    assert dtypes["model.layers.0.self_attn.q_proj.base_layer.weight"] == torch.bfloat16
    assert dtypes["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    assert dtypes["model.norm.weight"] == torch.float32
    assert dtypes["model.layers.0.self_attn.q_proj.lora_A.default.weight"] == torch.float32


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"rank": 4}, "model.adapters.rank=4 is not a setting of LoraConfig; "),
        (
            {"init_lora_weights": "pissa"},
            "model.adapters.init_lora_weights=pissa changes the weights that it adds to, which are "
            "not exported with the additions; use one of: true, false, gaussian, orthogonal",
        ),
    ],
)
def test_settings_are_checked(settings: dict[str, object], fault: str) -> None:
    (found,) = adapter_faults(settings)
    assert str(found).startswith(fault)


def test_what_peft_refuses_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.adapters=.* is refused by peft: Target modules"):
        add_adapters(GPT(67, 12, 32, 4, 4), {"target_modules": ["nowhere"]})
