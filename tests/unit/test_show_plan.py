"""The plan's view holds the plan's facts, at every width and in every encoding."""

import io
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from whale_train.launcher.ui.show_plan import banner_emulated, plan_view
from whale_train.launcher.ui.terminal import open_console
from whale_train.strategies.graph.operation_graph import ModelProfile, Parameter
from whale_train.strategies.hardware.cluster import Cluster, Device, Link, Node
from whale_train.strategies.plan.plan import (
    Decision,
    MemoryEstimate,
    Plan,
    Prediction,
    RankPlan,
    TaskGraph,
)

GOLDEN = Path(__file__).parents[1] / "golden"
REGENERATE = "REGENERATE_GOLDEN=1 python -m pytest tests/unit/test_show_plan.py"

FAST = Device("fast_32gb", {"fp32": 2e13}, 32e9, 1e12)
SLOW = Device("slow_16gb", {"fp32": 1e13}, 16e9, 5e11)
LINK = Link("link", 1e11, 1e-6)
NETWORK = Link("network", 1e10, 1e-5)
MIXED = Cluster("mixed", (Node((FAST,) * 8, LINK), Node((SLOW,) * 8, LINK)), NETWORK)

PROFILE = ModelProfile(
    name="class_head",
    parameters=(
        Parameter("features.0.weight", (1000, 200), aliases=("features.tied",)),
        Parameter("head.weight", (100_000, 512)),
        Parameter("head.bias", (100_000,)),
    ),
    inputs=(),
    forward_flops=1e8,
    activation_bytes=1e4,
)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich reads these whatever console it is given."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)


def memory(activations: float) -> MemoryEstimate:
    return MemoryEstimate(3e8, 3e8, 6e8, activations, 1e8)


def mixed_plan() -> Plan:
    """A backbone copied unevenly over 8 fast and 8 slow devices, a head split over them all."""
    starts = [6250 * rank for rank in range(16)]
    cut = tuple((start, start + 6250) for start in starts)
    backbone = TaskGraph(
        id=0,
        name="backbone",
        primitive="replicate",
        path="graph[0].replicate",
        modules=("features.0", "features.1", "features.2"),
        parameters=("features.0.weight", "features.tied"),
        flops=1e6,
        zero=1,
        offload={"optimizer": "cpu", "parameters": "none"},
        replicas=tuple((rank,) for rank in range(16)),
        shares=(12,) * 8 + (4,) * 8,
    )
    head = TaskGraph(
        id=1,
        name="head",
        primitive="split",
        path="graph[1].split",
        modules=("head",),
        parameters=("head.weight", "head.bias"),
        flops=1e8,
        zero=0,
        offload={"optimizer": "none", "parameters": "none"},
        replicas=(tuple(range(16)),),
        shares=(128,),
        shards={"head.weight": cut, "head.bias": cut},
        shard_dims={"head.weight": 0, "head.bias": 0},
    )
    ranks = tuple(
        RankPlan(
            rank=rank,
            node=rank // 8,
            device=MIXED.devices[rank].name,
            task_graphs=(0, 1),
            micro_batch_size=6 if rank < 8 else 2,
            micro_batches=2,
            memory_bytes=memory(9e9 if rank < 8 else 13.5e9),
            deepspeed={},
        )
        for rank in range(16)
    )
    return Plan(
        cluster="mixed",
        world_size=16,
        global_batch=128,
        precision="fp16",
        task_graphs=(backbone, head),
        groups={},
        schedule="1f1b",
        ranks=ranks,
        predicted=Prediction(0.132, 969.7, 0.0981, 0.025, 0.0049, 0.004),
        decisions=(
            Decision("strategy.graph[0].replicate.degree", "16", "8", "no device is left idle"),
            Decision("strategy.graph[1].split.dim", "vocabulary", "", "its largest dimension"),
        ),
    )


def test_decisions_on_equal_blocks_are_one() -> None:
    kept = [
        Decision(f"strategy.graph.split h.{n}.{name}", "whole", "sharded", "no pattern fits it")
        for n in range(12)
        for name in ("attn", "mlp")
    ]
    other = Decision("strategy.graph.split h.3.norm", "whole", "sharded", "no pattern fits it")
    stages = [
        Decision(f"strategy.graph.pipeline.stages[{n}].stage.recompute", "none", "full", "they fit")
        for n in (0, 1, 2, 4)
    ]
    plan = replace(mixed_plan(), decisions=(*kept, other, *stages))
    text = rendered(plan_view(plan, MIXED, PROFILE, "folded"), 120)
    lines = [line.strip() for line in text.splitlines() if "no pattern" in line]
    said = ": whole (instead of sharded): no pattern fits it"
    assert lines == [
        f"- strategy.graph.split h.0-11.attn{said}",
        f"- strategy.graph.split h.0-11.mlp{said}",
        f"- strategy.graph.split h.3.norm{said}",
    ]
    assert "- strategy.graph.pipeline.stages[0-2, 4].stage.recompute: none (instead" in text


