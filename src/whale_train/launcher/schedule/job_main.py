"""Be the process of a scheduled job: `python -m whale_train.launcher.schedule.job_main PARENT ...`.

It is the command `whale-train` with these arguments, and saves and ends when its parent has ended.
"""

import signal
import sys

from whale_train.launcher.cli import main
from whale_train.machine.parents import end_with_parent

if __name__ == "__main__":
    end_with_parent(int(sys.argv.pop(1)), signal.SIGTERM)
    main()
