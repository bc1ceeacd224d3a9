"""Own the saved calibrations of this machine, a file for each kind of device.

`mode=calibrate` writes them. Every plan for a calibrated kind of device reads them.
"""

import os
from dataclasses import replace
from pathlib import Path

import yaml

from whale_train.bounds import load_yaml
from whale_train.errors import ConfigError, Fault
from whale_train.strategies.hardware.calibration import Calibration

REMEDY = "measure again with whale-train mode=calibrate, or remove it"
VARIABLE = "WHALE_TRAIN_CALIBRATIONS"


def calibrations_folder() -> Path:
    """Return the folder of calibrations: $WHALE_TRAIN_CALIBRATIONS, or a folder in the user's
    configuration."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    root = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return root / "whale-train" / "calibrations"


def with_kept_calibrations() -> list[Calibration]:
    """Return all saved calibrations, ordered by file name. Raises ConfigError for a file that is no
    calibration."""
    calibrations, faults = [], []
    for path in sorted(calibrations_folder().glob("*.yaml")):
        try:
            calibrations.append(Calibration.from_mapping(load_yaml(path)))
        except ConfigError as error:
            why = "; ".join(fault.rule for fault in error.faults)
            faults.append(Fault(str(path), "", f"is no calibration ({why})", REMEDY))
        except ValueError as error:
            faults.append(Fault(str(path), "", f"is no calibration ({error})", REMEDY))
    if faults:
        raise ConfigError(faults)
    return calibrations


def keep_calibration(calibration: Calibration) -> Path:
    """Save a calibration, and return the path of the file.

    An earlier calibration of the same device is updated: it keeps the performance in precisions
    that were not measured again, and links if links were not measured. Raises ConfigError where
    the file cannot be written.
    """
    path = calibrations_folder() / f"{calibration.name}.yaml"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            old = Calibration.from_mapping(load_yaml(path))
            calibration = replace(calibration, kernels={**old.kernels, **calibration.kernels})
            if calibration.link is None:  # a single rank on its host cannot measure a link
                link, memory = old.link, old.shared_memory
                calibration = replace(calibration, link=link, shared_memory=memory)
        text = yaml.safe_dump(calibration.to_mapping(), sort_keys=False)
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError, ConfigError) as error:
        rule = f"cannot be written ({' '.join(str(error).split())})"
        remedy = f"set ${VARIABLE} to a folder that can"
        raise ConfigError([Fault(str(path), "", rule, remedy)]) from None
    return path
