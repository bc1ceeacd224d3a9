"""Trace a ring attention: when messages travel, and which of that time products run beside them.

python benchmarks/ring_trace.py --ranks 4

Each rank notes when a message of keys and values (or of their gradients) begins and when it has
arrived, when an attention to a block begins and ends, and for how long the rank waits for a
message. A message's end is noted by the thread that carries it.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch import distributed as dist

from whale_train.runtime.comms.layout_collectives import ShardGroup
from whale_train.runtime.comms.positions import Rotation
from whale_train.runtime.comms.process_groups import join, leave
from whale_train.runtime.kernels import ring_attention as ring

Spans = list[tuple[float, float]]
HEADS, WIDTH = 4, 64


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.formatter_class = words
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    context = get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="whale-bench-") as folder,
        context.Pool(options.ranks) as pool,
    ):
        args = (options.ranks, options.sequence, options.rounds, Path(folder))
        rows = pool.starmap(traced, [(rank, *args) for rank in range(options.ranks)], 1)
    table = Table(title=f"a ring of {options.ranks}, {options.sequence:,} tokens, both directions")
    for column in ("rank", "products", "messages travel", "beside products", "waits"):
        table.add_column(column, justify="right")
    for rank, (products, travel, beside, waits) in enumerate(rows):
        seconds = (f"{1e3 * x:.1f} ms" for x in (products, travel))
        table.add_row(str(rank), *seconds, f"{beside / travel:.0%}", f"{1e3 * waits:.1f} ms")
    Console(width=100).print(table)


def traced(
    rank: int, ranks: int, sequence: int, rounds: int, folder: Path
) -> tuple[float, float, float, float]:
    """Return a rank's seconds of a forward and a backward, as medians of `rounds`: of products, of
    messages on their way, of messages on their way while products run, and of waiting."""
    torch.set_num_threads(1)
    join(f"file://{folder}/met", rank, ranks, torch.device("cpu"))
    group = dist.group.WORLD
    assert group is not None
    shards = ShardGroup(group, (sequence // ranks,) * ranks, rank)
    results = []
    for _ in range(rounds + 1):  # the first does not count
        query, key, value = (
            torch.randn(1, HEADS, sequence // ranks, WIDTH, requires_grad=True) for _ in range(3)
        )
        dist.barrier()
        products: Spans = []
        messages: Spans = []
        waits: Spans = []
        with watching(products, messages, waits):
            mixed = ring.ring_attention(query, key, value, None, shards, shards, True, None)
            mixed.sum().backward()  # type: ignore[no-untyped-call]
        beside = sum(common(x, y) for x in messages for y in products)
        results.append((total(products), total(messages), beside, total(waits)))
    leave()
    medians = [median(column) for column in zip(*results[1:], strict=True)]
    return medians[0], medians[1], medians[2], medians[3]


@contextmanager
def watching(products: Spans, messages: Spans, waits: Spans) -> Iterator[None]:
    """Note the spans of products, messages and waits of ring attentions inside the context."""

    def noted(function: Callable[..., Any], spans: Spans) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            result = function(*args, **kwargs)
            spans.append((start, perf_counter()))
            return result

        return run

    begin = Rotation.begin

    def begun(self: Rotation, block: Tensor, step: int) -> tuple[Tensor, Any]:
        start = perf_counter()
        received, work = begin(self, block, step)
        assert work is not None
        work.get_future().then(lambda _: messages.append((start, perf_counter())))
        return received, work

    names = {"attend": products, "gradients": products, "_arrived": waits}
    before = {name: getattr(ring, name) for name in names}
    Rotation.begin = begun  # type: ignore[method-assign]
    for name, spans in names.items():
        setattr(ring, name, noted(before[name], spans))
    try:
        yield
    finally:
        Rotation.begin = begin  # type: ignore[method-assign]
        for name, function in before.items():
            setattr(ring, name, function)


def total(spans: Spans) -> float:
    """Return the seconds of all spans together."""
    return sum(stop - start for start, stop in spans)


def common(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Return the seconds that lie in both spans."""
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


if __name__ == "__main__":
    main()
