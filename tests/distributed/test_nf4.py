"""Frozen weights in 4 bits beside low-rank additions: bitsandbytes and peft by hand, or a
refusal."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from tests.distributed.equality import JobFailed, run_job, save
from tests.distributed.served import Served
from torch import Tensor, nn

from whale_train.checkpoints.checkpoint_files import folder_of
from whale_train.checkpoints.checkpoint_state import CheckpointState
from whale_train.config import Request, read_request
from whale_train.errors import ConfigError
from whale_train.launcher.compose.command_line import composed, rewritten
from whale_train.launcher.going_on import refuse_other_run
from whale_train.launcher.planning.plan_request import resolve_request
from whale_train.runtime.assembly.quantise_weights import quantise_weights

bitsandbytes = pytest.importorskip("bitsandbytes")

SIZES = {
    **{"vocab_size": 67, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16},
}
ADAPTERS: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
BATCH, STEPS, RATE = 8, 3, 0.5
QUANTISED = 7 * 2  # the linear layers of two blocks
Job = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama, and with samples."""
    made = tmp_path_factory.mktemp("nf4")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(made / "base")
    tokens = np.random.default_rng(0).integers(0, 67, (3 * BATCH, 16))
    save(made / "tokens.npz", {"input_ids": tokens, "labels": tokens})
    return made


def overrides(folder: Path, *more: str, pretrained: bool = True) -> list[str]:
    of_weights = f"model.pretrained={folder / 'base'}"
    if not pretrained:
        of_weights = f"model.config={json.dumps(SIZES)}".replace('"', "")
    modules = ", ".join(ADAPTERS["target_modules"])
    chosen = {x.partition("=")[0] for x in more}
    given = [
        *("model=hf", "model.architecture=LlamaForCausalLM", "model.quantize=nf4", of_weights),
        f"model.adapters={{r: 4, target_modules: [{modules}]}}",
        *("data=arrays", f"data.path={folder / 'tokens.npz'}", "data.shuffle=false"),
        *(f"train.global_batch={BATCH}", f"train.steps={STEPS}", "optimizer=sgd"),
        *(f"optimizer.lr={RATE}", "hardware=cpu", "hardware.devices=2", "strategy=dp"),
    ]
    return [*(x for x in given if x.partition("=")[0] not in chosen), *more]


@pytest.fixture
def job(folder: Path, served: Served, tmp_path: Path) -> Job:
    def run(name: str, *more: str, pretrained: bool = True) -> Path:
        wanted = overrides(folder, *more, pretrained=pretrained)
        said = served.ask(run_job, overrides=wanted, plainly=False, run_dir=str(tmp_path / name))
        if said:
            raise JobFailed(said)
        return tmp_path / name

    return run


