"""What a run may go on from: the model and the data of the checkpoint, or what differs is named."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed.resumed_models import Net, Side, gone_on, side_of, write_checkpoint
from tests.distributed.served import Served
from tests.pairs import some
from torch import nn

from whale_train.config import Request
from whale_train.errors import ConfigError
from whale_train.models import nf4
from whale_train.models.options import HUGGING_FACE

Sides = Callable[..., Side]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "d.npz"
    x = draw.normal(size=(64, 4)).astype("float32")
    np.savez(path, x=x, labels=np.arange(64) % 3)
    return path


@pytest.fixture(scope="module")
def sides(data: Path) -> Sides:
    @cache
    def side(*overrides: str) -> Side:
        return side_of(f"data.path={data}", *overrides)

    return side


ZERO1 = "strategy=zero1"
SGD = ("optimizer=sgd", "optimizer.momentum=0.9")
# What the saved run had, what goes on, and what is said of it.
RIGHT: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "the same": ((), (), ""),
    "another plan": ((), (ZERO1,), ""),
    "other numbers of the optimizer": ((), ("optimizer.lr=0.5", "optimizer=lamb"), ""),
    "another batch": ((), ("train.global_batch=16", "train.steps=99"), ""),
    "unfrozen": (
        ("model.frozen=true",),
        (),
        "moments begin at zero for a.weight, a.bias",
    ),
    "frozen": ((), ("model.frozen=true",), "no use is made of the moments of a.weight, a.bias"),
    "frozen under ZeRO": ((), ("model.frozen=true", ZERO1), "no use is made of the moments of a."),
    "a buffer of more bits": (("model.counts=float32",), ("model.counts=float64",), ""),
}
WRONG: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "a layer removed": (
        ("model.middle=1",),
        (),
        "has middle.0.weight, middle.0.bias, which the model lacks; train the model that it was "
        "saved of, with model.middle=1",
    ),
    "a layer added": ((), ("model.middle=1",), "has no middle.0.weight, middle.0.bias; train the"),
    "a layer renamed": (
        (),
        ("model.head=c", "model.width=6"),
        "has no c.weight, c.bias; train the model that it was saved of, without model.head, ",
    ),
    "a buffer removed": (("model.counts=int64",), (), "has counts, which the model lacks; train"),
    "a buffer added": ((), ("model.counts=int64",), "has no counts; train the model that it was"),
    "a buffer of another kind": (
        ("model.counts=float32",),
        ("model.counts=int64",),
        "has another kind of number in counts (F32, and here int64); train the model that it was",
    ),
    "a buffer of fewer bits": (
        ("model.counts=int64",),
        ("model.counts=int32",),
        "has another kind of number in counts (I64, and here int32); train the model that it was",
    ),
    "another shape": (
        (),
        ("model.width=7",),
        "has another shape of a.weight (6 x 4, and here 7 x 4), a.bias (6, and here 7), b.weight",
    ),
    "untied": (
        ("model.middle=2", "model.tied=true"),
        ("model.middle=2",),
        "has no middle.1.weight; train the model that it was saved of",
    ),
    "tied": (
        ("model.middle=2",),
        ("model.middle=2", "model.tied=true"),
        "has middle.1.weight, which the model lacks; train the model that it was saved of",
    ),
    "another optimizer": ((), SGD, "optimizer=sgd with momentum has no state in "),
    "unfrozen under ZeRO": (
        ("model.frozen=true",),
        (ZERO1,),
        "has no moments of a.weight, a.bias, and ZeRO counts the updates of all parameters ",
    ),
    "another order": ((), ("seed=1",), "seed=1 is not that of "),
    "in another order": ((), ("data.shuffle=false",), "data.shuffle=false is not that of "),
}


# Another plan goes on as the same one would; what is frozen is frozen under ZeRO too.
@pytest.mark.parametrize("case", some(RIGHT, RIGHT.keys() - {"the same", "frozen"}))
def test_what_is_the_same_goes_on(case: str, sides: Sides, tmp_path: Path) -> None:
    saved, resumed, said = RIGHT[case]
    going_on = gone_on(write_checkpoint(tmp_path, sides(*saved)), sides(*resumed))
    assert not going_on.data_anew
    chosen = [decision.chosen for decision in going_on.decisions]
    assert len(chosen) == bool(said)
    assert all(text.startswith(said) for text in chosen)


# A layer renamed lacks a name as one added does, and a tied one has one more as one removed does.
@pytest.mark.parametrize(
    "case",
    some(WRONG, WRONG.keys() - {"a layer removed", "a layer added", "a buffer removed", "untied"}),
)
def test_what_is_not_is_refused_by_name(case: str, sides: Sides, tmp_path: Path) -> None:
    saved, resumed, said = WRONG[case]
    path = write_checkpoint(tmp_path, sides(*saved))
    with pytest.raises(ConfigError) as caught:
        gone_on(path, sides(*resumed))
    assert said in str(caught.value)


@pytest.mark.parametrize("is_saved_in_4_bits", [True, False])
def test_frozen_weights_in_4_bits_are_named_where_they_are_the_difference(
    is_saved_in_4_bits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    sizes = "vocab_size: 257, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, "
    sizes += "num_attention_heads: 2, max_position_embeddings: 16"
    whole = side_of(
        *("model=hf", f"model._target_={HUGGING_FACE}", "model.architecture=LlamaForCausalLM"),
        f"model.config={{{sizes}}}",
        *("model.adapters={r: 2, target_modules: [q_proj]}", "model.loss=model"),
        *("data=text", "data.sequence_length=16"),
    )
    # As where bitsandbytes is installed; no weight is stored here.
    monkeypatch.setattr(nf4, "find_spec", lambda name: True)
    model = whole.request.model.model_copy(update={"quantize": "nf4"})
    in_4_bits = replace(whole, request=whole.request.model_copy(update={"model": model}))
    saved, resumed = (in_4_bits, whole) if is_saved_in_4_bits else (whole, in_4_bits)
    with pytest.raises(ConfigError) as caught:
        gone_on(write_checkpoint(tmp_path, saved), resumed)
    (fault,) = caught.value.faults
    assert "base_layer.weight" in fault.rule
    form = "nf4" if is_saved_in_4_bits else "null"
    remedy = f"train the model that it was saved of, with model.quantize={form}"
    assert fault.remedy == remedy


def test_unlike_counts_of_updates_are_said_where_one_is_kept(sides: Sides, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, sides(), counts={"a.bias": 2.0, "b.weight": 3.0})
    assert gone_on(path, sides()).decisions == ()
    (said,) = gone_on(path, sides(ZERO1)).decisions
    assert said.chosen == "ZeRO goes on from 4 updates of all parameters"
    assert said.reason == f"{path} has from 2 to 4 of its parameters"


def other_data(path: Path, change: str, data: Path) -> Path:
    """Write data with one thing changed."""
    arrays = dict(np.load(data))
    if change == "a value":
        arrays["x"][-1, 0] += 1
    elif change == "the order":
        arrays = {name: array[::-1] for name, array in arrays.items()}
    elif change == "a row more":
        arrays = {name: np.concatenate([array, array[:1]]) for name, array in arrays.items()}
    elif change == "compressed":
        np.savez_compressed(path, **arrays)
        return path
    np.savez(path, **arrays)
    return path


def test_the_same_data_elsewhere_goes_on(sides: Sides, data: Path, tmp_path: Path) -> None:
    """In other files, and of another kind where these have the same rows."""
    checkpoint = write_checkpoint(tmp_path, sides())
    for change in ("nothing", "compressed"):
        moved = other_data(tmp_path / f"{change}.npz", change, data)
        assert gone_on(checkpoint, side_of(f"data.path={moved}")).decisions == ()
    datasets = pytest.importorskip("datasets")
    arrays = {name: array.tolist() for name, array in np.load(data).items()}
    folder = tmp_path / "parquet"
    folder.mkdir()
    datasets.Dataset.from_dict(arrays).to_parquet(folder / "rows.parquet")
    other = side_of("data=hf_dataset", f"data.path={folder}")
    assert gone_on(checkpoint, other).decisions == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(
            "a value",
            "has seen a part of other data (its samples are others); use the data as it",
            marks=pytest.mark.full,
        ),
        ("the order", "has seen a part of other data (its samples are others); use the data as it"),
        ("a row more", "has seen a part of 64 samples, and the data has 65; use the data as it"),
    ],
)
def test_other_data_is_refused_or_begun_anew(
    change: str, said: str, sides: Sides, data: Path, tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path, sides())
    other = f"data.path={other_data(tmp_path / 'other.npz', change, data)}"
    with pytest.raises(ConfigError) as caught:
        gone_on(path, side_of(other))
    assert f"train.resume={path} {said}" in str(caught.value)
    assert "train.resume_data=any" in str(caught.value)
    wanted = ("train.resume=x", "train.resume_data=any")
    going_on = gone_on(path, side_of(other, *wanted))
    assert going_on.data_anew
    assert [x.chosen for x in going_on.decisions] == ["the data is begun with its first sample"]
    assert not gone_on(path, side_of(f"data.path={data}", *wanted)).data_anew


def test_a_checkpoint_that_says_nothing_of_its_data_goes_on(sides: Sides, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, sides(), {"data": None})
    (said,) = gone_on(path, sides()).decisions
    assert said.chosen == "the data is taken to be the same"


def test_a_file_that_the_manifest_has_not_is_none_of_the_checkpoint(
    sides: Sides, tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path, sides())
    (path / "model" / "notes.safetensors").write_bytes(b"of somebody")
    shutil.copy(path / "model" / "rank_0_0.safetensors", path / "model" / "copy.safetensors")
    assert gone_on(path, sides()).decisions == ()


# --- Body and head -------------------------------------------------------------------------------


def test_the_body_is_trained_after_the_head(data: Path, served: Served, tmp_path: Path) -> None:
    """The head alone for four steps, then all: what torch computes whose optimizer was given the
    body after four steps."""
    wanted = [
        *("model._target_=tests.distributed.resumed_models.Net", "model.loss=cross_entropy"),
        *("data=arrays", f"data.path={data}", "data.shuffle=false", "train.global_batch=8"),
        *("hardware=cpu", "hardware.devices=2", "strategy=dp", "checkpoint.every=4"),
        *("optimizer=adamw", "optimizer.lr=0.05", "checkpoint.final=false"),
    ]
    head = [*wanted, "train.steps=4", "model.frozen=true"]
    then = [*wanted, "train.steps=8", f"train.resume={tmp_path / 'head'}"]
    for name, overrides in (("head", head), ("all", then)):
        failure = served.ask(train, overrides=overrides, run_dir=str(tmp_path / name))
        assert not failure, failure
    found = [
        json.loads(line)["loss"]
        for name in ("head", "all")
        for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    ]
    request = Request.from_json((tmp_path / "head" / "request.json").read_text())
    assert found == pytest.approx(plain_losses(data, request), rel=2e-5)


def train(overrides: list[str], run_dir: str) -> str:
    """Run a job in the process that serves them; why it failed."""
    from tests.distributed.equality import run_job

    return run_job(overrides, plainly=False, run_dir=run_dir)


def plain_losses(data: Path, request: Request) -> list[float]:
    from whale_train.models.build import build_model

    torch.manual_seed(request.seed)
    model = build_model(request.model)
    assert isinstance(model, Net)
    arrays = {name: torch.from_numpy(array) for name, array in np.load(data).items()}
    options = request.optimizer
    optimizer = torch.optim.AdamW(
        model.b.parameters(), options.lr, options.betas, options.eps, options.weight_decay
    )
    losses = []
    for step in range(8):
        if step == 4:
            model.a.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.a.parameters())})
        rows = torch.arange(8 * step, 8 * step + 8) % 64
        loss = nn.functional.cross_entropy(model(arrays["x"][rows]), arrays["labels"][rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
