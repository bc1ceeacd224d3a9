"""Products whose factors are rounded to 8 bits, against numbers of 8 bits made one by one; plans in
fp8 against one process."""

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed.served import Served
from tests.distributed.test_verify import EVEN, TEXT, Case, Sides
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from whale_train.models.linear_layers import linear_layers
from whale_train.runtime.assembly.scale_linear_layers import scale_linear_layers
from whale_train.runtime.kernels.scaled_products import scaled_linear, scaled_product

# --- One product ---------------------------------------------------------------------------------


def e4m3() -> np.ndarray:
    """Return all finite numbers of e4m3, by its definition: sign, 4 bits of exponent with bias 7,
    3 of mantissa; an exponent of 0 is denormal, and all ones are NaN."""
    numbers = {0.0}
    for exponent in range(16):
        for mantissa in range(8):
            if (exponent, mantissa) != (15, 7):
                lead = 1.0 if exponent else 0.0
                numbers.add((lead + mantissa / 8) * 2.0 ** (max(exponent, 1) - 7))
    return np.array(sorted({-x for x in numbers} | numbers))


NUMBERS = e4m3()


def rounded_to_8_bits(row: np.ndarray) -> np.ndarray:
    """Return `row` scaled by the largest power of two with which it fits, rounded to the nearest
    numbers of e4m3 (the even one of two), and scaled back."""
    largest = np.abs(row).max()
    shift = max(k for k in range(-126, 127) if largest * 2.0**k <= NUMBERS[-1])
    scaled = row * 2.0**shift
    right = np.clip(np.searchsorted(NUMBERS, scaled), 1, len(NUMBERS) - 1)
    left = right - 1
    below, above = scaled - NUMBERS[left], NUMBERS[right] - scaled
    half = len(NUMBERS) // 2  # the index of zero, from which codes count up
    takes_left = (below < above) | ((below == above) & ((left - half) % 2 == 0))
    return np.where(takes_left, NUMBERS[left], NUMBERS[right]) * 2.0**-shift


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("scale", [1.0, 2.0**-30, 3e37, 0.0])
def test_each_row_is_rounded_with_its_own_scale(scale: float) -> None:
    torch.manual_seed(0)
    rows = drawn(9, 64) * scale * torch.tensor([1.0, 2.0**-9, 0.3]).repeat(3)[:, None]
    rows = rows.bfloat16()
    rows[4] = 0.0
    shown = scaled_product(rows, torch.eye(64, dtype=torch.bfloat16))
    expected = [rounded_to_8_bits(row) for row in rows.double().numpy()]
    assert np.array_equal(shown.double().numpy(), np.stack(expected))


def test_halfway_numbers_and_the_largest() -> None:
    """448 is the largest number; of 450 and 460 the next power of two divides the scale."""
    for largest in (448.0, 450.0, 460.0):
        row = torch.tensor([[largest, 1.0625, 1.1875, 17.0, 19.0, -1.0625] + [0.0] * 10])
        row = row.bfloat16()
        shown = scaled_product(row, torch.eye(16, dtype=torch.bfloat16))
        assert np.array_equal(shown.double().numpy()[0], rounded_to_8_bits(row.double().numpy()[0]))


