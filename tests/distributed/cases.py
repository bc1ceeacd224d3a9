"""Cases that plans are compared by: model, data, optimizer and devices, as overrides."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tests.distributed.equality import RARE, Arrays, Computed, Jobs, save

STEPS, GLOBAL_BATCH, SEQUENCE = 5, 8, 16
SAMPLES = 3 * GLOBAL_BATCH  # the fourth step begins a second epoch
TOLERANCE = 2e-5

# --- Models and data as overrides ----------------------------------------------------------------

_GPT2 = "vocab_size: 61, n_positions: 16, n_embd: 32, n_layer: 2, n_head: 2"
_GPT2_OFF = "resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0, bos_token_id: 0, eos_token_id: 0"
_BERT = (
    "vocab_size: 67, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 2, max_position_embeddings: 16, hidden_dropout_prob: 0.0, "
    "attention_probs_dropout_prob: 0.0"
)
_SMALL_GPT = ("vocab_size=64", "sequence_length=16", "width=32", "depth=2", "heads=2")

# name: (the arrays it reads, its overrides)
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "gpt": ("tokens", ("model=gpt", *(f"model.{x}" for x in _SMALL_GPT))),
    "gpt_tied": ("tokens", ("model=gpt", *(f"model.{x}" for x in _SMALL_GPT), "model.tied=true")),
    "image_classifier": ("images", ("model=image_classifier", "model.width=8")),
    "gpt2": (
        "tokens",
        (
            "model=hf",
            "model.architecture=GPT2LMHeadModel",
            f"model.config={{{_GPT2}, {_GPT2_OFF}}}",
        ),
    ),
    "bert": (
        "masked",
        ("model=hf", "model.architecture=BertForMaskedLM", f"model.config={{{_BERT}}}"),
    ),
    "bert_some_without": (
        "sparse",
        ("model=hf", "model.architecture=BertForMaskedLM", f"model.config={{{_BERT}}}"),
    ),
    # More parameters than one bucket of gradients holds.
    "class_head": ("features", ("model=class_head", "model.num_classes=16000")),
    "own": ("points", ("model._target_=equality.OwnNet", "model.loss=cross_entropy")),
    "own_unexported": (
        "points",
        ("model._target_=equality.OwnNet", "model.loss=cross_entropy", "model.branch=size"),
    ),
    "own_branching": (
        "points",
        ("model._target_=equality.OwnNet", "model.loss=cross_entropy", "model.branch=values"),
    ),
    "sometimes": ("points", ("model._target_=equality.SometimesNet", "model.loss=cross_entropy")),
}


def write_arrays(folder: Path) -> None:
    """One .npz a kind of data. Every sample of `masked` has a number of targets of its own, some
    only one; in `sparse` the first half of every batch has none."""
    draw = np.random.default_rng(7)
    tokens = draw.integers(0, 61, (SAMPLES, SEQUENCE))
    pads = draw.integers(SEQUENCE // 2, SEQUENCE + 1, (SAMPLES, 1))
    attention_mask = (np.arange(SEQUENCE) < pads).astype(np.int64)
    wanted = np.array([1, 12, 3, 1, 7, 1, 16, 5])
    targets = [np.resize(wanted, SAMPLES), np.resize([0, 0, 0, 0, 1, 9, 2, 5], SAMPLES)]
    ranks = draw.random((SAMPLES, SEQUENCE)).argsort(1)
    labels = [np.where(ranks < count[:, None], tokens, -100) for count in targets]
    points = draw.normal(size=(SAMPLES, 6))
    # Steps 1, 3 and 4 (which repeats 1) have one sample each that reads SometimesNet.rare.
    points[[1, 2 * GLOBAL_BATCH + 6], 0] = RARE + 1
    classes = {name: draw.integers(0, top, SAMPLES) for name, top in _CLASSES.items()}
    arrays: dict[str, Arrays] = {
        "tokens": {"input_ids": tokens, "labels": tokens},
        "masked": {"input_ids": tokens, "attention_mask": attention_mask, "labels": labels[0]},
        "sparse": {"input_ids": tokens, "attention_mask": attention_mask, "labels": labels[1]},
        "images": {"pixel_values": draw.normal(size=(SAMPLES, 1, 8, 8))},
        "features": {"features": draw.normal(size=(SAMPLES, 256))},
        "points": {"points": points},
    }
    for name, found in arrays.items():
        labels_of_classes = {"labels": classes[name]} if name in classes else {}
        save(folder / f"{name}.npz", {**found, **labels_of_classes})


_CLASSES = {"images": 10, "features": 16000, "points": 11}

OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "none": (),  # for one in further overrides
    "sgd": ("optimizer=sgd", "optimizer.lr=0.1"),
    "momentum": (
        "optimizer=sgd",
        "optimizer.lr=0.1",
        "optimizer.momentum=0.9",
        "optimizer.weight_decay=0.05",
    ),
    # Near 0 Adam multiplies a gradient, and its rounding, by lr / eps: with the default eps a
    # gradient that is 0 but for rounding (that of a key's bias) becomes whole steps in whatever
    # direction. The eps here keeps rounding what it is, and shows a gradient of the wrong scale.
    "adamw": (
        "optimizer=adamw",
        "optimizer.lr=2e-3",
        "optimizer.weight_decay=0.1",
        "optimizer.eps=1e-3",
    ),
    "adam": (
        "optimizer=adam",
        "optimizer.lr=2e-3",
        "optimizer.weight_decay=0.1",
        "optimizer.eps=1e-3",
    ),
    "lars": (
        "optimizer=lars",
        "optimizer.lr=5",
        "optimizer.weight_decay=0.1",
    ),
    "lamb": (
        "optimizer=lamb",
        "optimizer.lr=2e-3",
        "optimizer.weight_decay=0.1",
        "optimizer.eps=1e-3",
    ),
}


def hardware(devices: int, speeds: Sequence[float]) -> tuple[str, ...]:
    """`devices` CPU processes: equal ones, or as many of each of `speeds` (TFLOP/s), whose memory
    is as fast in proportion."""
    if not speeds:
        return ("hardware=cpu", f"hardware.devices={devices}")
    nodes = ", ".join(
        f"{{devices: {devices // len(speeds)}, link: nvlink2, device: {{name: gpu_{i}, "
        f"flops: {{fp32: {speed}e12, bf16: {speed}e12}}, memory_bytes: 16e9, "
        f"memory_bandwidth_bytes_s: {speed}e11}}}}"
        for i, speed in enumerate(speeds)
    )
    return ("hardware=v100_p100_mix", f"hardware.nodes=[{nodes}]", "launcher=emulate")


@dataclass(frozen=True)
class Case:
    """One job. `speeds` as in `hardware`; `extra` are further overrides."""

    model: str
    strategy: str
    devices: int
    optimizer: str
    speeds: tuple[float, ...] = ()
    extra: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The case as a test's name."""
        shares = f"speeds_{'_'.join(f'{s:g}' for s in self.speeds)}" if self.speeds else "even"
        parts = (self.model, self.strategy, f"{self.devices}x", shares, self.optimizer)
        return "-".join((*parts, *(x.removeprefix("train.") for x in self.extra)))

    @property
    def single(self) -> "Case":
        """The same on one device."""
        return Case(self.model, "single", 1, self.optimizer, (), self.extra)

    def overrides(self, arrays: Path) -> list[str]:
        kind, model = MODELS[self.model]
        return [
            *model,
            *("data=arrays", f"data.path={arrays / kind}.npz", "data.shuffle=false"),
            *(f"strategy={self.strategy}", *hardware(self.devices, self.speeds)),
            *OPTIMIZERS[self.optimizer],
            *(f"train.steps={STEPS}", f"train.global_batch={GLOBAL_BATCH}"),
            *self.extra,
        ]


class Run:
    """Runs cases on arrays in `folder`."""

    def __init__(self, folder: Path, jobs: Jobs) -> None:
        write_arrays(folder)
        self.folder, self._jobs = folder, jobs

    def __call__(self, case: Case, plainly: bool = False) -> Computed:
        return self._jobs.run(case.overrides(self.folder), plainly)


UNEVEN = (5.0, 3.0)
UNEVEN_3 = (4.0, 3.0, 1.0)
ONE = (7.0, 1.0)

CLIPPED = ("train.grad_clip=0.3",)
SCHEDULED = (
    "optimizer.schedule=cosine",
    "optimizer.warmup_steps=2",
    "optimizer.final_lr_fraction=0.1",
)
EVALUATED = ("data.evaluation_fraction=0.4", "train.evaluate_every=5", "train.evaluation_samples=8")


def zero_backbone(stage: int) -> tuple[str, ...]:
    """hybrid_split_dp whose backbone is partitioned as well."""
    copies = f'{{replicate: {{modules: "*", zero: {stage}}}}}'
    return (f"strategy.graph=[{copies}, {{split: {{modules: head}}}}]",)
