"""Write the folder of weights of a checkpoint, in a process of its own.

    python -m whale_train.runtime.process.export_host --checkpoint DIR --run-dir DIR --parent PID

The model is built without weights, for its names and its config, so memory holds at most the
largest tensor at once. Exit status: 0 done; 1 failed (`failure.json` of the run directory gives the
reason).
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from whale_train.checkpoints.url_path import Place, place_of
from whale_train.config import Request
from whale_train.data.open import tokenizer_of
from whale_train.disk import failing_when_full
from whale_train.machine.parents import end_with_parent
from whale_train.models.export.export import model_on_meta
from whale_train.runtime.failures.failure import record_host_failure
from whale_train.runtime.state.final_model import export_weights


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of this module, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m whale_train.runtime.process.export_host")
    parser.add_argument("--checkpoint", type=place_of, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True, help="end with this process")
    options = parser.parse_args(arguments)
    end_with_parent(options.parent, signal.SIGTERM)
    checkpoint: Place = options.checkpoint
    try:
        request = Request.from_json((checkpoint / "request.json").read_text(encoding="utf-8"))
        model = model_on_meta(request.model)
        with failing_when_full():
            tokenizer = tokenizer_of(request.data)
            saved = checkpoint / "model"
            export_weights(saved, options.run_dir, model, request.model, tokenizer)
    except Exception as error:
        record_host_failure(options.run_dir, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
