"""Every schedule over messages as NCCL carries them computes what one device would, where its
micro-batches are of unlike sizes."""

from pathlib import Path

import pytest
from tests.distributed.cases import TOLERANCE, hardware
from tests.distributed.equality import Computed, Jobs, assert_equal
from tests.distributed.fifo import run_fifo_job
from tests.distributed.served import Served
from tests.distributed.test_parallel_strategies import MODELS, pipeline, write_arrays
from tests.pairs import some

ONE, TWO = "{stage: {}}", "{split: {degree: 2}}"
# Of 8 samples three micro-batches have 3, 3 and 2, five 2, 2, 2, 1 and 1.
CASES = {
    "interleaved_1f1b": (2, pipeline(2, "interleaved_1f1b", 5)),
    "widths_2_1_1": (4, pipeline(f"[{{replicate: {{degree: 2}}}}, {ONE}, {ONE}]", "gpipe", 5)),
    "split_2_1": (3, pipeline(f"[{TWO}, {ONE}]", "zero_bubble", 3)),
    "several_values": (4, pipeline(4, "1f1b", 5)),
    "gpipe": (4, pipeline(4, "gpipe", 5)),
    "zero_bubble": (3, pipeline(3, "zero_bubble", 5)),
    "widths_1_2": (3, pipeline(f"[{ONE}, {{replicate: {{degree: 2}}}}]", "1f1b", 5)),
    "copies": (4, f"{{replicate: {{of: {pipeline(2, '1f1b', 3)}}}}}"),
}


@pytest.mark.parametrize("name", some(CASES, ["interleaved_1f1b", "several_values"]))
def test_equals_one_device(name: str, jobs: Jobs, served: Served, tmp_path: Path) -> None:
    write_arrays(tmp_path)
    model = "t5" if name == "several_values" else "gpt"
    devices, graph = CASES[name]
    common = [
        *MODELS[model][1],
        *("data=arrays", f"data.path={tmp_path / 'tokens'}.npz", "data.shuffle=false"),
        *("optimizer=sgd", "optimizer.lr=0.5", "train.steps=3", "train.global_batch=8"),
    ]
    if name == "interleaved_1f1b":
        common += ["train.evaluate_every=2", "data.evaluation_fraction=0.5"]
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    overrides = [*common, f"strategy.graph={graph}", *hardware(devices, ())]
    said = served.ask(run_fifo_job, overrides=overrides, run_dir=str(run_dir))
    assert not said, said
    alone = jobs.run([*common, "strategy=single", *hardware(1, ())])
    assert_equal(Computed.read(run_dir), alone, TOLERANCE)
