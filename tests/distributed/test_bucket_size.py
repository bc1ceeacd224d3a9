"""How many gradients copies sum at once: the same training, in as many sums as asked for."""

import pytest
from tests.distributed.cases import TOLERANCE, Case, Run
from tests.distributed.equality import assert_equal
from tests.distributed.served import Served
from tests.distributed.test_rehearse import LARGE, rehearsed

from whale_train.rehearsal import Rehearsal

SMALL = "train.bucket_mb=0.02"


# One backward; a backbone whose gradients are summed when they are final; partitions.
@pytest.mark.parametrize("strategy", ["dp", "hybrid_split_dp", "zero2"])
def test_small_buckets_are_one_process(run: Run, strategy: str) -> None:
    single = run(Case("gpt", "single", 1, "momentum"))
    assert_equal(run(Case("gpt", strategy, 2, "momentum", (), (SMALL,))), single, TOLERANCE)


def test_as_many_sums_as_buckets_in_the_memory_that_is_planned(served: Served) -> None:
    """19.7 MB of gradients: one bucket by default, and more of a quarter of that."""
    counts = {}
    for megabytes in (25, 5):
        more = [*LARGE, "strategy=dp", f"train.bucket_mb={megabytes}"]
        said = Rehearsal.from_json(served.ask(rehearsed, overrides=more))
        assert said.is_clean
        for kind in said.kinds:
            assert kind.peak == pytest.approx(kind.planned, rel=0.1)
        traffic = said.kinds[0].traffic
        counts[megabytes] = sum(x.count for x in traffic if x.kind == "all-reduce")
    assert 3 <= counts[5] - counts[25] <= 5
