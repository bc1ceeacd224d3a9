"""A sweep's table: what differed, what came of it, who was fastest."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from whale_train.launcher.ui.sweep_table import SweepRow, sweep_table

SWEEP = Path("multirun/2026-01-01/12-00-00")
ROWS = (
    SweepRow(
        overrides=("strategy=dp", "train.steps=100", "optimizer.lr=1e-3"),
        status="done",
        final_loss=2.3412,
        samples_per_s=812.3,
        step_time_s=0.0197,
        predicted_step_time_s=0.0182,
        peak_memory_bytes=1.2e9,
        run_dir=SWEEP / "0",
    ),
    SweepRow(
        overrides=("strategy=hybrid_split_dp", "train.steps=100", "optimizer.lr=1e-3"),
        status="done",
        final_loss=2.3411,
        samples_per_s=2412.3,
        step_time_s=0.0067,
        predicted_step_time_s=0.0061,
        peak_memory_bytes=9e8,
        run_dir=SWEEP / "1",
    ),
    SweepRow(
        overrides=("strategy=hybrid_split_dp", "train.steps=100", "optimizer.lr=1e-2"),
        status="failed (1)",
        final_loss=None,
        samples_per_s=9999.0,
        step_time_s=None,
        predicted_step_time_s=None,
        peak_memory_bytes=None,
        run_dir=SWEEP / "2",
    ),
)


def rendered(rows: tuple[SweepRow, ...], width: int, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    Console(file=stream, width=width, force_terminal=False).print(sweep_table(rows, width))
    return raw.getvalue().decode(encoding)


def test_one_line_a_run_where_it_fits() -> None:
    lines = [" ".join(line.split()) for line in rendered(ROWS, 120).splitlines()]
    assert lines == [
        "run strategy optimizer.lr status loss samples/s step predicted memory",
        "0 dp 1e-3 done 2.3412 812 19.7 ms 18.2 ms 1.20 GB",
        "1 hybrid_split_dp 1e-3 done, fastest 2.3411 2,412 6.70 ms 6.10 ms 900 MB",
        "2 hybrid_split_dp 1e-2 failed (1) 9,999",
        f"runs are in {SWEEP}",
    ]


@pytest.mark.parametrize("width", [50, 80, 120])
def test_every_number_is_there_at_every_width(width: int) -> None:
    text = rendered(ROWS, width)
    assert max(len(line) for line in text.splitlines()) <= width
    for fact in ("hybrid_split_dp", "1e-2", "2.3411", "2,412", "6.70 ms", "6.10 ms", "900 MB"):
        assert text.count(fact) >= 1, text
    for fact in ("fastest", "failed (1)", "19.7 ms", "18.2 ms", "1.20 GB", str(SWEEP)):
        assert text.count(fact) == 1, text


@pytest.mark.parametrize("width", [50, 80, 120])
def test_what_all_runs_share_is_left_out(width: int) -> None:
    assert "train.steps" not in rendered(ROWS, width)


def test_a_failed_run_is_not_the_fastest() -> None:
    marked = [line for line in rendered(ROWS, 120).splitlines() if "fastest" in line]
    assert len(marked) == 1
    assert "2,412" in marked[0]


def test_nobody_is_fastest_alone_or_when_all_failed() -> None:
    assert "fastest" not in rendered(ROWS[:1], 120)
    assert "fastest" not in rendered((ROWS[2], replace(ROWS[2], run_dir=SWEEP / "3")), 120)


def test_an_override_only_one_run_has_is_a_column() -> None:
    added = replace(ROWS[0], overrides=(*ROWS[0].overrides, "+model.depth=3", "~train.grad_clip"))
    header, first, second, *_ = rendered((ROWS[0], added), 150).splitlines()
    assert "model.depth" in header
    assert "train.grad_clip" in header
    assert "removed" not in first
    assert second.split()[1:3] == ["3", "removed"]


def test_run_directories_of_several_sweeps_are_named_whole() -> None:
    moved = replace(ROWS[1], run_dir=Path("elsewhere/1"))
    text = rendered((ROWS[0], moved), 150)
    assert f"{SWEEP}/0" in text
    assert "elsewhere/1" in text


def test_lists_in_overrides_are_not_markup_and_ascii_carries_it() -> None:
    listed = replace(ROWS[0], overrides=("model.layers=[red]", "model.name=modèle"))
    text = rendered((listed, ROWS[1]), 150, "ascii")
    assert "[red]" in text
    assert "mod?le" in text
