"""Requests drawn at random, and configs of models that were damaged: done or refused, never more.

Everything goes through the launcher's own doors, in this process: the command line's check, then
the job itself, with `mode=plan`.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from omegaconf import OmegaConf
from tests.damage import as_json, damaged, damaged_text
from tests.pairs import IS_FULL

from whale_train.errors import ConfigError
from whale_train.launcher.compose.command_line import check, composed, rewritten
from whale_train.launcher.job import run_job

REQUESTS = 300 if IS_FULL else 10
CONFIGS = 3000 if IS_FULL else 20

GROUPS = ("model", "data", "strategy", "hardware", "optimizer", "launcher", "experiment")
CHOICES = {
    "model": ("gpt", "class_head", "moe_gpt", "custom", "hf"),
    "data": ("text", "digits", "classes", "arrays"),
    "strategy": ("dp", "zero3", "split", "pipeline", "hybrid_split_dp", "auto", "3d", "single"),
    "hardware": ("cpu", "v100_p100_mix", "local"),
    "optimizer": ("sgd", "adamw", "lamb"),
    "launcher": ("auto", "local", "emulate"),
    "experiment": ("smoke",),
}
KEYS = (
    *("seed", "compare", "rehearse", "train", "checkpoint", "verify", "strategy", "absent"),
    *(f"train.{key}" for key in ("steps", "global_batch", "accumulate", "precision", "loss_scale")),
    *(f"train.{key}" for key in ("grad_clip", "profile", "evaluate_every", "resume", "delink_at")),
    *("optimizer.lr", "optimizer.betas", "optimizer.warmup_steps", "optimizer.schedule"),
    *("checkpoint.every", "checkpoint.path", "checkpoint.async", "verify.steps"),
    *("launcher.kind", "launcher.hosts", "launcher.threads", "launcher.timeout_s"),
    *("hardware.devices", "hardware.kind", "hardware.nodes", "+hardware.network"),
    *("model.depth", "model.width", "model._target_", "model.loss", "model.init", "+model.config"),
    *("data.path", "data.sequence_length", "data.shuffle", "+data.absent", "+absent"),
    *("strategy.graph", "strategy.balance", "strategy.devices", "strategy.time_limit_s"),
    *("strategy.graph.replicate.degree", "strategy.graph.replicate.zero"),
    *("strategy.graph.pipeline.stages", "strategy.graph.pipeline.micro_batches"),
    *("hydra.run.dir", "hydra.output_subdir", "hydra.verbose", "hydra.job.name", "hydra.mode"),
    *("hydra.launcher", "hydra.sweeper.params", "+hydra.callbacks.x", "+hydra.job.env_set"),
    *("hydra.job_logging", "hydra.searchpath", "~train.steps", "~strategy.graph", "~model"),
)
VALUES = (
    *("null", "true", "-1", "0", "1", "2", "3", "7", "1000000", "1000000000000", "0.5", "1e-308"),
    *("1e308", "-1e308", "1e400", "nan", "inf", "''", "x", "auto", "'a b'", "???", "'ünï'"),
    *("[]", "[1,2]", "[x,y]", "[[1]]", "{}", "{a: 1}", "{1: 2}", "{replicate: {}}", "{split: {}}"),
    *("${seed}", "${absent}", "${train}", "${oc.env:HOME}", "'${'", "{a: {b: [{}]}}", "a" * 3000),
    *(
        "9" * 25,
        "9" * 5000,
        "{replicate: {of: " * 60 + "1" + "}}" * 60,
        "'\0'",
        "[" * 300 + "]" * 300,
    ),
    *("{pipeline: {stages: 3}}", "{pipeline: {stages: [replicate, split]}}", "[replicate, split]"),
    *("[{devices: 2, device: a100_sxm_80gb, link: nvlink3}]", "[{count: 100000000, devices: 9}]"),
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run where a request leaves its directory, with the resolver of the command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHALE_TRAIN_CALIBRATIONS", str(tmp_path / "none"))
    OmegaConf.register_new_resolver("whale_suffix", lambda: "x", replace=True)
    yield
    OmegaConf.clear_resolver("whale_suffix")


def answered(arguments: Sequence[str], run_dir: Path) -> str:
    """Return what became of a request: `done` or `refused`."""
    try:
        overrides = rewritten(arguments)
        check(overrides)
        config = composed([x for x in overrides if not x.startswith("-")])
    except ConfigError as error:
        return "refused" if error.faults else "refused without a reason"
    return run_job(config, {"hardware": "drawn", "strategy": "drawn"}, run_dir).status


def drawn(random: Random) -> list[str]:
    """Return the overrides of a request that may be right."""
    groups = random.sample(GROUPS, random.randint(0, 3))
    found = [f"{group}={random.choice(CHOICES[group])}" for group in groups]
    if random.random() < 0.1:
        group = random.choice(GROUPS)
        found.append(f"{group}=[{','.join(random.choices(CHOICES[group], k=2))},1]")
    for key in random.sample(KEYS, random.randint(1, 4)):
        found.append(key if key.startswith("~") else f"{key}={random.choice(VALUES)}")
    return found


@pytest.mark.parametrize("part", range(REQUESTS // 10))
def test_a_request_is_served_or_refused(part: int, tmp_path: Path) -> None:
    for seed in range(part * 10, part * 10 + 10):
        arguments = drawn(Random(seed))
        start = ["hardware=cpu", "hardware.devices=2"]
        taken = any(x.startswith("hardware=") for x in arguments)
        command = [*([] if taken else start), *arguments, "mode=plan"]
        said = answered(command, tmp_path / f"run_{seed}")
        assert said in ("done", "refused"), (seed, command)


GPT2: dict[str, Any] = {
    **{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_head": 2},
    **{"n_embd": 16, "vocab_size": 64, "n_positions": 32, "resid_pdrop": 0.1, "use_cache": True},
    **{"activation_function": "gelu_new", "torch_dtype": "float32", "bos_token_id": 1},
    **{"id2label": {"0": "a", "1": "b"}, "task_specific_params": {"text": {"max_length": 50}}},
}


@pytest.mark.parametrize("part", range(CONFIGS // 10))
def test_a_damaged_config_is_built_or_refused(part: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import torch

    from whale_train.models.build import build_model
    from whale_train.models.options import ModelOptions
    from whale_train.models.profile.cache_key import profile_key

    options = ModelOptions.from_mapping(
        {
            "_target_": "whale_train.models.build.hugging_face",
            **{"architecture": "GPT2LMHeadModel", "pretrained": str(tmp_path)},
        }
    )
    for seed in range(part * 10, part * 10 + 10):
        random = Random(seed)
        content = damaged_text(json.dumps(GPT2), random)
        if seed % 2:
            content = as_json(damaged(GPT2, random)).encode()
        (tmp_path / "config.json").write_bytes(content)
        try:
            profile_key(options, (), by_folding=True)
            with torch.device("meta"):
                build_model(options)
        except ConfigError as error:
            faults = error.faults
        else:
            faults = ()
        assert all(fault.rule for fault in faults), seed
