"""Show a rehearsal: a row for each kind of rank, then the traffic between ranks, then the
faults."""

from collections import Counter

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whale_train.quantities import fold_numbers, in_bytes, in_seconds
from whale_train.rehearsal import KindOfRank, Rehearsal

_MOST_FAULTS = 12


def rehearsal_view(rehearsal: Rehearsal) -> RenderableType:
    """Return the view of a whole rehearsal, which needs 60 columns."""
    memory = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    memory.add_column("ranks")
    memory.add_column("hold")
    for name in ("peak", "plan", "off by"):
        memory.add_column(name, justify="right", no_wrap=True)
    for kind in rehearsal.kinds:
        ranks = f"{fold_numbers(kind.ranks)} ({len(kind.ranks)})"
        held = ", ".join(kind.task_graphs)
        if kind.error:
            memory.add_row(ranks, held, "-", in_bytes(kind.planned), "-")
            continue
        off = kind.peak / kind.planned - 1 if kind.planned else 0.0
        memory.add_row(ranks, held, in_bytes(kind.peak), in_bytes(kind.planned), f"{off:+.1%}")
    lines: list[RenderableType] = [Text("rehearsed", style="bold"), memory, _traffic(rehearsal)]
    kernels: Counter[str] = Counter()
    for kind in rehearsal.kinds:
        kernels.update(kind.kernels)
    if kernels:
        said = ", ".join(f"{count} x {name}" for name, count in kernels.most_common())
        lines.append(Text(f"attention: {said}"))
    reads: Counter[str] = Counter()
    for kind in rehearsal.kinds:
        reads |= Counter(kind.reads)
    for place, count in reads.items():
        times = f"{count} times " if count > 1 else ""
        lines.append(Text(f"the model reads a value on the host {times}a step: {place}"))
    lines += wrong(rehearsal)
    return Group(*lines)


def _traffic(rehearsal: Rehearsal) -> RenderableType:
    """Return a table of the communication in one step, with a row for each kind of operation and
    group: the largest number of operations and of bytes on any rank."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("in a step, most of any rank", "of"):
        table.add_column(name)
    for name in ("count", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    most: dict[tuple[str, str], tuple[int, int]] = {}
    for kind in rehearsal.kinds:
        for traffic in kind.traffic:
            key = (traffic.group, traffic.kind)
            count, size = most.get(key, (0, 0))
            most[key] = (max(count, traffic.count), max(size, traffic.num_bytes))
    for (group, operation), (count, size) in sorted(most.items()):
        table.add_row(operation, group, f"{count:,}", in_bytes(size))
    return table


def wrong(rehearsal: Rehearsal) -> list[RenderableType]:
    """Return lines on the failures of ranks, then lines on the disagreements between ranks."""
    lines = [line for kind in rehearsal.kinds if kind.error for line in _failed(kind)]
    lines += [Text(fault, style="red") for fault in rehearsal.faults[:_MOST_FAULTS]]
    if len(rehearsal.faults) > _MOST_FAULTS:
        left = len(rehearsal.faults) - _MOST_FAULTS
        lines.append(Text(f"and {left} more of the kind, in rehearsal.json"))
    return list(lines)


def _failed(kind: KindOfRank) -> list[Text]:
    """Return two lines on a kind of rank that fails: the error, and the line of code that raised
    it."""
    ranks = f"rank{'s' if len(kind.ranks) > 1 else ''} {fold_numbers(kind.ranks)}"
    return [Text(f"{ranks}: {kind.error}", style="red"), Text(f"  {kind.place}")]


def verdict(rehearsal: Rehearsal) -> str:
    """Return one line that says whether a run would succeed."""
    ranks = sum(len(kind.ranks) for kind in rehearsal.kinds)
    kinds = len(rehearsal.kinds)
    of = f"{ranks:,} rank{'s' if ranks > 1 else ''} of {kinds} kind{'s' if kinds > 1 else ''}"
    took = f"rehearsed in {in_seconds(rehearsal.seconds)}"
    if rehearsal.is_clean:
        reads = any(kind.reads for kind in rehearsal.kinds)
        reading = "only the model reads values" if reads else "read nothing"
        return f"{of} run and agree; {reading} on the host; {took}"
    failed = sum(len(kind.ranks) for kind in rehearsal.kinds if kind.error)
    parts = [f"{failed:,} would fail"] if failed else []
    if rehearsal.faults:
        count = len(rehearsal.faults)
        parts.append(f"they disagree in {count} place{'s' if count > 1 else ''}")
    return f"of {of}, {' and '.join(parts)}; {took}"
