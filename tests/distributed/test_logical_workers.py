"""`strategy=elastic_dp`: the same bits on any number of devices (docs/adr/084)."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cli.command import whale_train
from tests.distributed.harness import run_ranks
from tests.distributed.worker_models import Worked, samples
from torch import distributed as dist
from torch.nn import functional

WORKERS, BATCH, STEPS, SAMPLES = 8, 16, 6, 64
RUN = (
    *("model=custom", "model._target_=tests.distributed.worker_models.Worked"),
    *("model.loss=cross_entropy", "data=arrays", "data.path=samples.npz", "data.shuffle=false"),
    *("strategy=elastic_dp", f"strategy.logical_workers={WORKERS}", f"train.global_batch={BATCH}"),
    *("optimizer=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9", f"train.steps={STEPS}"),
    *("hardware=cpu", "data.evaluation_fraction=0", "train.parameters_sha256=true"),
    *("checkpoint.final=false", "train.report=false"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.savez(tmp_path / "samples.npz", **{k: x.numpy() for k, x in samples(SAMPLES).items()})
    return tmp_path


def hashes(folder: Path, devices: int, *more: str, run: str = "run", status: int = 0) -> list[str]:
    """Return the SHA-256 of the parameters after every step of a run on `devices` processes."""
    arguments = [*RUN, f"hardware.devices={devices}", f"hydra.run.dir={run}", *more]
    answer = whale_train(arguments, folder)
    assert answer.status == status, answer.stderr
    return [line["parameters_sha256"] for line in lines(folder / run)]


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def plain_steps() -> list[str]:
    """Return the hashes of data parallelism as anybody would write it, on one rank for each worker,
    whose gradients are summed in the order of the ranks."""
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Worked()
    torch.manual_seed(1_000_003 * (rank + 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    data, own, digests = samples(SAMPLES), BATCH // size, []
    for step in range(STEPS):
        start = (step * BATCH + rank * own) % SAMPLES
        ids, labels = (data[name][start : start + own] for name in ("input_ids", "labels"))
        (functional.cross_entropy(model(ids), labels) / size).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            gathered = [torch.empty_like(parameter) for _ in range(size)]
            dist.all_gather(gathered, parameter.grad)
            total = gathered[0]
            for gradient in gathered[1:]:
                total = total + gradient
            parameter.grad = total
        optimizer.step()
        optimizer.zero_grad()
        digest = sha256()
        for _, parameter in sorted(model.named_parameters()):
            digest.update(parameter.detach().numpy().tobytes())
        digests.append(digest.hexdigest())
    return digests


def test_any_number_of_devices_computes_the_bits_of_plain_data_parallelism(folder: Path) -> None:
    (plain, *others) = run_ranks(plain_steps, WORKERS)
    assert all(other == plain for other in others)
    assert len(set(plain)) == STEPS
    assert hashes(folder, 1, run="alone") == plain
    assert hashes(folder, 3, run="three") == plain


def test_a_run_goes_on_with_other_devices_and_the_same_bits(folder: Path) -> None:
    """The bits are those of the weights, and of evaluations, which read worker 0's statistics."""
    evaluated = ("data.evaluation_fraction=0.25", "train.evaluate_every=1")
    for devices, steps in ((4, 2), (2, 4), (3, STEPS)):
        hashes(folder, devices, *evaluated, f"train.steps={steps}", "train.resume=auto")
    hashes(folder, 1, *evaluated, run="whole")
    changed, whole = (lines(folder / run) for run in ("run", "whole"))
    assert len({line["parameters_sha256"] for line in whole}) == STEPS
    for key in ("step", "parameters_sha256", "evaluation_loss", "loss", "grad_norm"):
        assert [line[key] for line in changed] == [line[key] for line in whole], key


def test_a_verification_compares_bits(folder: Path) -> None:
    arguments = [*RUN, "hardware.devices=3", "mode=verify", "verify.steps=3", "hydra.run.dir=run"]
    answer = whale_train(arguments, folder)
    assert answer.status == 0, answer.stderr
    assert "equal: 3 steps on 3 ranks computed the bits that one process does (fp32)" in (
        answer.stdout
    )
    content = json.loads((folder / "run" / "verify.json").read_text())
    assert not content["dropout_off"]
    assert {x["difference"] for x in content["differences"]} == {0.0}
    assert {"loss", "gradient", "update", "buffer"} <= {x["what"] for x in content["differences"]}
