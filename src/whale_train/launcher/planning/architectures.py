"""Check that the installed torch was built for the GPUs that a plan uses."""

import re
from collections.abc import Sequence

from whale_train.errors import Fault
from whale_train.strategies.hardware.gpu_facts import GpuFacts, device_of

_FLAG = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
_REMEDY = "install a torch that was (docs/mixed_cluster.md)"


def refused_architectures(cards: Sequence[GpuFacts]) -> list[Fault]:
    """Return a fault for each kind of card in `cards` on which the installed torch cannot run."""
    import torch

    # Not torch.cuda.get_arch_list: it is empty where CUDA has no device, and may start CUDA.
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
    return faults_of(cards, torch.__version__, flags.split() if flags else [])


def faults_of(cards: Sequence[GpuFacts], version: str, flags: Sequence[str]) -> list[Fault]:
    """Return a fault for each kind of card on which a build of torch cannot run.

    cards: the cards that a plan uses.
    version: the version of torch.
    flags: the architectures that torch was built for, such as `sm_80`; empty for a build without
        CUDA.
    """
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
    """Return whether code that was built for `flag` runs on a GPU of compute capability
    `capability`.

    Machine code (`sm_80`) runs on the same major version from the given minor version on. Code that
    the driver compiles (`compute_80`) runs on the given architecture and all later ones.
    Architecture-specific code (`sm_90a`) runs on the given architecture alone.
    """
    match = _FLAG.fullmatch(flag)
    if match is None:
        return False
    kind, major, minor, alone = match.groups()
    built = int(major), int(minor)
    if alone == "a":
        return built == capability
    if kind == "compute" and not alone:
        return built <= capability
    return built[0] == capability[0] and built[1] <= capability[1]
