"""How fp16's loss scale follows what overflows, and what of it may be asked for."""

import math

import pytest
import torch
from omegaconf import OmegaConf

from whale_train.config import read_request
from whale_train.errors import ConfigError
from whale_train.runtime.train.grad_scaler import LossScale, check_scaled


def after(scale: LossScale, steps: list[bool]) -> float:
    for is_finite in steps:
        scale.update(torch.tensor(is_finite))
    return scale.value.item()


def test_it_starts_at_2_to_the_15_and_doubles_after_2000_good_steps() -> None:
    scale = LossScale()
    assert scale.value.item() == 32768
    assert after(scale, [True] * 1999) == 32768
    assert after(scale, [True]) == 65536
    assert after(scale, [True] * 1999) == 65536
    assert after(scale, [True]) == 131072


def test_an_overflow_halves_it_and_begins_the_count_anew() -> None:
    scale = LossScale()
    assert after(scale, [True] * 1999 + [False]) == 16384
    assert after(scale, [True] * 1999) == 16384
    assert after(scale, [True]) == 32768
    assert after(scale, [False, False, False]) == 4096


def test_what_overflows_without_a_scale_is_an_error() -> None:
    scale = LossScale(2.0)
    assert after(scale, [False]) == 1
    for norm in (math.inf, math.nan):
        check_scaled(norm, 2.0)
        with pytest.raises(FloatingPointError, match="not finite in fp16, even with a loss scale"):
            check_scaled(norm, 1.0)
    check_scaled(3.0, 1.0)
    assert after(LossScale(1.5), [False]) == 1  # not below


def test_a_fixed_scale_stays() -> None:
    assert after(LossScale(1024.0, fixed=True), [True] * 2500 + [False] * 3) == 1024


def test_it_stays_where_its_square_fits_fp32() -> None:
    scale = LossScale(2.0**31)
    assert after(scale, [True] * 6000) == 2.0**32
    assert torch.isfinite(scale.value**2)
    assert after(LossScale(2.0**40), [True] * 2000) == 2.0**40  # asked for


def test_it_is_what_it_counts() -> None:
    first, second = LossScale(), LossScale()
    after(first, [True] * 1500)
    second = LossScale(**first.state())
    assert after(first, [True] * 500) == after(second, [True] * 500) == 65536


def faults(*overrides: str) -> list[str]:
    """What is said against a request that is otherwise right."""
    config = OmegaConf.create(
        {
            "mode": "train",
            "seed": 0,
            "model": {"kind": "gpt"},
            "strategy": {"graph": "replicate"},
            "hardware": {"kind": "cpu", "devices": 2},
            "data": {"kind": "classes"},
            "optimizer": {"name": "sgd", "lr": 0.1},
            "launcher": {},
            "train": {"steps": 1, "global_batch": 2},
            "verify": {"steps": 1},
            "checkpoint": {},
        }
    )
    for override in overrides:
        key, _, value = override.partition("=")
        OmegaConf.update(config, key, OmegaConf.create(f"x: {value}").x, force_add=True)
    try:
        read_request(config, {})
    except ConfigError as error:
        return [
            str(fault) for fault in error.faults if not str(fault).startswith(("model", "data"))
        ]
    return []


FP16, LAMB, LARS = "train.precision=fp16", "optimizer.name=lamb", "optimizer.name=lars"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((FP16, "train.loss_scale=65536"), []),
        ((FP16, "train.loss_scale=0.5"), ["train.loss_scale=0.5 is below 1; use 1 or more"]),
        (
            ("train.loss_scale=1024",),
            ["train.loss_scale=1024.0 has no effect on train.precision=fp32; "
             "use train.precision=fp16, or null"],
        ),
        (
            ("train.precision=bf16", "train.loss_scale=1024"),
            ["train.loss_scale=1024.0 has no effect on train.precision=bf16; "
             "use train.precision=fp16, or null"],
        ),
        (
            (FP16, "train.grad_norm=false"),
            ["train.grad_norm=false is off, and train.precision=fp16 finds overflow by the "
             "gradient's norm; use train.grad_norm=true"],
        ),
        ((FP16, "train.loss_scale=65536", "train.loss_scale_fixed=true"), []),
        (
            (FP16, "train.loss_scale_fixed=true"),
            ["train.loss_scale_fixed=true fixes no loss scale; set train.loss_scale as well, or "
             "use false"],
        ),
        (("train.accumulate=4",), []),
        (("train.accumulate=0",), ["train.accumulate=0 is below 1; use 1 or more"]),
        ((LAMB, "optimizer.betas=[0.9, 0.99]", "optimizer.eps=1e-6"), []),
        (
            (LAMB, "optimizer.fused=true"),
            ["optimizer.fused=true has no effect on lamb, which has no fused kernel; leave it out"],
        ),
        (
            (LAMB, "optimizer.momentum=0.9"),
            ["optimizer.momentum=0.9 has no effect on lamb; use optimizer=sgd, or leave it out"],
        ),
        ((LARS, "optimizer.momentum=0.9", "optimizer.eps=1e-6"), []),
        (
            (LARS, "optimizer.betas=[0.9, 0.99]"),
            ["optimizer.betas=[0.9, 0.99] has no effect on lars; use optimizer=adamw, or leave it "
             "out"],
        ),
        (
            (LAMB, "optimizer.trust_coefficient=0.1",
             "optimizer.groups=[{match: x, trust_ratio: false}]"),
            ["optimizer.trust_coefficient=0.1 has no effect on lamb; use optimizer=lars, or leave "
             "it out",
             "optimizer.groups[0].trust_ratio=false has no effect on lamb; use optimizer=lars, or "
             "leave it out"],
        ),
        (
            ("optimizer.schedule=linear", "optimizer.power=3"),
            ["optimizer.power=3.0 has no effect on optimizer.schedule=linear; "
             "use optimizer.schedule=polynomial, or 2"],
        ),
    ],
)  # fmt: skip
def test_what_may_be_asked_for(overrides: tuple[str, ...], expected: list[str]) -> None:
    assert faults(*overrides) == expected
