"""Define the command `whale-train`: start a host's imports, then import and run the command.

Importing the command takes half a second, composing the config as long again. A host, which every
run needs, imports torch and DeepSpeed meanwhile (docs/adr/066).
"""

import os
import sys

from whale_train.imports import importing
from whale_train.launcher.ranks.early_host import EarlyHost, asks_for_ranks


def main() -> None:
    """Run the command and exit with the status that `run_command` determines."""
    # Programs that pip installed beside this Python (ninja) are found even where the environment is
    # not activated.
    beside = os.path.dirname(sys.executable)
    os.environ["PATH"] = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
    early = EarlyHost.start() if asks_for_ranks(sys.argv[1:], os.environ) else None
    try:
        with importing():
            from whale_train.launcher.command import run_command
        run_command(early)
    finally:
        if early is not None:
            early.stop()


if __name__ == "__main__":
    main()