def losses(run_dir: Path) -> list[float]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def by_hand(folder: Path, narrow: bool) -> list[float]:
    """The losses of one process that uses bitsandbytes' layers and peft, as their users do."""
    import peft

    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    for path, layer in [x for x in model.named_modules() if type(x[1]) is nn.Linear]:
        if path == "lm_head":
            continue
        sizes = (layer.in_features, layer.out_features)
        made = bitsandbytes.nn.Linear4bit(*sizes, bias=False, quant_type="nf4")
        made.weight = bitsandbytes.nn.Params4bit(
            *(layer.weight.data, False),
            quant_type="nf4",
            compress_statistics=False,
            module=made,
        )
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, made.to("cpu"))
    model = peft.get_peft_model(model, peft.LoraConfig(**ADAPTERS)).train()
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], RATE)
    arrays = dict(np.load(folder / "tokens.npz"))
    found = []
    for step in range(STEPS):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        batch = {name: torch.from_numpy(x[rows]) for name, x in arrays.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_two_ranks_are_bitsandbytes_and_peft_by_hand(folder: Path, job: Job) -> None:
    found = losses(job("nf4"))
    assert found == pytest.approx(by_hand(folder, narrow=False), rel=2e-5)
    whole = losses(job("whole", "model.quantize=null"))
    assert found != pytest.approx(whole, rel=1e-4)  # 4 bits are not 32


def test_16_bits_are_those_of_bitsandbytes(folder: Path, job: Job) -> None:
    found = losses(job("bf16", "train.precision=bf16", "strategy=single", "hardware.devices=1"))
    assert found == pytest.approx(by_hand(folder, narrow=True), rel=1e-4)


@pytest.mark.parametrize("pretrained", [True, False])
def test_a_checkpoint_has_no_weights_in_4_bits(job: Job, pretrained: bool) -> None:
    """A run that goes on reads them from the folder, or draws them again."""
    begun = job("begun", "checkpoint.every=2", pretrained=pretrained)
    checkpoint = folder_of(begun, 2)
    names: set[str] = set()
    for path in (checkpoint / "model").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    assert sum(".lora_" in name for name in names) == 2 * 2 * 2
    assert ("lm_head.weight" in names) is not pretrained
    assert not any("proj.weight" in name or "base_layer" in name for name in names)
    again = f"train.resume={checkpoint}"
    one = ("strategy=single", "hardware.devices=1")
    on = losses(job("on", again, *one, pretrained=pretrained))
    assert on == pytest.approx(losses(begun)[2:], rel=2e-5)


def test_another_seed_is_refused_where_weights_are_drawn_from_it(folder: Path) -> None:
    def request(seed: int) -> Request:
        wanted = overrides(
            folder, f"seed={seed}", "train.resume_data=any", "train.resume=there", pretrained=False
        )
        return read_request(composed(rewritten(wanted)), {})

    state = CheckpointState(step=2, samples=16)
    refuse_other_run(request(1), state, request(1), "there")
    with pytest.raises(ConfigError, match="weights in 4 bits are drawn again; use seed=1"):
        refuse_other_run(request(1), state, request(7), "there")


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        (["model.adapters=null"], "without model.adapters all weights are trained"),
        (
            ["strategy.graph={pipeline: {stages: 2, micro_batches: 2}}"],
            "this strategy runs the model's graph",
        ),
        (["strategy=zero2"], "ZeRO partitions parameters"),
        (["model.quantize=int4"], "model.quantize=int4 is no form that weights are stored in"),
        (
            ["model.adapters={r: 4, use_dora: true, target_modules: [q_proj]}"],
            "reads the frozen weights themselves",
        ),
        (["mode=rehearse"], "has no values"),
    ],
)
def test_refused(folder: Path, more: list[str], rule: str) -> None:
    with pytest.raises(Exception, match=rule):
        resolve_request(read_request(composed(rewritten(overrides(folder, *more))), {}))


def test_the_plan_has_the_bytes(folder: Path) -> None:
    """Those of what the layers hold after their weights are in 4 bits."""
    from whale_train.models.build import build_model

    request = read_request(composed(rewritten(overrides(folder, "mode=plan"))), {})
    resolved = resolve_request(request)
    model = build_model(request.model)
    with_rotations = sum(x.nbytes for x in model.buffers())
    quantise_weights(model, torch.device("cpu"))
    held = sum(x.nbytes for x in (*model.parameters(), *model.buffers())) - with_rotations
    planned = resolved.plan.ranks[0].memory_bytes.parameters - resolved.profile.buffer_bytes
    assert planned == held
    assert len(resolved.profile.quantised) == QUANTISED
    chosen = {x.key: x.chosen for x in resolved.plan.decisions}
    assert chosen["model.quantize"] == f"nf4: {QUANTISED} frozen weights of linear layers"


@pytest.mark.parametrize("shape", [(128, 64), (48, 80), (33, 10), (7, 9)])
def test_a_layer_is_the_formula(shape: tuple[int, int]) -> None:
    """Rows that are no multiple of a block of 64 elements too."""
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0]).requires_grad_(False)
    weight = in_4_bits(linear.weight)
    model = nn.Sequential(linear)
    quantise_weights(model, torch.device("cpu"))
    x = torch.randn(5, 3, shape[1], requires_grad=True)
    found = model(x)
    wanted = x @ weight.T + linear.bias
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    torch.manual_seed(1)
    gradient = torch.randn_like(found)
    (of_x,) = torch.autograd.grad(found, x, gradient)
    torch.testing.assert_close(of_x, gradient @ weight, rtol=1e-5, atol=1e-6)


# The quantiles of a normal distribution, appendix E of the paper.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def in_4_bits(weight: Tensor) -> Tensor:
    """Each block of 64 elements, divided by its largest, at the nearest of the 16 values."""
    flat = weight.detach().flatten()
    table = torch.tensor(NF4)
    blocks = []
    for block in flat.split(64):
        largest = block.abs().max()
        nearest = ((block / largest)[:, None] - table).abs().argmin(1)
        blocks.append(table[nearest] * largest)
    return torch.cat(blocks).view(weight.shape)
