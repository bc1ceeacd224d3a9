"""Plant defects in copies of this tree, one at a time, and see whether the tests find them.

    python scripts/plant_defects.py
    python scripts/plant_defects.py --only missing_sum wrong_share -- tests/unit tests/distributed

Each defect is a change of one line, which gives a wrong training, a wrong plan, or an accepted
request that cannot be trained. One defect is planted in a copy of the tree, and pytest runs in the
copy until the first failure. The script prints the test that failed, or NOT FOUND for a gap in the
tests. The exit status is 1 if any defect is not found. Arguments after `--` go to pytest.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "runs", "outputs")
PYTEST = ("-q", "-x", "--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder")


@dataclass(frozen=True)
class Defect:
    """A change of one file that some test must find.

    path: the file, relative to the root.
    before: a text that the file has once.
    after: the text that replaces `before`.
    """

    path: str
    before: str
    after: str


DEFECTS = {
    "missing_sum": Defect(
        "runtime/comms/layout_collectives.py",
        "return apply_linear_map(x, _view, partial(all_reduced, group=group))",
        "return apply_linear_map(x, _view, _unchanged)",
    ),
    "sum_of_gradients_too": Defect(
        "runtime/comms/layout_collectives.py",
        "return apply_linear_map(x, partial(all_reduced, group=group), _unchanged)",
        "return apply_linear_map(x, partial(all_reduced, group=group), "
        "partial(all_reduced, group=group))",
    ),
    "wrong_share": Defect(
        "strategies/plan/loss_weights.py",
        'return samples / self.global_batch if self.over == "mean" else 1.0',
        'return 0.5 if self.over == "mean" else 1.0',
    ),
    "shares_of_the_next_copy": Defect(
        "strategies/stages/micro_batches.py",
        "samples.append(tuple((start + a, start + b) for a, b in tile(share, sizes)))",
        "samples.append(tuple((a, b) for a, b in tile(share, sizes)))",
    ),
    "swapped_messages": Defect(
        "runtime/comms/p2p.py",
        "        return buffers\n\n    @property\n    def passing",
        "        return buffers[::-1]\n\n    @property\n    def passing",
    ),
    "wrong_dtype": Defect(
        "runtime/assembly/build_stages.py",
        "reduce_dtype=NARROW.get(plan.reduce_dtype, torch.float32),",
        "reduce_dtype=torch.bfloat16,",
    ),
    "clip_of_each_rank": Defect(
        "runtime/train/optimizer_step.py",
        "total_squared = squared_norm if sum_over_job is None else sum_over_job(squared_norm)",
        "total_squared = squared_norm",
    ),
    "scaled_norm": Defect(
        "runtime/train/optimizer_step.py",
        "norm = norm / loss_scale",
        "norm = norm / loss_scale.sqrt()",
    ),
    "clipped_by_default": Defect(
        "strategies/resolver/deepspeed_config.py",
        '"gradient_clipping": grad_clip,',
        '"gradient_clipping": grad_clip or 1.0,',
    ),
    "rate_a_step_late": Defect(
        "runtime/optim/lr_schedule.py",
        "return options.lr * (step + 1) / warmup",
        "return options.lr * step / warmup",
    ),
    "classes_without_a_sum": Defect(
        "runtime/kernels/vocab_parallel.py",
        "        sums = torch.stack(told)\n        dist.all_reduce(sums, group=shards.group)\n",
        "        sums = torch.stack(told)\n        dist.all_reduce(sums[0], group=shards.group)\n",
    ),
    "rows_of_the_neighbour": Defect(
        "runtime/kernels/vocab_parallel.py",
        "    local = ids - shards.start\n    elsewhere = (local < 0)",
        "    local = ids - shards.start\n    elsewhere = (local < -1)",
    ),
    "statistics_without_counts": Defect(
        "runtime/kernels/sync_batch_norm.py",
        "mean = (counts * means).sum(0) / count",
        "mean = means.mean(0)",
    ),
    "running_variance_biased": Defect(
        "runtime/kernels/sync_batch_norm.py",
        "unbiased = var * (count / (count - 1))",
        "unbiased = var",
    ),
    "random_state_kept_back": Defect(
        "runtime/graph/shard_rng.py",
        "            self.state = self._get()\n            self._set(rank_state)",
        "            self._set(rank_state)",
    ),
    "experts_out_of_order": Defect(
        "runtime/comms/expert_rows.py",
        "order = torch.argsort(run % max(num_local_experts, 1), stable=True)",
        "order = torch.argsort(run, stable=True)",
    ),
    "next_batch_again": Defect(
        "data/order.py",
        "return indices_from(step * global_batch, num_samples, global_batch, seed, shuffle)",
        "return indices_from(step // 2 * global_batch, num_samples, global_batch, seed, shuffle)",
    ),
    "moments_left_out": Defect(
        "runtime/state/restore.py",
        'if block.folder != "optimizer" or readers[block.folder].has_moments(name):',
        'if block.folder != "optimizer":',
    ),
    "softmax_keeps_samples_apart": Defect(
        "strategies/independence/rules.py",
        '(computing.along, "softmax log_softmax',
        '(computing.elementwise, "softmax log_softmax',
    ),
    "half_the_memory": Defect(
        "strategies/memory/liveness.py",
        "return state.values + sum(gradients.values()) + own + at_hand",
        "return state.values / 2 + sum(gradients.values()) + own + at_hand",
    ),
    "ring_of_one_way": Defect(
        "strategies/cost/collectives.py",
        "ring = 2 * gather_time_s(num_bytes, members, link)",
        "ring = gather_time_s(num_bytes, members, link)",
    ),
}


def main() -> int:
    """Plant the requested defects, print the test that found each, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(DEFECTS), default=list(DEFECTS))
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args()
    missed = 0
    for name in options.only:
        began = time.monotonic()
        failed = failing_test(DEFECTS[name], options.pytest)
        missed += not failed
        seconds = time.monotonic() - began
        sys.stdout.write(f"{name}: {failed or 'NOT FOUND'} ({seconds:.0f} s)\n")
        sys.stdout.flush()
    return int(missed > 0)


def failing_test(defect: Defect, arguments: list[str]) -> str:
    """Return the first test that fails with `defect` planted; '' where every test passes.

    arguments: further arguments for pytest.

    Raises SystemExit where the file does not have the text `before` once, and where pytest fails
    without a failed test.
    """
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
        path = (tree / defect.path).resolve()
        text = path.read_text(encoding="utf-8")
        if text.count(defect.before) != 1:
            raise SystemExit(f"{defect.path} does not have this once: {defect.before!r}")
        path.write_text(text.replace(defect.before, defect.after), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", *PYTEST, "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, encoding="utf-8")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.M)
    if not failed and done.returncode:
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return failed[0] if failed else ""


if __name__ == "__main__":
    sys.exit(main())
