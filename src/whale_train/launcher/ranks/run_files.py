"""Write a request and its plan into the run directory."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from whale_train.checkpoints.url_path import Place
from whale_train.config import AUTO, Request
from whale_train.launcher.planning.plan_request import Resolved
from whale_train.launcher.ranks.run_dir import (
    PLANS,
    create_run_dir,
    mark_ready,
    write_environment,
    write_json,
    write_text,
)
from whale_train.strategies.hardware.write_inventory import inventory_of

STRATEGY = "strategy.yaml"  # of a strategy that was found, in the run directory


def make_run_dir(request: Request, run_dir: Path) -> Path:
    """Make the run directory, write the request into it, and return its absolute path.

    Raises ConfigError where the directory holds another run, unless `train.resume=auto` continues
    that run.
    """
    run_dir = create_run_dir(run_dir, goes_on=request.train.resume == AUTO)
    write_text(run_dir / "request.json", request.to_json())
    return run_dir


def write_plan(run_dir: Path, resolved: Resolved, request: Request) -> None:
    """Write the plan and related files into the run directory.

    The related files are the strategy that `strategy=auto` found, the inventory of the GPUs for
    `hardware=local`, the timeline of the predicted step, and the software environment.
    """
    if resolved.found is not None:
        write_strategy(run_dir, resolved.found, request)
    if request.hardware.get("kind") == "local" and resolved.device == "cuda":
        inventory = yaml.dump(
            inventory_of(resolved.cluster), Dumper=_WithoutAliases, sort_keys=False
        )
        write_text(run_dir / "inventory.yaml", inventory)
    if resolved.timeline:  # for a comparison with the timeline of a run
        write_json(run_dir / "predicted_trace.json", {"traceEvents": resolved.timeline})
    write_environment(run_dir)
    write_text(run_dir / "plan.json", resolved.plan.to_json())


def write_strategy(run_dir: Path, content: Mapping[str, Any], request: Request) -> None:
    """Write the file of a strategy that was made for a request.

    content: the content of the file.
    """
    names, batch = request.names, request.train.global_batch
    head = f"# Found for model={names.get('model')} hardware={names.get('hardware')} "
    head += f"train.global_batch={batch}\n"
    text = yaml.dump(dict(content), Dumper=_WithoutAliases, sort_keys=False)
    write_text(run_dir / STRATEGY, head + text)


def in_flow(value: Any) -> str:
    """Return a value of a strategy file on one line, as the command line has it."""
    text: str = yaml.dump(
        value, Dumper=_WithoutAliases, default_flow_style=True, width=10**6, sort_keys=False
    )
    text = text.removesuffix("\n").removesuffix("\n...")
    # In a shell, the whole override stands in single quotes.
    return text if '"' in text else text.replace("'", '"')


def write_plans(run_dir: Path, resolved_by_name: Mapping[str, object]) -> list[Path]:
    """Write the plan of each strategy in a comparison, and return the paths of the files.

    resolved_by_name: the resolved request of each strategy by name, or the error of a strategy
        without a plan, for which no file is written.
    """
    write_environment(run_dir)
    plans = {
        name: resolved.plan
        for name, resolved in resolved_by_name.items()
        if isinstance(resolved, Resolved)
    }
    (run_dir / PLANS).mkdir(exist_ok=True)
    paths = []
    for name, plan in plans.items():
        paths.append(run_dir / PLANS / f"{quote(name, safe='')}.json")  # of `a/b` in one folder
        write_text(paths[-1], plan.to_json())
    return paths


def start_ranks(
    run_dir: Path,
    resolved: Resolved,
    request: Request,
    checkpoint: Place | None = None,
    *,
    delinks: bool = False,
    data_anew: bool = False,
    samples: int = 0,
    rounding: int | None = None,
    weights: Place | None = None,
) -> None:
    """Write all files that the waiting ranks need, with `ready` as the last.

    checkpoint: the checkpoint that the ranks continue from; None for a new run.
    delinks: whether layers that share weights in the checkpoint get weights of their own.
    data_anew: whether the ranks start again with the first sample.
    samples: number of samples that the run has taken, unless the data starts again.
    rounding: the seed of the noise by which initial weights are rounded; None rounds as usual.
    weights: the folder of a run's final weights to evaluate; None for the checkpoint's weights.
    """
    going_on_from = None if checkpoint is None else str(checkpoint.absolute())
    launch = {
        **{"device": resolved.device, "paces": resolved.paces, "links": resolved.links},
        **{"checkpoint": going_on_from, "delinks": delinks, "data_anew": data_anew},
        **{"rounding": rounding, "data": resolved.data and resolved.data.to_plain()},
        **{"samples": samples, "num_samples": resolved.num_samples},
        **{"mixture": resolved.mixture and asdict(resolved.mixture)},
        **({} if resolved.lost_place is None else {"is_stream": True}),
        **{"weights": None if weights is None else str(weights.absolute())},
    }
    write_json(run_dir / "launch.json", launch)
    write_plan(run_dir, resolved, request)
    mark_ready(run_dir)


class _WithoutAliases(yaml.SafeDumper):
    """A YAML dumper that writes repeated values in full, such as equal stages, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
