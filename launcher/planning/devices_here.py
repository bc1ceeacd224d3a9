"""Whether the devices of an inventory are here, and which card each rank is to open."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from whale_train.config import Request
from whale_train.errors import ConfigError, Fault
from whale_train.quantities import in_bytes
from whale_train.strategies.hardware.catalogue import DEVICES
from whale_train.strategies.hardware.cluster import Cluster, Device
from whale_train.strategies.hardware.gpu_facts import GpuFacts, is_catalogued
from whale_train.strategies.hardware.inventory import MachineFacts
from whale_train.strategies.plan.plan import Decision, Plan

_EMULATE = "use launcher=emulate"


def where(
    request: Request, cluster: Cluster, machine: MachineFacts
) -> tuple[Literal["cpu", "cuda"], bool]:
    """Return the kind of device that the ranks run on, and whether that stands for another one.

    Raises ConfigError where devices are wanted that are not here, or GPUs are here and are not the
    inventory's: to train on CPUs beside them has to be asked for.
    """
    kind, in_earnest = request.launcher.kind, request.mode == "train"
    if cluster.on_cpu:
        return "cpu", False
    if kind == "emulate" or (kind == "auto" and not machine.gpus):
        return "cpu", True
    faults = _not_here(cluster, machine)
    if not faults:
        return "cuda", False
    if in_earnest:
        raise ConfigError(faults)
    return "cpu", True


def seated(plan: Plan, used: Cluster, machine: MachineFacts) -> Plan:
    """Return the plan with the card that each rank opens, for devices `used` that are here."""
    cards = cards_of(used, machine)
    ranks = (replace(rank, uuid=card.uuid) for rank, card in zip(plan.ranks, cards, strict=True))
    return replace(plan, ranks=tuple(ranks))


def cards_of(used: Cluster, machine: MachineFacts) -> list[GpuFacts]:
    """Return the cards that the devices `used`, which are here, are."""
    found = _numbers_of(used.devices, machine.gpus)
    return [machine.cards[card] for card in found if card is not None]


def said_of_figures(used: Cluster) -> list[Decision]:
    """Return what the plan says of cards whose figures are those of their properties."""
    unknown = {device.name for device in used.devices if not device.kernels} - DEVICES.keys()
    return [
        Decision(
            "hardware",
            f"{name} by its properties",
            "",
            "the catalogue does not have it; mode=calibrate measures it",
        )
        for name in sorted(unknown)
    ]


def _numbers_of(wanted: Sequence[Device], have: Sequence[Device]) -> list[int | None]:
    """Return, for each device wanted, the number of a card that is one, each card once; None where
    there is none left."""
    left = list(enumerate(have))
    found: list[int | None] = []
    for device in wanted:
        card = next((card for card in left if _is(device, card[1])), None)
        found.append(None if card is None else card[0])
        if card is not None:
            left.remove(card)
    return found


def _is(wanted: Device, have: Device) -> bool:
    """Return whether a card is the device wanted: of its name, or of figures that an inventory
    gives a card which the catalogue does not have, if it has as much memory."""
    if wanted.name == have.name:
        return True
    is_own = wanted.name not in DEVICES and not is_catalogued(have)
    return is_own and have.memory_bytes >= wanted.memory_bytes


def _not_here(cluster: Cluster, machine: MachineFacts) -> list[Fault]:
    """Return, for each node of an inventory that this host is not, what it has instead."""
    name = cluster.name
    if not machine.gpus:
        rule = f"needs the devices of hardware={name}, and this machine has no GPU"
        return [Fault("launcher", "local", rule, f"{_EMULATE}, or hardware=local")]
    has = f"this host has {_listed(machine.gpus)}"
    if len(cluster.nodes) > 1:
        rule = f"has {len(cluster.nodes)} hosts, and {has}"
        return [Fault("hardware", name, rule, f"{_EMULATE}, or hardware=local")]
    (node,) = cluster.nodes
    cards = _numbers_of(node.devices, machine.gpus)
    missing = [device for device, card in zip(node.devices, cards, strict=True) if card is None]
    if not missing:
        return []
    rule = f"is {_listed(node.devices)}, and {has}"
    small = _smaller(missing[0], machine.gpus)
    if small is not None:
        need, there = in_bytes(missing[0].memory_bytes), in_bytes(small.memory_bytes)
        rule = f"has {missing[0].name} of {need}, and this host's {small.name} has {there}"
    return [Fault("hardware", name, rule, f"{_EMULATE}, or hardware=local")]


def _smaller(wanted: Device, have: Iterable[Device]) -> Device | None:
    """Return a card that lacks nothing but memory to be the device of an inventory's own figures,
    None where there is none."""
    if wanted.name in DEVICES:
        return None
    return next((card for card in have if not is_catalogued(card)), None)


def _listed(devices: Iterable[Device]) -> str:
    """Return `8 x v100_sxm2_32gb and 2 x t4_16gb`."""
    return " and ".join(
        f"{count} x {name}" for name, count in Counter(device.name for device in devices).items()
    )