@pytest.mark.parametrize(
    ("rows", "out", "width"), [(5, 64, 64), (1, 16, 32), (7, 24, 40), (3, 5, 9), (0, 16, 16)]
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_is_the_product_of_rounded_factors(
    rows: int, out: int, width: int, has_bias: bool
) -> None:
    torch.manual_seed(1)
    left, right = drawn(rows, width), drawn(out, width)
    bias = drawn(out) if has_bias else None
    product = scaled_product(left, right, bias)
    assert product.dtype == torch.bfloat16
    assert product.shape == (rows, out)
    factors = (
        np.stack([rounded_to_8_bits(row) for row in x.double().numpy()]) if len(x) else x.double()
        for x in (left, right)
    )
    first, second = map(torch.as_tensor, factors)
    expected = first @ second.t() + (0.0 if bias is None else bias.double())
    # Rounding to bf16, and the order of sums in fp32.
    torch.testing.assert_close(product.double(), expected, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    rows = torch.ones(3, 16, dtype=torch.bfloat16)
    rows[1, 2] = bad
    product = scaled_product(rows, torch.ones(16, 16, dtype=torch.bfloat16))
    assert product[1].isnan().all()
    assert (product[[0, 2]] == 16).all()


@pytest.mark.parametrize("transposed", [True, False])
def test_gradients(transposed: bool) -> None:
    """That of the input is a product of rounded factors; those of weight and bias are 16-bit."""
    torch.manual_seed(2)
    x, weight, bias = drawn(2, 4, 64), drawn(96, 64), drawn(96)
    leaf = (weight.t().contiguous() if transposed else weight).requires_grad_()
    operands = x.requires_grad_(), leaf, bias.requires_grad_()
    grad = drawn(2, 4, 96)
    with torch.autocast("cpu", torch.bfloat16):
        value = scaled_linear(*operands, transposed)
    of_x, of_weight, of_bias = torch.autograd.grad(value, operands, grad)
    rows, grads = x.detach().flatten(0, 1), grad.flatten(0, 1)
    weight = weight.detach()
    assert torch.equal(value.flatten(0, 1), scaled_product(rows, weight, bias.detach()))
    assert torch.equal(of_x.flatten(0, 1), scaled_product(grads, weight.t().contiguous()))
    exact = grads.t() @ rows
    torch.testing.assert_close(of_weight.t() if transposed else of_weight, exact)
    torch.testing.assert_close(of_bias, grads.sum(0))


def test_outside_of_autocast_nothing_is_rounded() -> None:
    x, weight = drawn(4, 64, dtype=torch.float32), drawn(64, 64, dtype=torch.float32)
    assert torch.equal(scaled_linear(x, weight, None, False), functional.linear(x, weight))


def test_a_compiled_product_is_the_same() -> None:
    torch.manual_seed(3)
    x, weight = drawn(8, 64), drawn(64, 64)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return scaled_product(x * 1.0, weight.t())

    compiled: Callable[..., Tensor] = torch.compile(product)
    assert torch.equal(compiled(x, weight), product(x, weight))


# --- The layers of a model -----------------------------------------------------------------------


class Doubled(nn.Linear):
    """A linear layer that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def layers() -> nn.Module:
    model = nn.ModuleDict({
        "plain": nn.Linear(64, 64),
        "turned": Conv1D(96, 64),
        "doubled": Doubled(64, 64),
        "shared": nn.Linear(64, 64),
        "other": nn.Linear(64, 64),
    })  # fmt: skip
    model["other"].weight = model["shared"].weight
    return model


def test_linear_layers_compute_nothing_but_a_product() -> None:
    assert list(linear_layers(layers())) == ["plain.weight", "turned.weight", "shared.weight"]


def test_a_weight_that_something_else_holds_is_none_of_a_linear_layer() -> None:
    model = layers()
    model["table"] = nn.Embedding(64, 64)
    model["table"].weight = model["plain"].weight
    model["turned"].forward = lambda x: x
    assert list(linear_layers(model)) == ["shared.weight"]


def test_a_layer_under_two_paths_is_one() -> None:
    block = nn.Linear(64, 64)
    (held,) = linear_layers(nn.ModuleList([block, block])).values()
    assert held == (block,)


def test_only_the_chosen_layers_are_scaled() -> None:
    torch.manual_seed(4)
    model, x = layers(), drawn(4, 64, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        before = {name: layer(x) for name, layer in model.items()}
        scale_linear_layers(model, ["turned.weight"])
        after = {name: layer(x) for name, layer in model.items()}
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"turned"}
    turned = model["turned"].requires_grad_(False)
    rounded = scaled_product(x.bfloat16(), turned.weight.bfloat16().t(), turned.bias.bfloat16())
    assert torch.equal(after["turned"], rounded)


def test_scaled_layers_are_called_copied_and_saved_as_others() -> None:
    torch.manual_seed(5)
    model, x = layers(), drawn(4, 64, dtype=torch.float32)
    scale_linear_layers(model, ["plain.weight", "turned.weight"])
    twin = copy.deepcopy(model)
    for weight in twin.parameters():
        weight.data.zero_()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model["plain"](input=x), model["plain"](x))
        for name in ("plain", "turned"):
            assert not twin[name](x).any()
            assert model[name](x).any()
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded["plain"](x), model["plain"](x))


def test_second_derivatives_are_those_of_16_bits() -> None:
    torch.manual_seed(6)
    x, weight = drawn(4, 64, dtype=torch.float32), drawn(64, 64, dtype=torch.float32)
    found = []
    for scaled in (True, False):
        weight.grad, parameter = None, weight.clone().requires_grad_()
        value = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            product = scaled_linear(value, parameter, None, False) if scaled else None
            product = functional.linear(value, parameter) if product is None else product
            (slope,) = torch.autograd.grad(product.float().sum(), value, create_graph=True)
            slope.float().square().mean().backward()
        assert parameter.grad is not None
        found.append(parameter.grad)
    assert found[0].any()
    torch.testing.assert_close(*found)


def test_what_has_no_kernel_is_computed_as_before() -> None:
    x, weight = drawn(4, 64, dtype=torch.float64), drawn(64, 64, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scaled_linear(x, weight, None, False), functional.linear(x, weight))
        each = torch.func.vmap(lambda row: scaled_linear(row, weight.float(), None, False))
        expected = functional.linear(x.float(), weight.float())
        torch.testing.assert_close(each(x.float()), expected)


# --- Plans ---------------------------------------------------------------------------------------

_CHIP = (
    "{name: chip, flops: {fp32: 1e12, bf16: 2e12, fp8: 4e12}, memory_bytes: 16e9, "
    "memory_bandwidth_bytes_s: 1e11}"
)
CHIPS = (
    "hardware=v100_p100_mix",
    f"hardware.nodes=[{{devices: 2, link: nvlink2, device: {_CHIP}}}]",
    "launcher=emulate",
)
GPT = ("width=64", "depth=2", "heads=2", "sequence_length=16")
_GPT2 = "vocab_size: 256, n_positions: 16, n_embd: 64, n_layer: 2, n_head: 2"
_LLAMA = (
    "vocab_size: 256, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 16"
)
MODELS = {
    "gpt": ("model=gpt", *(f"model.{x}" for x in GPT), *TEXT),
    "gpt2": (
        *("model=hf", "model.architecture=GPT2LMHeadModel"),
        *(f"model.config={{{_GPT2}, bos_token_id: 0, eos_token_id: 0}}", *TEXT),
    ),
    "llama": (
        *("model=hf", "model.architecture=LlamaForCausalLM", f"model.config={{{_LLAMA}}}"),
        *TEXT,
    ),
}
PIPELINE = "{pipeline: {stages: 2, micro_batches: 2}}"
PLANS = [
    ("gpt", "{replicate: {}}"),
    ("gpt2", "{replicate: {zero: 3}}"),
    ("llama", "{replicate: {zero: 2, recompute: full}}"),
    ("llama", "{split: {}}"),
    ("gpt", "{split: {dim: sequence}}"),
    ("gpt2", "{split: {}}"),
    ("gpt", PIPELINE),
    ("llama", "{split: {dim: context}}"),
    ("gpt", "{replicate: {zero: 1, state: memory}}"),
]


class Fp8(Case):
    """A verification in fp8 of a model that is wide enough for it."""

    @property
    def overrides(self) -> tuple[str, ...]:
        hardware = CHIPS if self.hardware == EVEN else self.hardware
        training = ("train.steps=3", "train.global_batch=8", "mode=verify", *self.extra)
        strategy = f"strategy.graph={self.strategy}" if "{" in self.strategy else "strategy=dp"
        return (*MODELS[self.model], strategy, *hardware, "optimizer=sgd", *training)


@pytest.fixture(scope="module")
def sides(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Sides:
    return Sides(tmp_path_factory.mktemp("fp8"), served)


@pytest.mark.parametrize(("model", "strategy"), PLANS)
def test_a_plan_in_fp8_is_one_process(sides: Sides, model: str, strategy: str) -> None:
    verified = sides.verify(Fp8(model, strategy, "sgd", extra=("train.precision=fp8",)))
    assert verified.equal, verified.worst
    assert verified.precision == "fp8"


@pytest.mark.parametrize("model", MODELS)
def test_fp8_is_not_bf16(sides: Sides, model: str) -> None:
    """Losses differ by rounding to 8 bits, and by no more."""
    losses = []
    for precision in ("fp8", "bf16"):
        case = Fp8(model, "dp", "sgd", extra=(f"train.precision={precision}",))
        run_dir = sides.alone(case)
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def test_the_plan_names_the_weights(sides: Sides) -> None:
    case = Fp8("gpt", "{split: {}}", "sgd", extra=("train.precision=fp8",))
    run_dir: Path = sides._run(replace(case).overrides, False, "")
    plan = json.loads((run_dir / "plan.json").read_text())
    assert len(plan["scaled_weights"]) == 8
    assert all(".weight" in path and "blocks." in path for path in plan["scaled_weights"])
