"""Sums of gradients inside hosts first: the groups, the sum, and jobs that are one process'."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.distributed.cases import TOLERANCE, UNEVEN, Case, Run, hardware
from tests.distributed.equality import JobFailed, assert_equal
from tests.distributed.harness import run_ranks
from tests.distributed.served import Served
from tests.distributed.test_rehearse import LARGE, rehearsed
from tests.distributed.test_verify import Case as VerifyCase
from tests.distributed.test_verify import Sides
from torch import distributed as dist

from whale_train.rehearsal import Rehearsal
from whale_train.runtime.comms.hierarchical_sum import HierarchicalSum

HIERARCHICAL = "train.all_reduce=hierarchical"
SIZES = (0, 1, 2, 7, 8)  # those that two ranks of a host can share evenly, and others


def sum_of_two_hosts() -> HierarchicalSum:
    """The sum over two hosts of two ranks each."""
    inside = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    rank = dist.get_rank()
    return HierarchicalSum(inside[rank // 2], across[rank % 2])


def drawn(rank: int) -> Iterator[torch.Tensor]:
    for size in SIZES:
        draw = torch.Generator().manual_seed(100 * rank + size)
        yield torch.randn(size, generator=draw)


def summed() -> list[list[float]]:
    """Tensors of several sizes, begun together."""
    in_levels = sum_of_two_hosts()
    assert in_levels.size == 4
    begun = [(tensor, in_levels.begin(tensor)) for tensor in drawn(dist.get_rank())]
    for tensor, future in begun:
        assert future.wait() is tensor
    return [tensor.tolist() for tensor, _ in begun]


def test_the_sum_is_of_all_ranks() -> None:
    expected = [sum(x).tolist() for x in zip(*map(drawn, range(4)), strict=True)]  # type: ignore[arg-type]
    results = run_ranks(summed, 4)
    for found in results:
        assert found == results[0]  # to the bit: every rank has the same
        for mine, wanted in zip(found, expected, strict=True):
            assert mine == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def raises() -> str:
    """An error of a sum, which a thread carries out, at the caller's wait."""
    in_levels = sum_of_two_hosts()
    begun = in_levels.begin(torch.zeros(4, dtype=torch.complex64, requires_grad=True))
    try:
        begun.wait()
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_error_is_raised_where_the_sum_is_waited_for() -> None:
    assert all(run_ranks(raises, 4))


# Two hosts of two devices of unlike speed: uneven shares, one backward; a backbone whose gradients
# are summed when they are final.
CASES = [
    Case("gpt", "dp", 4, "adamw", UNEVEN, (HIERARCHICAL,)),
    Case("image_classifier", "dp", 4, "momentum", UNEVEN, (HIERARCHICAL,)),
    Case("gpt", "hybrid_split_dp", 4, "momentum", UNEVEN, (HIERARCHICAL, "train.accumulate=2")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_job_is_one_process(run: Run, case: Case) -> None:
    extra = tuple(x for x in case.extra if x != HIERARCHICAL)
    single = Case(case.model, "single", 1, case.optimizer, (), extra)
    assert_equal(run(case), run(single), TOLERANCE)


def test_one_host_has_no_levels(run: Run) -> None:
    with pytest.raises(JobFailed) as failure:
        run(Case("gpt", "dp", 2, "sgd", (), (HIERARCHICAL,)))
    rule = "has no sum to be of effect on: it needs replicas without ZeRO on several hosts, "
    rule += "equally many on each, and more than one; use train.all_reduce=auto"
    assert f"{HIERARCHICAL} {rule}" in str(failure.value)


def test_sixteen_bits_are_sent_as_flat_copies_send_them(sides: Sides) -> None:
    asked = ("train.reduce_dtype=bf16", HIERARCHICAL)
    case = VerifyCase("gpt", "dp", "adamw", hardware(4, UNEVEN), ("train.precision=bf16",))
    found = sides.verify(replace(case, only_plan=asked))
    assert found.equal, found.to_json()


def test_the_network_carries_a_part_for_each_rank(served: Served) -> None:
    """A rehearsal on two hosts of eight GPUs: what a rank asks of each level, and its memory."""
    traffic = {}
    for asked in ("flat", "hierarchical"):
        more = [*LARGE, "hardware=v100_p100_mix", "strategy=dp", f"train.all_reduce={asked}"]
        said = Rehearsal.from_json(served.ask(rehearsed, overrides=more))
        assert said.is_clean
        for rank in said.kinds:
            assert rank.peak == pytest.approx(rank.planned, rel=0.1)
        traffic[asked] = said.kinds[0].traffic
    whole = max(x.num_bytes for x in traffic["flat"] if x.group == "world")
    levels = [x for x in traffic["hierarchical"] if ".data_parallel." in x.group]
    assert {f"{x.group.rpartition('.')[2]} {x.kind}": x.num_bytes for x in levels} == {
        "inside reduce-scatter": pytest.approx(whole, rel=1e-5),
        "across all-reduce": pytest.approx(whole / 8, rel=1e-3),
        "inside all-gather": pytest.approx(whole, rel=1e-5),
    }
