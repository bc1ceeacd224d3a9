"""`train.parameters_sha256`: the hash of every rank's parameters, or a refusal with its reason."""

from hashlib import sha256

import pytest
from tests.distributed.equality import JobFailed, Jobs

RUN = (
    *("model=gpt", "model.width=32", "model.depth=2", "model.heads=2", "model.sequence_length=16"),
    *("data=text", "data.sequence_length=16", "train.steps=2", "train.global_batch=6"),
    *("train.parameters_sha256=true", "hardware=cpu"),
)
RANKS = {
    "dp": (2, "{replicate: {}}"),
    "context": (2, "{split: {dim: context}}"),
    "copies of context": (4, "{replicate: {of: {split: {dim: context, degree: 2}}}}"),
    "a pipeline of one stage": (2, "{pipeline: {stages: 1}}"),
    "one rank and its host": (1, "{replicate: {zero: 2, offload: {optimizer: cpu}}}"),
}
PARAMETERS = "needs a rank with all parameters, and this strategy divides them among ranks"
VALUES = "needs a rank with all updated values, and ZeRO divides them among ranks"
REFUSED = {
    "split": ("{split: {}}", PARAMETERS),
    "two stages": ("{pipeline: {stages: 2}}", PARAMETERS),
    "ZeRO 1": ("{replicate: {zero: 1}}", VALUES),
    "ZeRO 3": ("{replicate: {zero: 3}}", VALUES),
}


def overrides(devices: int, graph: str) -> list[str]:
    return [*RUN, f"hardware.devices={devices}", f"strategy.graph={graph}"]


@pytest.mark.parametrize("case", RANKS)
def test_the_hash_is_that_of_the_parameters_of_every_rank(jobs: Jobs, case: str) -> None:
    devices, graph = RANKS[case]
    job = jobs.run(overrides(devices, graph))
    copies = [sha256() for _ in range(devices)]
    for path in sorted(job.plan["task_graphs"][0]["trained"]):
        values = job.values[path]
        assert len(values) == devices
        for digest, value in zip(copies, values, strict=True):
            digest.update(value.tobytes())
    (parameters,) = {digest.hexdigest() for digest in copies}
    first, last = (line["parameters_sha256"] for line in job.lines)
    assert last == parameters != first


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_rank_has_is_refused_with_the_reason(jobs: Jobs, case: str) -> None:
    graph, rule = REFUSED[case]
    with pytest.raises(JobFailed) as caught:
        jobs.run(overrides(2, graph))
    remedy = "use false, or strategy=dp, elastic_dp or single"
    assert f"train.parameters_sha256=true {rule}; {remedy}" in str(caught.value)
