"""Which weights of a folder a model of transformers begins with, and which folders are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.distributed.equality import JobFailed, Jobs
from tests.distributed.test_final_weights import LLAMA
from tests.distributed.test_parallel_strategies import MODELS, Case

from whale_train.errors import ConfigError
from whale_train.launcher.planning.pretrained import LoadedNames, compare_names
from whale_train.models.options import ModelOptions

HF = "whale_train.models.build.hugging_face"


def saved(folder: Path, **options: Any) -> Path:
    """A folder with the weights of a small Llama."""
    config = transformers.LlamaConfig(**LLAMA)
    transformers.LlamaForCausalLM(config).save_pretrained(folder, **options)
    return folder


def names(folder: Path, architecture: str = "LlamaForCausalLM", **config: Any) -> LoadedNames:
    given = {"_target_": HF, "architecture": architecture, "pretrained": str(folder)}
    options = ModelOptions.from_mapping({**given, "config": {"pad_token_id": 0, **config}})
    return compare_names(options)


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "20KB"}])
def test_a_folder_of_the_model_has_all_of_it(shards: dict[str, str], tmp_path: Path) -> None:
    folder = saved(tmp_path, **shards)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == bool(shards)
    found = names(folder)
    assert found == LoadedNames((), (), (), ())
    assert found.decisions() == []


def test_a_new_head_is_said_to_be_random(tmp_path: Path) -> None:
    found = names(saved(tmp_path), "LlamaForSequenceClassification")
    assert found.faults("here", "it") == []
    random, unused = found.decisions()
    assert (random.chosen, random.reason) == (
        "some weights begin at random",
        "the folder has no score.weight",
    )
    assert unused.reason == "the model has no lm_head.weight"


def test_another_models_folder_is_refused(tmp_path: Path) -> None:
    found = names(saved(tmp_path), intermediate_size=64, num_hidden_layers=5)
    lacks, shapes = found.faults("here", "LlamaForCausalLM")
    assert lacks.rule.startswith("has no model.layers.4.")
    assert lacks.rule.endswith(" and 6 more")
    assert "has another shape of model.layers.0.mlp.down_proj.weight" in shapes.rule


def test_pickles_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="has no weights in safetensors"):
        names(folder)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\x10" + bytes(7) + b"no header at all")
    with pytest.raises(ConfigError, match=r"is damaged: \S+/model.safetensors cannot be read"):
        names(folder)


def test_a_damaged_list_of_files_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, max_shard_size="20KB")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
    with pytest.raises(ConfigError, match=r"is damaged: \S+index.json cannot be read"):
        names(folder)


def test_a_run_is_refused_before_it_starts(arrays: Path, jobs: Jobs, tmp_path: Path) -> None:
    """GPT-2's weights for a Llama: transformers would train random ones."""
    folder = saved(tmp_path)
    config = transformers.GPT2Config(vocab_size=67, n_embd=32, n_layer=1, n_head=4)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "gpt2" / "model.safetensors").replace(folder / "model.safetensors")
    overrides = Case("llama", "split2", "sgd").overrides(arrays)[len(MODELS["llama"][1]) :]
    llama = ("model=hf", "model.architecture=LlamaForCausalLM", f"model.pretrained={folder}")
    with pytest.raises(
        JobFailed, match=r"model\.pretrained=\S+ has no model\.embed_tokens\.weight"
    ):
        jobs.run([*llama, *overrides])