def copied_plan(num_nodes: int, activations: list[float]) -> tuple[Plan, Cluster]:
    """One replicate TaskGraph over nodes of 8; the rank's activations cycle through the list."""
    cluster = Cluster("big", (Node((FAST,) * 8, LINK),) * num_nodes, NETWORK)
    count = 8 * num_nodes
    plan = mixed_plan()
    whole = replace(
        plan.task_graphs[0],
        replicas=tuple((rank,) for rank in range(count)),
        shares=(3,) * count,
    )
    ranks = tuple(
        replace(
            plan.ranks[0],
            rank=rank,
            node=rank // 8,
            memory_bytes=memory(activations[rank % len(activations)]),
        )
        for rank in range(count)
    )
    return replace(plan, world_size=count, task_graphs=(whole,), ranks=ranks), cluster


def rendered(
    body: RenderableType, width: int, encoding: str = "utf-8", terminal: bool = False
) -> str:
    """What reaches a stream of this encoding; an unencodable character raises."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    console = Console(
        file=stream,
        width=width,
        force_terminal=terminal,
        color_system="standard" if terminal else None,
    )
    console.print(body)
    return raw.getvalue().decode(encoding)


def words(text: str) -> str:
    """`text` with every break undone and no colours: where lines break does not matter."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|│", " ", text).split())


def view(width: int, encoding: str = "utf-8", terminal: bool = False) -> str:
    title = "class_head  hybrid_split_dp  mixed"
    return rendered(plan_view(mixed_plan(), MIXED, PROFILE, title), width, encoding, terminal)


def line_of(text: str, start: str) -> list[str]:
    """The words of the one line that starts so."""
    found = [line.split() for line in text.splitlines() if line.strip().startswith(start)]
    assert len(found) == 1, text
    return found[0]


