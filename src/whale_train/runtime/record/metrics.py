"""Write rank 0's record of every step, with peak memory: `metrics.jsonl`, and to trackers."""

import json
import math
import resource
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whale_train.disk import writing
from whale_train.runtime.graph.expert_loads import MixtureLoad, load_metrics
from whale_train.runtime.record.trackers import Trackers


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of a step that are known once its loss is on the host.

    number: the step, counted from 1.
    loss: the loss of the global batch.
    grad_norm: the global L2 norm of the gradients, or None where it was not computed.
    lr: the learning rate.
    seconds: the time of the step.
    evaluation: the results of the evaluation after the step, by name; empty without one.
    loss_scale: the scale of the loss in fp16, or None.
    skipped: True where the step changed nothing, because gradients were not finite.
    experts: the loads of the mixtures of experts.
    data_wait_s: seconds of the step in which rank 0 waited for its samples.
    parameters_sha256: the SHA-256 of the parameters after the step, or None.
    """

    number: int
    loss: float
    grad_norm: float | None
    lr: float
    seconds: float
    evaluation: dict[str, float]
    loss_scale: float | None = None
    skipped: bool = False
    experts: Sequence[MixtureLoad] = ()
    data_wait_s: float = 0.0
    parameters_sha256: str | None = None


class Metrics:
    """Writes `metrics.jsonl`, one line per step, and to trackers. Only rank 0 has one.

    `model_flops` are the FLOPs of a sample's forward and backward. `peak_flops_s` are the peak
    FLOP/s of all devices together; lines of a run on CPUs lack the comparison, as a CPU process has
    no data sheet.
    """

    def __init__(
        self,
        run_dir: Path,
        device: torch.device,
        model_flops: float = 0.0,
        peak_flops_s: float = 0.0,
        trackers: Trackers | None = None,
    ) -> None:
        self._model_flops = model_flops
        self._peak_flops_s = peak_flops_s if device.type == "cuda" else 0.0
        self._path = run_dir / "metrics.jsonl"
        self._file = self._path.open("ab", buffering=0)
        self._waiting = b""
        self._device = device
        self._trackers = trackers

    def write(self, step: StepMetrics, samples: int, tokens: int) -> dict[str, Any]:
        """Write the line of `step`, which had `samples` samples and `tokens` tokens, and return it.

        A line that does not fit on a full disk is kept, and written with later lines.
        """
        line: dict[str, Any] = {
            "step": step.number,
            "loss": step.loss,
            "grad_norm": step.grad_norm,
            "lr": step.lr,
            **({"skipped": True} if step.skipped else {}),
            **({} if step.loss_scale is None else {"loss_scale": step.loss_scale}),
            "samples": samples,
            "tokens": tokens,
            "step_time_s": step.seconds,
            "data_wait_s": step.data_wait_s,
            "samples_per_s": samples / step.seconds,
            "tokens_per_s": tokens / step.seconds,
            **flops_reached(self._model_flops, samples / step.seconds, self._peak_flops_s),
            "peak_memory_bytes": peak_memory_bytes(self._device),
            **({"parameters_sha256": step.parameters_sha256} if step.parameters_sha256 else {}),
            **({"experts": load_metrics(step.experts)} if step.experts else {}),
            **step.evaluation,
        }
        # JSON has no NaN: a loss that is NaN becomes null.
        finite = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()
        }
        self._waiting += json.dumps(finite).encode() + b"\n"
        with suppress(OSError):  # a full disk: the line is written with later lines
            self._append()
        if self._trackers is not None:
            self._trackers.log(step.number, tracked(finite, step.experts))
        return finite

    def tracker_states(self) -> Callable[[], dict[str, dict[str, Any]]] | None:
        """Ask the trackers for their states, and return the function that waits for them.

        The result is None without trackers. The function is that of `Trackers.states`.
        """
        return self._trackers.states() if self._trackers else None

    def _append(self) -> None:
        with writing(self._path, len(self._waiting)):
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]

    def close(self) -> None:
        """Write the lines that are kept, and close the file.

        Raises OSError where the disk is full.
        """
        self._append()
        self._file.close()


def tracked(line: Mapping[str, Any], experts: Sequence[MixtureLoad]) -> dict[str, float]:
    """Return the finite numbers of a line of `metrics.jsonl`, as trackers get them.

    `experts` add two numbers: the imbalance of the least balanced mixture, and the dropped slots of
    all mixtures.
    """
    values = {
        name: float(value)
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float)
    }
    if experts:
        values["expert_imbalance"] = max(mixture.imbalance for mixture in experts)
        values["dropped_slots"] = float(sum(mixture.dropped for mixture in experts))
    return values


def flops_reached(
    model_flops: float, samples_per_s: float, peak_flops_s: float
) -> dict[str, float]:
    """Return the model's FLOP/s, and their fraction of `peak_flops_s` (MFU).

    `model_flops` are FLOPs per sample. MFU is defined as in Chowdhery et al. 2022 (arXiv
    2204.02311, appendix B). Entries whose numbers are unknown, given as 0, are omitted.
    """
    if not model_flops:
        return {}
    metrics = {"model_flops_s": model_flops * samples_per_s}
    if peak_flops_s:
        metrics["model_flops_utilisation"] = metrics["model_flops_s"] / peak_flops_s
    return metrics


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this rank so far, in bytes.

    It is the memory allocated on the rank's GPU, or the resident memory of its process without a
    GPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
