"""Own the folder of DeepSpeed's compiled kernels: one for each Python environment.

torch's own default is one folder for all environments of a user. Two environments with different
headers overwrite each other's kernels in that folder at every start.
"""

import os
import sys
from hashlib import sha256
from pathlib import Path

VARIABLE = "TORCH_EXTENSIONS_DIR"
CPU_ADAM = "cpu_adam"  # the optimizer of offloaded state
ASYNC_IO = "async_io"  # reads and writes state in files
PIN_MEMORY = "pin_memory"  # loaded before `ASYNC_IO`


def kernel_cache() -> Path:
    """Return the folder of compiled kernels: TORCH_EXTENSIONS_DIR where it is set, else a folder of
    this environment in the user's cache."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "whale-train" / sha256(sys.prefix.encode()).hexdigest()[:12]


def is_compiled(name: str) -> bool:
    """Return whether the kernel `name` was compiled in this environment."""
    return (kernel_cache() / name / f"{name}.so").exists()