@pytest.mark.parametrize("width", [50, 60, 80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_every_line_fits_and_ends_where_its_text_does(width: int, encoding: str) -> None:
    lines = view(width, encoding).splitlines()
    assert max(map(cell_len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("width", [50, 80, 120])
def test_the_facts_are_there_at_every_width(width: int) -> None:
    text = words(view(width))
    for fact in (
        "class_head hybrid_split_dp mixed",
        "16 on 2 nodes",
        "128 samples a step, fp16, schedule 1f1b",
        "132 ms a step, 970 samples/s",
        "compute 98.1 ms, communication 25.0 ms, optimizer 4.90 ms",
        "replicate backbone graph[0].replicate",
        "features.0-2",
        # 1000 x 200 once, though it is listed under both of its names; 4 bytes each.
        "200 k (800 kB), ZeRO 1, optimizer on cpu",
        "8 x 12 + 8 x 4 samples",
        "split head graph[1].split",
        # 100,000 x 512 weights and 100,000 biases
        "51.3 M (205 MB), ZeRO 0",
        "1 x 128 samples, each over 16 ranks",
        "16 x 6,250 of 100,000, dim 0: 2 parameters such as head.weight",
        "graph[0].replicate.degree: 16 (instead of 8): no device is left idle",
        "graph[1].split.dim: vocabulary: its largest dimension",
    ):
        assert fact in text, view(width)


def test_identical_ranks_are_one_row_of_a_wide_table() -> None:
    text = view(120)
    # 10.3 of 32 GB is 32%, of which 9.0 are activations; 14.8 of 16 is 92%, 13.5 of them.
    fast, slow = line_of(text, "0-7"), line_of(text, "8-15")
    assert fast[:8] == ["0-7", "0", "fast_32gb", "12", "2", "x", "6", "10.3"]
    assert fast[-3:] == ["32%", "activations", "87%"]
    assert slow[:8] == ["8-15", "1", "slow_16gb", "4", "2", "x", "2", "14.8"]
    assert slow[-3:] == ["92%", "activations", "91%"]
    assert fast[11].count("█") == 5
    assert slow[11].count("█") == 15
    assert cell_len(fast[11]) == cell_len(slow[11]) == 16


def test_a_narrow_table_has_two_lines_a_row() -> None:
    text = view(50)
    assert line_of(text, "0-7") == ["0-7", "fast_32gb", "12", "10.3", "/", "32.0", "GB"]
    assert line_of(text, "8-15") == ["8-15", "slow_16gb", "4", "14.8", "/", "16.0", "GB"]
    assert text.count("activations") == 2


def test_the_view_at_80_columns() -> None:
    path = GOLDEN / "plan_view_80.txt"
    text = view(80)
    if os.environ.get("REGENERATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    golden = path.read_text(encoding="utf-8") if path.exists() else ""
    assert text == golden, f"if the new view is right: {REGENERATE}"


def test_no_colour_and_all_bars_in_a_file() -> None:
    assert "\x1b" not in view(120)
    assert "\x1b[" in view(120, terminal=True)
    assert view(120).count("█") == 20


def test_ascii_has_the_same_shape() -> None:
    carried, plain = view(80).splitlines(), view(80, "ascii").splitlines()
    assert len(carried) == len(plain)
    assert [cell_len(line) for line in carried] == [len(line) for line in plain]
    assert "\n".join(plain).count("#") == "\n".join(carried).count("█") > 0


def test_a_name_ascii_cannot_carry_does_not_end_the_view() -> None:
    body = plan_view(mixed_plan(), MIXED, PROFILE, "modèle [bold] :car:")
    assert "modèle [bold] :car:" in rendered(body, 80)
    assert "mod?le [bold] :car:" in rendered(body, 80, "ascii")


def test_an_overfull_device_is_said() -> None:
    plan = mixed_plan()
    ranks = (replace(plan.ranks[0], memory_bytes=memory(38.7e9)), *plan.ranks[1:])
    text = rendered(plan_view(replace(plan, ranks=ranks), MIXED, PROFILE, ""), 120)
    assert "125%" in line_of(text, "0 ")
    assert "over its memory" in text
    assert "over its memory" not in view(120)


def test_ten_thousand_equal_ranks_are_one_row() -> None:
    plan, cluster = copied_plan(1250, [9e9])
    text = rendered(plan_view(plan, cluster, PROFILE, ""), 120)
    assert line_of(text, "0-9999")[1] == "0-1249"
    assert "10,000 on 1,250 nodes" in text
    assert "10,000 x 3 samples" in text
    assert len(text.splitlines()) < 24


def test_ten_thousand_alternating_ranks_are_two_rows() -> None:
    plan, cluster = copied_plan(1250, [9e9, 1e9])
    text = rendered(plan_view(plan, cluster, PROFILE, ""), 120)
    assert text.count("(5,000 in all)") == 2


def test_more_kinds_of_rank_than_anyone_reads_are_counted() -> None:
    plan, cluster = copied_plan(25, [1e8 * (rank + 2) for rank in range(100)])
    text = rendered(plan_view(plan, cluster, PROFILE, ""), 120)
    assert "and 36 more kinds of rank: see plan.json" in text


def test_many_different_shares_are_a_range() -> None:
    plan = mixed_plan()
    uneven = replace(plan.task_graphs[0], shares=tuple(range(1, 17)))
    plan = replace(plan, task_graphs=(uneven, plan.task_graphs[1]))
    assert "16 x 1-16 samples" in rendered(plan_view(plan, MIXED, PROFILE, ""), 120)


def test_copies_of_different_widths() -> None:
    plan = mixed_plan()
    mixed_widths = replace(
        plan.task_graphs[0], replicas=((0, 1), (2, 3), (4,)), shares=(56, 56, 16)
    )
    plan = replace(plan, task_graphs=(mixed_widths,))
    text = rendered(plan_view(plan, MIXED, PROFILE, ""), 120)
    assert "2 x 56 samples, each over 2 ranks, 1 x 16 samples" in text


def test_parameters_cut_in_many_ways_are_counted() -> None:
    plan = mixed_plan()
    shards: dict[str, tuple[tuple[int, int], ...]]
    shards = {f"w{i}": ((0, i), (i, 2 * i)) for i in range(1, 8)}
    head = replace(plan.task_graphs[1], shards=shards, shard_dims=dict.fromkeys(shards, 1))
    text = rendered(plan_view(replace(plan, task_graphs=(head,)), MIXED, PROFILE, ""), 120)
    assert "2 x 4 of 8, dim 1: w4" in text
    assert "w5" not in text
    assert "and 3 more parameters" in text


def test_emulation_is_a_panel_on_a_terminal_and_a_line_elsewhere() -> None:
    banner = banner_emulated(16, inventory="mixed")
    panel = words(rendered(banner, 80, terminal=True))
    assert "16 devices of mixed emulated as 16 CPU processes over gloo on this machine" in panel
    assert "Results are real training; speeds are not those devices'." in panel
    across = rendered(banner_emulated(16, "mixed", hosts=2), 120)
    assert "16 devices of mixed as CPU processes over gloo on 2 hosts: real training" in across
    line = rendered(banner, 120)
    assert line.count("\n") == 1
    assert line.startswith("emulated: 16 devices of mixed as CPU processes over gloo")
    assert "not their speeds" in line


def test_emulated_ratios_are_named() -> None:
    banner = banner_emulated(2, paces=(1.5, 3.0))
    panel = words(rendered(banner, 50, terminal=True))
    assert "but keep their proportions (the fastest has 1/1.5 of a processor)" in panel
    assert "only relative speeds" in rendered(banner, 120)
    linked = banner_emulated(2, slow_links=True)
    panel = words(rendered(linked, 50, terminal=True))
    assert "speeds are not those devices', but links keep their proportions (the fastest" in panel
    assert "only" not in rendered(linked, 120)
    assert "relative link speeds" in rendered(linked, 120)
    both = banner_emulated(16, "v100_p100_mix", paces=(1.5, 3.0), slow_links=True)
    panel = words(rendered(both, 50, terminal=True))
    assert "of a processor), and so do links (the fastest has all that gloo moves here)" in panel
    line = rendered(both, 120)
    assert line.count("\n") == 1
    assert "all speeds relative" in line


def test_without_a_terminal_the_width_is_120(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = open_console(io.StringIO())
    assert console.width == 120
    assert not console.is_interactive
