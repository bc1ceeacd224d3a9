"""Speak to a Ray cluster: its nodes, a placement group, and an actor in each bundle of it.

No other file imports Ray. What is asked for, and what becomes of it, is decided elsewhere
(`bundles.py`, `run_on_ray.py`).
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from whale_train.errors import ConfigError, Fault, listed
from whale_train.extras import how_to_install
from whale_train.launcher.ranks.on_ray.bundles import (
    CPU,
    GPU,
    KIND_OF_RAY,
    Bundles,
    RayNode,
    resources_text,
)
from whale_train.launcher.ranks.on_ray.node_ranks import News, NodeRanks
from whale_train.launcher.ranks.run_dir import installed_version

LOST = 255  # the status of ranks whose actor has died
_POLL_S = 0.1
_ANSWER_S = 10.0
# Seconds in which Ray removes a group, after which its resources are free for another attempt.
_REMOVE_S = 20.0


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Be connected to a Ray cluster within the context.

    address: the cluster's address; None takes that of RAY_ADDRESS, or of the cluster that runs on
        this host.

    Raises ConfigError where Ray is not installed, or there is no such cluster.
    """
    if installed_version("ray") is None:
        raise ConfigError([Fault("launcher", "ray", "needs ray", how_to_install("ray"))])
    import ray

    # ray.init sets a handler of SIGTERM, which exits with the signal's number as the status, and
    # after ray.shutdown SIGTERM ends the process whatever handler Python knows.
    ours = signal.getsignal(signal.SIGTERM)
    named = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        _refuse_silent(named)
        ray.init(named, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        rule = f"reaches no Ray cluster ({reason})"
        remedy = "start one, as `ray start --head`, and give this command on one of its nodes, "
        remedy += "with RAY_AUTH_MODE=token if the cluster wants a token"
        raise ConfigError([Fault("launcher.address", named, rule, remedy)]) from None
    finally:
        _handle_sigterm(ours)
    try:
        yield
    finally:
        ray.shutdown()
        _handle_sigterm(ours)


def _handle_sigterm(handler: Any) -> None:
    """Set the handler of SIGTERM, in the main thread alone, where Python and Ray set handlers."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _refuse_silent(address: str) -> None:
    """Raise OSError where nothing answers at `address`, which Ray would try for minutes, and
    ValueError for an address of no form that Ray's own processes have."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "/" in host or not host or not port.isdecimal():
        raise ValueError("no HOST:PORT")
    socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()


def living_nodes() -> list[RayNode]:
    """Return the living nodes of the cluster that this process is connected to, in the order of
    their addresses and of what they offer: Ray's own order differs from call to call."""
    import ray

    nodes = [
        RayNode(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["NodeManagerHostname"],
            node["Resources"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.shown, node.id))


@dataclass(frozen=True)
class PlacedGroup:
    """A placement group whose resources are held.

    group: Ray's own object.
    asked: what the group was made of.
    nodes: the node of each bundle.
    """

    group: Any
    asked: Bundles
    nodes: tuple[RayNode, ...]


class RayActors:
    """An actor of `NodeRanks` in each bundle of a placement group. Creating it starts them."""

    def __init__(self, placed: PlacedGroup) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor_class = ray.remote(NodeRanks)
        self._actors = [
            actor_class.options(
                num_cpus=bundle.get(CPU, 0),
                num_gpus=bundle.get(GPU, 0),
                resources={
                    name: amount
                    for name, amount in bundle.items()
                    if name not in (CPU, GPU) and not name.startswith(KIND_OF_RAY)
                },
                scheduling_strategy=PlacementGroupSchedulingStrategy(placed.group, number),
            ).remote()
            for number, bundle in enumerate(placed.asked.resources)
        ]
        self._calls: list[Any] = [None] * len(self._actors)  # of `news`, and unanswered

    def all(self, method: str, given: Sequence[tuple[Any, ...]], poll: Callable[[], None]) -> Any:
        """Call a method of every actor, and return the list of what they return, in the order of
        bundles.

        An actor that fails or has died gives its error instead.

        given: the arguments for each actor.
        poll: called ten times a second; raises KeyboardInterrupt to stop the waiting.
        """
        import ray

        calls = [
            getattr(actor, method).remote(*arguments)
            for actor, arguments in zip(self._actors, given, strict=True)
        ]
        left = calls
        while left:
            poll()
            _, left = ray.wait(left, num_returns=len(left), timeout=_POLL_S)
        return [_answer(call) for call in calls]

    def news(self) -> list[News | None]:
        """Return the news of each bundle; None where its actor has not answered. The status is LOST
        where the actor has died."""
        import ray

        for number, actor in enumerate(self._actors):
            if self._calls[number] is None:
                self._calls[number] = actor.news.remote()
        count = len(self._calls)
        answered, _ = ray.wait(self._calls, num_returns=count, timeout=_POLL_S)
        heard: list[News | None] = [None] * count
        for number, call in enumerate(self._calls):
            if call in answered:
                answer, self._calls[number] = _answer(call), None
                heard[number] = answer if isinstance(answer, News) else News(b"", b"", LOST)
        return heard

    def end(self, leave_s: float) -> None:
        """Ask the ranks of all bundles to end, as `NodeRanks.end` does, and do not wait for it."""
        for actor in self._actors:
            actor.end.remote(leave_s)


@contextmanager
def placed(
    asked: Bundles, nodes: Sequence[RayNode], wait_s: float, poll: Callable[[], None]
) -> Iterator[PlacedGroup]:
    """Hold a placement group within the context, and yield it.

    nodes: the living nodes of the cluster.
    wait_s: seconds to wait for the resources.
    poll: called ten times a second; raises KeyboardInterrupt to stop the waiting.

    Raises ConfigError where the resources are not free within that time.
    """
    import ray
    from ray.util import placement_group, placement_group_table, remove_placement_group

    labels = [dict(x) for x in asked.labels] or None
    bundles = [dict(x) for x in asked.resources]
    group = placement_group(bundles, strategy=asked.strategy, bundle_label_selector=labels)
    try:
        deadline = time.monotonic() + wait_s
        while not group.wait(_POLL_S):
            poll()
            if time.monotonic() > deadline:
                rule = f"needs {asked.shown}, and the Ray cluster has not had that free within "
                free = resources_text(ray.available_resources())
                rule += f"{wait_s:g} s: {listed([node.shown for node in nodes], 8)}, and free are "
                rule += f"{free} of all"
                remedy = "add such nodes, end what holds them, or use the hardware that is there"
                raise ConfigError([Fault("launcher", "ray", rule, remedy)])
        ids = placement_group_table(group)["bundles_to_node_id"]
        by_id = {node.id: node for node in (*nodes, *living_nodes())}
        yield PlacedGroup(group, asked, tuple(by_id[ids[n]] for n in range(len(bundles))))
    finally:
        remove_placement_group(group)
        deadline = time.monotonic() + _REMOVE_S
        while placement_group_table(group)["state"] != "REMOVED" and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _answer(call: Any) -> Any:
    """Return the answer to a call, or the error of the call."""
    import ray

    try:
        return ray.get(call)
    except ray.exceptions.RayError as error:
        return error
