"""The calibrations this machine keeps: a file for each kind of device, found without being asked.

`mode=calibrate` writes them; every plan for such devices reads them.
"""

import os
from pathlib import Path

import yaml

from whale_train.errors import ConfigError, Fault
from whale_train.strategies.hardware.calibration import Calibration

VARIABLE = "WHALE_TRAIN_CALIBRATIONS"


def folder() -> Path:
    """Return where calibrations are: $WHALE_TRAIN_CALIBRATIONS, or in the user's configuration."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    root = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return root / "whale-train" / "calibrations"


def kept() -> list[Calibration]:
    """Return all calibrations, by name. Raises ConfigError for a file that is none."""
    found, faults = [], []
    for path in sorted(folder().glob("*.yaml")):
        try:
            found.append(Calibration.from_mapping(yaml.safe_load(path.read_text())))
        except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())
            remedy = "measure again with whale-train mode=calibrate, or remove it"
            faults.append(Fault(str(path), "", f"is no calibration ({said})", remedy))
    if faults:
        raise ConfigError(faults)
    return found


def keep(calibration: Calibration) -> Path:
    """Write it, in the place of one of the same device; what that has of other precisions, and of
    links where they were not measured again, stays. Raises ConfigError where it cannot be
    written."""
    path = folder() / f"{calibration.name}.yaml"
    mapping = calibration.to_mapping()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            old = yaml.safe_load(path.read_text()) or {}
            mapping["kernels"] = {**old.get("kernels", {}), **mapping["kernels"]}
            if mapping["link"] is None:  # which one rank alone on its host cannot measure
                mapping |= {joins: old.get(joins) for joins in ("link", "shared_memory")}
        path.write_text(yaml.safe_dump(mapping, sort_keys=False))
    except (OSError, yaml.YAMLError, AttributeError, TypeError) as error:
        rule = f"cannot be written ({' '.join(str(error).split())})"
        remedy = f"set ${VARIABLE} to a folder that can"
        raise ConfigError([Fault(str(path), "", rule, remedy)]) from None
    return path
