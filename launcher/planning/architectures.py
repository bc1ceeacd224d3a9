"""Whether the torch that is installed was built for the GPUs that a plan uses."""

import re
from collections.abc import Sequence

from whale_train.errors import Fault
from whale_train.strategies.hardware.gpu_facts import GpuFacts, device_of

_FLAG = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
_REMEDY = "install a torch that was (README, Hardware)"


def refused_architectures(cards: Sequence[GpuFacts]) -> list[Fault]:
    """Return what keeps this torch from running on `cards`, a fault for each kind of them."""
    import torch

    # Not get_arch_list, which says nothing where CUDA has no device, and may start it.
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
    return faults_of(cards, torch.__version__, flags.split() if flags else [])


def faults_of(cards: Sequence[GpuFacts], version: str, flags: Sequence[str]) -> list[Fault]:
    """Return the same of a torch `version` built with the architecture `flags` (`sm_80`)."""
    kinds = {device_of(card).name: card.capability for card in cards}
    if not flags:
        rule = f"cannot be used by torch {version}, which was built without CUDA"
        return [Fault("hardware", ", ".join(kinds), rule, _REMEDY)]
    return [
        Fault(
            "hardware",
            name,
            f"is of architecture sm_{major}{minor}, for which torch {version} was not built (it "
            f"was for {' '.join(flags)})",
            _REMEDY,
        )
        for name, (major, minor) in kinds.items()
        if not any(_runs(flag, (major, minor)) for flag in flags)
    ]


def _runs(flag: str, capability: tuple[int, int]) -> bool:
    """Return whether code built for `flag` runs on a GPU of `capability`: code of its major
    architecture and no later minor one, or what its driver compiles of an earlier one's; of code
    for one architecture alone (`sm_90a`), that one's."""
    found = _FLAG.fullmatch(flag)
    if found is None:
        return False
    kind, major, minor, alone = found.groups()
    built = int(major), int(minor)
    if alone == "a":
        return built == capability
    if kind == "compute" and not alone:
        return built <= capability
    return built[0] == capability[0] and built[1] <= capability[1]
