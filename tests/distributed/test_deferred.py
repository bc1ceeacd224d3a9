"""`model.init=sharded`: initial values made tensor by tensor, the same whoever asks for them."""

import copy
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tests.distributed.jobs import COMMAND, job_in
from tests.pairs import some
from torch import nn

from whale_train.models.build import build_model
from whale_train.models.options import HUGGING_FACE, ModelOptions
from whale_train.models.weights.deferred import deferred, fill, is_deferred, made
from whale_train.models.weights.stored import stored

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000}


def hugging_face(architecture: str, **config: object) -> Callable[[], nn.Module]:
    options = ModelOptions(target=HUGGING_FACE, architecture=architecture, config=config)
    return lambda: build_model(options)


class Own(nn.Module):
    """Initialised in every way, and by values that it looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 64)
        self.tied = self.linear.weight
        nn.init.orthogonal_(self.linear.weight)
        self.recurrent = nn.LSTM(64, 32)
        self.table = nn.Embedding(100, 16, padding_idx=0)
        nn.init.trunc_normal_(self.table.weight[1:].data, std=0.02)
        self.register_buffer("scale", torch.linspace(0, 1, 8))
        self.plain = torch.arange(4) * 2
        self.noise = nn.Parameter(torch.randn(1000) * float(self.scale[-1]))  # a number: 1.0
        self.frozen = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.short = nn.Linear(8, 64).to(torch.bfloat16)
        self.copied = copy.deepcopy(self.short).requires_grad_(False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": hugging_face("LlamaForCausalLM", intermediate_size=128, **SMALL),
    "gpt2": hugging_face("GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4, vocab_size=1000),
    "bert": hugging_face("BertForMaskedLM", intermediate_size=128, **SMALL),
    "resnet": hugging_face(
        "ResNetForImageClassification", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1],
        layer_type="basic", num_labels=10,
    ),
    "own": Own,
}  # fmt: skip


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return dict(named)


@pytest.mark.parametrize("name", MODELS)
def test_values_are_drawn_as_the_constructor_would(name: str) -> None:
    """Constants are the very same; what is drawn has the same spread and mean."""
    torch.manual_seed(0)
    whole = tensors(MODELS[name]())
    module = deferred(MODELS[name], seed=0)
    found = tensors(module)
    assert found.keys() == whole.keys()
    for path, expected in whole.items():
        assert found[path].untyped_storage().nbytes() <= 8, path  # a placeholder
        assert found[path].requires_grad == expected.requires_grad
        value, wanted = made(found[path]).detach().double(), expected.detach().double()
        assert (value.shape, found[path].dtype) == (expected.shape, expected.dtype)
        spread = float(wanted.std(unbiased=False))
        if spread == 0.0 or not expected.is_floating_point():
            assert torch.equal(value, wanted), path
        elif value.numel() >= 100:
            assert float(value.std(unbiased=False)) == pytest.approx(spread, rel=0.25), path
            assert abs(float(value.mean() - wanted.mean())) < 0.3 * spread, path


def test_values_do_not_depend_on_who_asks_first() -> None:
    first, second, other = (tensors(deferred(Own, seed)) for seed in (1, 1, 2))
    values = {path: made(tensor) for path, tensor in first.items()}
    for path in reversed(second):
        assert torch.equal(made(second[path]), values[path]), path
    assert torch.equal(values["tied"], values["linear.weight"])
    assert not torch.equal(made(other["noise"]), values["noise"])
    assert float(values["table.weight"][0].abs().max()) == 0.0  # its padding
    product = values["linear.weight"].T @ values["linear.weight"]
    torch.testing.assert_close(product, torch.eye(32), atol=1e-5, rtol=0)


def test_a_programs_own_draws_are_not_disturbed() -> None:
    parameters = tensors(deferred(Own, seed=1))
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    made(parameters["noise"])
    assert torch.equal(torch.rand(4), expected)


def test_what_a_forward_reads_as_it_is_has_values() -> None:
    module = deferred(Own, seed=0)
    assert isinstance(module.plain, torch.Tensor)
    assert module.plain.tolist() == [0, 2, 4, 6]


def test_a_parameter_is_filled_where_it_is() -> None:
    module = deferred(Own, seed=0)
    assert isinstance(module.noise, nn.Parameter)
    value, parameter = made(module.noise), module.noise
    again = fill(parameter)
    assert again is not None
    assert torch.equal(again(), value)
    assert fill(parameter) is None
    assert module.noise is parameter
    assert torch.equal(parameter, value)
    assert made(parameter) is parameter


PLANS = (
    ("strategy=single", "hardware.devices=1"),
    ("strategy=dp", "hardware.devices=2"),
    ("strategy=zero3", "hardware.devices=2"),
    ("strategy=split", "hardware.devices=2"),
    ("strategy=pipeline", "strategy.graph.pipeline.stages=2", "hardware.devices=2"),
)
# What ZeRO 3 holds in 16 bits has its fp32 master from the same values, made once more.
IN_16_BITS = ("strategy=zero3", "hardware.devices=2", "train.precision=bf16")


def test_every_plan_trains_the_same_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    """gpt under each, and its first loss is that of a model of no use yet."""
    small = [word for word in COMMAND if not word.startswith(("strategy", "hardware.devices"))]
    found = []
    plans = some(PLANS, [PLANS[0], PLANS[-1]])
    for plan in (*plans, IN_16_BITS):
        with job_in(tmp_path_factory.mktemp("plan")) as job:
            job.start(*small, "model.init=sharded", "train.steps=3", *plan)
            assert job.wait() == [0], job.said("err")
            found.append(np.array(job.losses()))
    assert 5.0 < found[0][0] < 6.5  # log(256) = 5.5
    for plan, each in zip(plans, found, strict=False):
        np.testing.assert_allclose(each, found[0], rtol=2e-5, err_msg=str(plan))
    np.testing.assert_allclose(found[-1], found[0], rtol=5e-3)


FOLDERS = {  # of a model with a part that its folder lacks, two, or none
    "llama": ("LlamaForCausalLM", "LlamaForSequenceClassification", {"pad_token_id": 0, **SMALL}),
    "bert": ("BertModel", "BertForTokenClassification", {"intermediate_size": 128, **SMALL}),
    "mixtral": (
        *("MixtralForCausalLM", "MixtralForCausalLM"),
        {"num_local_experts": 4, "num_key_value_heads": 2, "intermediate_size": 128, **SMALL},
    ),
    "resnet": (
        *("ResNetModel", "ResNetForImageClassification"),
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]},
    ),
}


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_read_as_transformers_does(
    name: str, precision: torch.dtype, tmp_path: Path
) -> None:
    """All of it, and what it lacks is drawn as one process draws it."""
    saved, architecture, config = FOLDERS[name]
    given = getattr(transformers, saved).config_class(**config)
    getattr(transformers, saved)(given).to(precision).save_pretrained(tmp_path)
    options = ModelOptions(
        target=HUGGING_FACE, architecture=architecture, config=config, pretrained=str(tmp_path)
    )
    torch.manual_seed(3)
    wanted = getattr(transformers, architecture).from_pretrained(tmp_path, dtype=torch.float32)
    expected = tensors(wanted)
    module = deferred(lambda: build_model(options), seed=3, draws_at_once=True)
    found = tensors(module)
    assert found.keys() == expected.keys()
    for path, tensor in found.items():
        given_by_folder = is_deferred(tensor)
        value = made(tensor).to(tensor.dtype)
        assert torch.equal(value, expected[path]), path
        if given_by_folder:
            assert tensor.untyped_storage().nbytes() <= 8, path
        else:
            assert path.startswith(("score", "classifier")), path


def test_of_a_folder_only_what_is_taken_is_read(tmp_path: Path) -> None:
    """A tensor of 256 MB, of which a rank takes one row."""
    shape = [2**13, 2**13]
    save_file({"weight": torch.ones(shape)}, tmp_path / "one.safetensors")
    given = (str(tmp_path / "one.safetensors"), "weight", shape, torch.float32)

    def build() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(stored(*given))
        return module

    value = made(tensors(deferred(build, seed=0))["weight"])
    pages = -(-value.nbytes // resource.getpagesize())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert float(value[5].sum()) == 2**13
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < pages / 100
