"""The time of one step: its simulated tasks, its breakdown, and its timeline."""

from collections.abc import Mapping
from dataclasses import dataclass

from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.plan.plan import Prediction
from whale_train.strategies.simulate.chrome_trace import Event, events_of
from whale_train.strategies.simulate.simulator import RankTime, Spans, rank_times, simulate
from whale_train.strategies.simulate.tasks import Step, floor_s, tasks_of


@dataclass(frozen=True)
class Simulated:
    """A simulated step.

    spans: the tasks, with their start and end times.
    stands: the simulated rank that stands for every rank.
    global_batch: the samples of the step.
    floor_s: a lower bound on the step from computation alone, in seconds.
    """

    spans: Spans
    stands: Mapping[int, int]
    global_batch: int
    floor_s: float

    def prediction(self) -> Prediction:
        """Return the step's time and its breakdown on the busiest rank: the one whose computation
        and update take longest."""
        seconds = self.spans.seconds
        assert seconds >= self.floor_s * (1 - 1e-9), (seconds, self.floor_s)
        busiest = _busiest(rank_times(self.spans))
        return Prediction(
            seconds,
            self.global_batch / seconds,
            busiest.compute_s,
            busiest.communication_s,
            busiest.optimizer_s,
            busiest.idle_s,
        )

    def events(self, devices: Mapping[int, str]) -> list[Event]:
        """Return the timeline of the step, in the format of a run's trace.

        devices: the name of the device of every shown rank.
        """
        stands = {rank: self.stands[rank] for rank in devices}
        return events_of(self.spans, stands, devices)


def simulated(
    step: Step, stands: Mapping[int, int], cluster: Cluster, global_batch: int
) -> Simulated:
    """Return `step`, simulated on the devices of `cluster`.

    `stands` maps every rank to a simulated one. Where all ranks share processors, the simulated
    ranks get a part of them in proportion to their number.
    """
    part = len(set(stands.values())) / len(stands)
    spans = simulate(tasks_of(step), cluster.processors * part)
    return Simulated(spans, stands, global_batch, floor_s(step))


def _busiest(times: Mapping[int, RankTime]) -> RankTime:
    return max(times.values(), key=lambda time: time.compute_s + time.optimizer_s)
