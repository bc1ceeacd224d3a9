"""bf16 and fp16 under every kind of strategy are one process: cells of the product of
`benchmarks/precision_matrix.py` in which every value of each axis occurs, and every pair that ever
crashed."""

from pathlib import Path

import pytest
from tests.distributed.precisions import (
    ARCHITECTURES,
    PRECISIONS,
    STRATEGIES,
    Cell,
    outcome,
)
from tests.distributed.test_verify import Sides
from tests.pairs import some

CELLS = [
    ("gpt", "dp", "bf16"),
    ("gpt", "zero2", "fp16"),
    ("bert", "zero3", "fp16"),
    ("bert", "hybrid_split_dp", "bf16"),
    ("vit", "zero1", "bf16"),
    ("vit", "split", "fp16"),
    ("mixtral", "pipeline", "fp16"),
    ("mixtral_best_2", "split", "bf16"),
    # "expected m1 and m2 to have the same dtype": bf16 weights met casts that were exported in fp32
    ("llama", "split_zero3", "bf16"),
    ("mixtral", "split_zero1", "bf16"),
    ("t5", "zero1_pipeline", "bf16"),
]


# In a run of some of the tests: the pairs that crashed, and one in fp16.
SOME = (CELLS[1], *CELLS[-3:])


@pytest.mark.parametrize(("model", "strategy", "precision"), some(CELLS, SOME))
def test_a_plan_is_one_process(
    model: str, strategy: str, precision: str, sides: Sides, arrays: Path
) -> None:
    found = outcome(sides, Cell(model, strategy, precision, arrays))
    assert found.verdict == "equal", found
    assert 0 < found.loss < found.tolerance


def test_every_value_of_each_axis_is_there() -> None:
    models, strategies, both = (set(axis) for axis in zip(*CELLS, strict=True))
    assert models == set(ARCHITECTURES)
    assert strategies == set(STRATEGIES)
    assert both == set(PRECISIONS)


def test_what_differs_is_found(sides: Sides, arrays: Path) -> None:
    """A learning rate that is a tenth too large under the plan."""
    cell = Cell("gpt", "dp", "bf16", arrays, only_plan=("optimizer.lr=1.1e-3",))
    assert outcome(sides, cell).verdict == "different"
