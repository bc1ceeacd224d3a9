"""The time of one step: its tasks simulated, and the parts that make it up."""

from collections.abc import Mapping

from whale_train.strategies.cluster import Cluster
from whale_train.strategies.plan import Prediction
from whale_train.strategies.simulator import RankTime, Spans, rank_times, simulate
from whale_train.strategies.step_tasks import Step, tasks_of


def simulated(step: Step, cluster: Cluster) -> Spans:
    """When each task of `step` begins and ends on the devices of `cluster`."""
    return simulate(tasks_of(step), cluster.processors)


def prediction(spans: Spans, global_batch: int, floor_s: float) -> Prediction:
    """The step's time, and where that of its busiest rank goes. `floor_s` is the least that the
    devices need to compute it, which no step can be under."""
    seconds = spans.seconds
    assert seconds >= floor_s * (1 - 1e-9), (seconds, floor_s)
    busiest = _busiest(rank_times(spans))
    return Prediction(
        seconds,
        global_batch / seconds,
        busiest.compute_s,
        busiest.communication_s,
        busiest.optimizer_s,
        busiest.idle_s,
    )


def _busiest(times: Mapping[int, RankTime]) -> RankTime:
    return max(times.values(), key=lambda time: time.compute_s + time.optimizer_s)
