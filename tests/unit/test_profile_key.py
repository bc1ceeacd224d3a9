"""What determines a profile changes its key, and what may depend on more has none."""

import ast
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whale_train.models.options import HUGGING_FACE, ModelOptions
from whale_train.models.profile import cache_key as room
from whale_train.models.profile.cache_key import OWN_SOURCES, profile_key
from whale_train.strategies.graph.operation_graph import InputField

GPT = "whale_train.models.gpt.GPT"
FIELDS = (InputField("input_ids", (12,), "int64", 31),)
LLAMA = {"_target_": HUGGING_FACE, "architecture": "LlamaForCausalLM"}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch and a transformers of our own, first on the path, in a working directory beside."""
    site = tmp_path / "site"
    for path in ("torch/nn.py", "torch/lib/libtorch.so", "transformers/models/llama/modeling.py"):
        (site / path).parent.mkdir(parents=True)
        (site / path).write_text("1")
    for package in ("torch", "transformers"):
        (site / package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(site)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return site


def key(
    mapping: dict[str, Any], fields: tuple[InputField, ...] = FIELDS, by_folding: bool = True
) -> str | None:
    return profile_key(ModelOptions.from_mapping(mapping), fields, by_folding=by_folding)


def gpt_key(**arguments: Any) -> str | None:
    return key({"_target_": GPT, **arguments})


def test_the_same_question_has_the_same_key() -> None:
    assert gpt_key(depth=2) == gpt_key(depth=2)
    assert len(gpt_key(depth=2) or "") == 64


def test_every_part_of_the_question_is_in_the_key() -> None:
    longer = (InputField("input_ids", (13,), "int64", 31),)
    more = (InputField("input_ids", (12,), "int64", 32),)
    config = {"vocab_size": 31}
    keys = [
        gpt_key(),
        *(gpt_key(depth=depth) for depth in (1, 1.0, True, "1", None)),
        *(gpt_key(depth={1: 2}), gpt_key(depth={"1": 2}), gpt_key(depth=[1, 2])),
        *(gpt_key(a=1, b=2), gpt_key(b=2, a=1)),  # keyword arguments have an order
        key({"_target_": GPT, "loss": "cross_entropy"}),
        key({"_target_": GPT}, longer),
        key({"_target_": GPT}, more),
        key({"_target_": GPT}, longer + more),
        key({"_target_": GPT}, by_folding=False),
        key({"_target_": "whale_train.models.class_head.ClassHead"}),
        *(key(LLAMA), key({**LLAMA, "config": config})),
        key({**LLAMA, "architecture": "BertModel"}),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_models_that_may_read_anything_have_no_key() -> None:
    assert key({"_target_": "models.Net"}) is None
    assert key({"_target_": "torchvision.models.resnet18"}) is None
    assert gpt_key(width=Path("a")) is None  # whose representation need not say all of it
    for config in (
        *({"backbone": "resnet50"}, {"vision_config": {"use_timm_backbone": True}}),
        *({"_attn_implementation": "kernels-community/attention"}, {"parts": ["a/b"]}),
    ):
        assert key({**LLAMA, "config": config}) is None
    assert key({**LLAMA, "config": {"_name_or_path": "meta/llama"}}) is not None


def changed(path: Path) -> Callable[[Path], None]:
    def change(site: Path) -> None:
        before = (site / path).stat()
        (site / path).write_text("2")  # as long as it was
        os.utime(site / path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))

    return change


def added(path: str) -> Callable[[Path], None]:
    def add(site: Path) -> None:
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text("")

    return add


@pytest.mark.parametrize(
    ("change", "of_ours"),
    [
        (changed(Path("torch/nn.py")), True),
        (changed(Path("torch/lib/libtorch.so")), True),
        (changed(Path("transformers/models/llama/modeling.py")), False),
        (added("torch/fx/new.py"), True),
        (added("torch-2.99.0.dist-info/METADATA"), True),
        (added("flash_attn/__init__.py"), True),
        (added("../here/einops.py"), True),
        (added("../here/numpy/__init__.py"), True),
    ],
)
def test_what_is_installed_is_in_the_key(
    change: Callable[[Path], None], of_ours: bool, installed: Path
) -> None:
    before = gpt_key(), key(LLAMA)
    change(installed)
    after = gpt_key(), key(LLAMA)
    assert before[1] != after[1]
    assert (before[0] != after[0]) == of_ours


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        *(("TORCH_LOGS", True), ("USE_HUB_KERNELS", True), ("CUDA_VISIBLE_DEVICES", True)),
        *(("EDITOR", False), ("TORCHINDUCTOR_CACHE_DIR", False)),  # torch sets the latter itself
    ],
)
def test_variables_the_libraries_read_are_in_the_key(
    name: str, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = gpt_key()
    monkeypatch.setenv(name, "something else")
    assert (gpt_key() != before) == counts


def test_data_and_runs_in_the_working_directory_are_not(installed: Path) -> None:
    added("../here/runs/1/plan.json")(installed)
    before = gpt_key()
    for path in ("runs/2/plan.json", "data.npz", "__pycache__/net.pyc", "notes.txt"):
        added(f"../here/{path}")(installed)
    assert gpt_key() == before


def test_without_the_libraries_there_is_no_key(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [])
    assert gpt_key() is None


def test_the_config_of_saved_weights_is_in_the_key(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    config, mapping = saved / "config.json", {**LLAMA, "pretrained": str(saved)}
    config.write_text('{"hidden_size": 64, "_name_or_path": "meta/llama"}')
    before = key(mapping)
    (saved / "model.safetensors").write_text("weights")
    assert key(mapping) == before != key(LLAMA)
    config.write_text('{"hidden_size": 32, "_name_or_path": "meta/llama"}')
    assert None is not key(mapping) != before
    (saved / "config.4.0.0.json").write_text("{}")
    assert key(mapping) != before
    for text in ('{"backbone": "resnet50"}', "no config"):
        config.write_text(text)
        assert key(mapping) is None


@pytest.mark.parametrize("path", OWN_SOURCES, ids=lambda path: path.stem)
def test_own_sources_import_no_others_of_ours(path: Path) -> None:
    """So that none of what makes a profile is left out of its key."""
    package = Path(room.__file__).parents[2]
    known = {
        f"whale_train.{each.relative_to(package).with_suffix('')}".replace("/", ".")
        for each in OWN_SOURCES
    }
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("whale_train"):
            assert not node.level
            assert node.module in known, f"{path.name} imports {node.module}"
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("whale_train") for alias in node.names)


def test_own_sources_are_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source.py"
    source.write_text("a = 1")
    monkeypatch.setattr(room, "OWN_SOURCES", (*OWN_SOURCES, source))
    before = gpt_key()
    source.write_text("a = 2")
    assert gpt_key() != before
