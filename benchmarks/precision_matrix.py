"""Verify each 16-bit precision under each strategy, for six architectures, against one process.

python benchmarks/precision_matrix.py --models llama t5 --precisions bf16

Each cell is a verification (`mode=verify`) against the same model in the same precision on one
process. The tolerances are those of `launcher/modes/compare_runs.py`: 3e-2 of the largest element
in bf16, which rounds to 2^-9 = 2e-3 in every operation, and an eighth of that in fp16, which has
three more bits. `tests/distributed/precisions.py` has further bounds on the elements of gradients
and updates. The exit status is 1 if a cell crashed or differs.
"""

import argparse
import sys
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.distributed.precisions import ARCHITECTURES, PRECISIONS, STRATEGIES, Cell, outcome
from tests.distributed.served import Served
from tests.distributed.test_parallel_strategies import write_arrays
from tests.distributed.test_verify import Sides


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--models", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    options = parser.parse_args()
    columns = ("model", "strategy", "precision", "loss", "gradient norm", "tolerance")
    table = Table(*columns, "elements, in tolerances", "allowed", "verdict")
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="whale-precisions-") as name:
        folder = Path(name)
        write_arrays(folder)
        served = Served()
        sides = Sides(folder, served)
        for model, precision, strategy in product(
            options.models, options.precisions, options.strategies
        ):
            compared = outcome(sides, Cell(model, strategy, precision, folder))
            verdicts[compared.verdict] += 1
            figures = (f"{x:.1e}" for x in (compared.loss, compared.norm, compared.tolerance))
            parts = (f"{x:.2f}" for x in (compared.elements, compared.allowed))
            said = f"{compared.verdict} {compared.said}".strip()
            table.add_row(model, strategy, precision, *figures, *parts, said)
            print(model, strategy, precision, said, file=sys.stderr, flush=True)
        served.close()
    Console(width=160).print(table)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    if verdicts["crashed"] or verdicts["different"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
