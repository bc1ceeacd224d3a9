"""Check that samples, losses, optimizers and metrics are right under every plan.

    python benchmarks/own_project/every_plan.py [--parts data optimizers metrics] [--markdown]

Every cell compares a run of the command, with a small model on CPU processes, with a plain torch
loop (`compared_runs.py`). The exit status is 1 if a cell is wrong. The script needs the extras hf
and metrics.

data: the largest relative difference of a loss, and the verdict of `mode=audit`.
optimizers: the largest relative differences of a loss and of a trained parameter (by the L2 norm),
    or the reason of a refusal (exit status 2) that names the class.
metrics: torchmetrics' values on an evaluation set, which must equal those for the plain model's
    predictions to the last digit.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from compared_runs import Rows, data, metrics, optimizers
from kinds import write_files

PARTS: dict[str, Callable[[], Rows]] = {
    "data": data,
    "optimizers": optimizers,
    "metrics": metrics,
}


def print_table(title: str, rows: Rows, markdown: bool) -> None:
    """Print a table, followed by the full text of every wrong cell."""
    columns = list(next(iter(rows.values())))
    lines = [[title, *columns]]
    for name, cells in rows.items():
        texts = (cells[x].text if cells[x].holds else "NO, see below" for x in columns)
        lines.append([name, *texts])
    if markdown:
        lines.insert(1, ["---"] * len(lines[0]))
        print("\n".join(f"| {' | '.join(line)} |" for line in lines), end="\n\n")
    else:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            padded = (text.ljust(width) for text, width in zip(line, widths, strict=True))
            print("  ".join(padded).rstrip())
        print()
    for name, cells in rows.items():
        for column, cell in cells.items():
            if not cell.holds:
                print(f"does not hold: {name}, {column}: {cell.text}\n")


def main() -> int:
    """Print the requested tables, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--markdown", action="store_true", help="tables as of a .md file")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}  # ranks share the cores
    torch.set_num_threads(1)
    holds = True
    with tempfile.TemporaryDirectory(prefix="whale-every-plan-") as name, chdir(name):
        shutil.copy(Path(__file__).resolve().parent / "my_code.py", name)
        write_files(Path(name))
        for part in options.parts:
            rows = PARTS[part]()
            print_table(part, rows, options.markdown)
            holds &= all(cell.holds for cells in rows.values() for cell in cells.values())
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
