"""Optimizers by their class, under every kind of plan: a plain loop with the same classes, or a
refusal that names the class and says what trying it has shown."""

from pathlib import Path

import pytest
import torch
from tests.distributed.cases import STEPS, TOLERANCE, UNEVEN, Case, Run, write_arrays
from tests.distributed.equality import (
    Computed,
    JobFailed,
    Jobs,
    assert_equal,
    run_job,
)
from tests.distributed.served import Served
from tests.distributed.test_not_finite import BAD_STEP, data, overrides, without_step
from tests.pairs import some

from whale_train.checkpoints.checkpoint_files import folder_of
from whale_train.config import Request, read_request
from whale_train.errors import RequestError
from whale_train.launcher.compose.command_line import composed, rewritten
from whale_train.launcher.going_on import compared_model
from whale_train.launcher.planning.plan_request import Resolved, resolve_request
from whale_train.models.build import build_model
from whale_train.optimizers.trial import try_optimizer
from whale_train.strategies.plan.optimizer_classes import OptimizerClass
from whale_train.strategies.plan.plan import Plan

__all__ = ["data"]  # a fixture

# Muon computes in bf16: what rounding makes of a gradient becomes a hundredth of its update, and
# all updates together move a weight by a twentieth of its norm.
OF_VALUES = {"muon": 2e-3}
# What is not a matrix between hidden values has AdamW, as users of Muon have it.
ADAMW = "_target_: torch.optim.AdamW, eps: 1.0e-3"
REST = f'{{match: [lm_head, token, position, "*norm.weight", "*.bias"], {ADAMW}, lr_scale: 0.5}}'
OWN = {
    "adamw": (
        *("optimizer._target_=torch.optim.AdamW", "optimizer.lr=2e-3", "optimizer.eps=1e-3"),
        *("optimizer.weight_decay=0.1", "optimizer.no_decay=norms_and_biases"),
    ),
    "nesterov": (
        *("optimizer._target_=torch.optim.SGD", "optimizer.lr=0.05", "optimizer.nesterov=true"),
        *("optimizer.momentum=0.9", "optimizer.weight_decay=0.05"),
    ),
    "nadam": (
        *("optimizer._target_=torch.optim.NAdam", "optimizer.lr=2e-3", "optimizer.eps=1e-3"),
        "optimizer.groups=[{match: [lm_head], lr_scale: 0.25, weight_decay: 0.2}]",
    ),
    "adagrad": (
        *("optimizer._target_=torch.optim.Adagrad", "optimizer.lr=0.01"),
        *("optimizer.initial_accumulator_value=0.1", "optimizer.eps=1e-3"),
        "optimizer.groups=[{match: [lm_head], lr_scale: 0.25}]",
    ),
    "muon": (
        *("optimizer._target_=torch.optim.Muon", "optimizer.lr=2e-3", "optimizer.momentum=0.9"),
        f"optimizer.groups=[{REST}]",
    ),
    "adafactor": (
        *("optimizer._target_=torch.optim.Adafactor", "optimizer.lr=0.02"),
        "optimizer.eps=[1.0e-6, 1.0e-3]",
    ),
    "lars": (
        *("optimizer._target_=own_optimizers.Lars", "optimizer.lr=0.1"),
        "optimizer.weight_decay=0.01",
    ),
}
ALONE = ("adamw", "nesterov", "nadam", "adagrad")  # these update elements alone
PIPELINE = ("strategy.graph={pipeline: {stages: 2, micro_batches: 2}}",)
COPIED = (
    "strategy.graph={replicate: {degree: 2, of: {pipeline: {micro_batches: 2, stages: "
    "[{replicate: {degree: 1}}, {replicate: {degree: 2}}]}}}}",
)
PLANS: dict[str, tuple[str, int, tuple[float, ...], tuple[str, ...]]] = {
    "dp": ("dp", 2, UNEVEN, ()),
    "zero1": ("zero1", 2, UNEVEN, ()),
    "zero2": ("zero2", 2, (), ()),
    "zero3": ("zero3", 2, UNEVEN, ()),
    "split": ("split", 2, (), ()),
    "split_head": ("hybrid_split_dp", 2, UNEVEN, ()),
    "pipeline": ("pipeline", 2, (), PIPELINE),
    "3d": ("3d", 6, (), COPIED),
}
CUT = ("zero1", "zero2", "zero3", "split", "split_head")  # which have parts of parameters
EVERY = [(optimizer, plan) for optimizer in OWN for plan in PLANS]


def runs(optimizer: str, plan: str) -> bool:
    """The head of Muon's runs is AdamW's, which may be split."""
    return optimizer in ALONE or plan not in CUT or (optimizer, plan) == ("muon", "split_head")


def case_of(optimizer: str, plan: str) -> Case:
    strategy, devices, speeds, graph = PLANS[plan]
    return Case("gpt", strategy, devices, "none", speeds, (*OWN[optimizer], *graph))


def single(optimizer: str) -> Case:
    return Case("gpt", "single", 1, "none", (), OWN[optimizer])


@pytest.mark.parametrize(
    ("optimizer", "plan"),
    some(
        [row for row in EVERY if runs(*row)],
        [
            *(("adamw", "zero1"), ("nesterov", "split"), ("nadam", "zero3"), ("adagrad", "zero2")),
            *(("muon", "split_head"), ("muon", "3d"), ("adafactor", "dp"), ("lars", "pipeline")),
        ],
    ),
)
def test_every_plan_is_a_plain_loop(run: Run, optimizer: str, plan: str) -> None:
    found, plainly = run(case_of(optimizer, plan)), run(single(optimizer), plainly=True)
    assert_equal(found, plainly, TOLERANCE, OF_VALUES.get(optimizer, 0.0))


@pytest.mark.parametrize(
    ("optimizer", "plan"),
    some(
        [row for row in EVERY if not runs(*row)],
        [("muon", "zero3"), ("muon", "split"), ("adafactor", "split_head"), ("lars", "zero1")],
    ),
)
def test_parts_that_are_updated_otherwise_are_refused(run: Run, optimizer: str, plan: str) -> None:
    with pytest.raises(JobFailed) as raised:
        run(case_of(optimizer, plan))
    target = OWN[optimizer][0].removeprefix("optimizer.")
    said = str(raised.value)
    assert f"optimizer.{target}" in said
    assert "the update of a parameter that is cut in two along its dimension 0 differs by" in said
    assert (
        "use zero: 0, as strategy=dp" in said or "without a split of them, as strategy=dp" in said
    )


def test_a_class_is_what_its_name_is(run: Run) -> None:
    """torch's AdamW by its class is our `adamw` to the last bit, under ZeRO too."""
    named = ("optimizer.lr=2e-3", "optimizer.eps=1e-3", "optimizer.weight_decay=0.1")
    ours = run(Case("gpt", "zero1", 2, "none", UNEVEN, ("optimizer=adamw", *named)))
    by_class = (*OWN["adamw"], "optimizer.fused=true")
    found = run(Case("gpt", "zero1", 2, "none", UNEVEN, by_class))
    assert_equal(found, ours, 0.0, 1e-12)


# --- Checkpoints ---------------------------------------------------------------------------------

RESUMED = [
    ("nadam", "dp", "zero3"),  # two scalars a parameter, from each one's own to a partition's
    ("nadam", "zero2", "split"),
    ("adagrad", "split", "zero1"),  # state that its constructor makes
    ("adafactor", "dp", "pipeline"),  # rows and columns
    ("muon", "3d", "split_head"),
    ("lars", "pipeline", "dp"),  # a number of Python's
]


@pytest.mark.parametrize(("optimizer", "saved", "resumed"), some(RESUMED, RESUMED[::2]))
def test_any_plan_goes_on_with_what_any_plan_saved(
    run: Run, served: Served, tmp_path: Path, optimizer: str, saved: str, resumed: str
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    wanted = (*case_of(optimizer, saved).overrides(run.folder), "checkpoint.every=2")
    said = served.ask(run_job, overrides=[*wanted], plainly=False, run_dir=str(first))
    assert not said, said
    checkpoint = folder_of(first, 2)
    wanted = (*case_of(optimizer, resumed).overrides(run.folder), f"train.resume={checkpoint}")
    said = served.ask(run_job, overrides=[*wanted], plainly=False, run_dir=str(second))
    assert not said, said
    request = Request.from_json((second / "request.json").read_text())
    plan = Plan.from_json((second / "plan.json").read_text())
    models = (request.model, request.model)
    assert not compared_model(checkpoint, *models, plan, request.optimizer)
    found, plainly = Computed.read(second), run(single(optimizer), plainly=True)
    assert found.losses == pytest.approx(plainly.losses[2:], rel=TOLERANCE)
    of_values = OF_VALUES.get(optimizer, TOLERANCE)
    for path, copies in found.values.items():
        for value in copies:
            assert value == pytest.approx(
                plainly.values[path][0], rel=of_values, abs=of_values / 10
            )


# --- Schedules -----------------------------------------------------------------------------------

STEP_LR = (
    *(
        "optimizer.schedule._target_=torch.optim.lr_scheduler.StepLR",
        "optimizer.schedule.gamma=0.5",
    ),
    "optimizer.schedule.step_size=2",
)


def test_a_scheduler_gives_the_rate_of_every_step(run: Run, served: Served, tmp_path: Path) -> None:
    """Of groups too; and a run that goes on finds the rate where it was."""
    extra = (*OWN["nadam"], *STEP_LR)
    case = Case("gpt", "zero1", 2, "none", UNEVEN, (*extra, "checkpoint.every=3"))
    first, second = tmp_path / "first", tmp_path / "second"
    for run_dir, more in ((first, ()), (second, (f"train.resume={folder_of(first, 3)}",))):
        wanted = [*case.overrides(run.folder), *more]
        said = served.ask(run_job, overrides=wanted, plainly=False, run_dir=str(run_dir))
        assert not said, said
    plainly = run(Case("gpt", "single", 1, "none", (), extra), plainly=True)
    assert_equal(Computed.read(first), plainly, TOLERANCE)
    again = Computed.read(second)
    assert again.rates == pytest.approx(plainly.rates[3:])
    assert again.losses == pytest.approx(plainly.losses[3:], rel=TOLERANCE)


def test_steps_that_are_left_out_change_no_state(data: Path, jobs: Jobs) -> None:
    """An optimizer that reads no sign of a bad step, whole and in partitions."""
    nadam = ("optimizer._target_=torch.optim.NAdam", "optimizer.lr=0.01", "train.on_nan=skip")
    found, alone = (
        jobs.run([x for x in overrides(strategy, data, *nadam) if x != "optimizer=sgd"])
        for strategy in ("zero1", "single")
    )
    assert [bool(line.get("skipped")) for line in found.lines].index(True) == BAD_STEP - 1
    assert_equal(without_step(found), without_step(alone), TOLERANCE)


# --- What trying shows ---------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run from the folder of the user's own file."""
    monkeypatch.chdir(Path(__file__).parent)


def tried(target: str, **arguments: object) -> OptimizerClass:
    return try_optimizer("optimizer._target_", target, {"lr": 0.01, **arguments})


@pytest.mark.usefixtures("here")
def test_trying_tells_what_treats_elements_alone() -> None:
    names = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "Adagrad")
    alone = some(names, ("RMSprop", "Rprop", "Adagrad"))
    assert not any(tried(f"torch.optim.{name}").unlike_in_parts for name in alone)
    whole = ("torch.optim.Muon", "torch.optim.Adafactor", "own_optimizers.Lars")
    assert all(tried(target).unlike_in_parts for target in whole)
    noisy, counting = tried("own_optimizers.langevin"), tried("own_optimizers.Counting")
    assert (noisy.draws, noisy.unlike_in_parts) == (True, "it draws random numbers")
    assert not counting.unlike_in_parts  # a count is of no element
    assert counting.unsaved == "keeps something of its updates outside of its state of parameters"
    assert not any(tried(target).unsaved for target in whole)


@pytest.mark.parametrize("name", some(["NAdam", "Adafactor", "Adagrad", "ASGD"], ["Adafactor"]))
def test_the_plan_has_the_bytes_of_the_state(name: str, tmp_path: Path) -> None:
    """Those of the tensors that the class keeps after a step of the whole model."""
    resolved, request = planned(
        tmp_path, f"optimizer._target_=torch.optim.{name}", "optimizer.lr=0.01"
    )
    model = build_model(request.model)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [x for state in optimizer.state.values() for x in state.values()]
    num_bytes = sum(x.nbytes for x in kept if isinstance(x, torch.Tensor) and x.dim())
    assert resolved.plan.ranks[0].memory_bytes.optimizer == num_bytes


def planned(folder: Path, *given: str) -> tuple[Resolved, Request]:
    write_arrays(folder)
    case = Case("gpt", "dp", 2, "none", ())
    chosen = {x.partition("=")[0].partition(".")[0] for x in given} & {"strategy", "hardware"}
    wanted = [x for x in case.overrides(folder) if not x.startswith((*chosen,))]
    request = read_request(composed(rewritten([*wanted, *given, "mode=plan"])), {})
    return resolve_request(request), request


def test_a_search_finds_what_the_optimizer_allows(tmp_path: Path) -> None:
    """Whole parameters for Adafactor; else copies would be partitioned to fit."""
    nodes = "hardware.nodes=[{devices: 4, link: nvlink2, device: v100_sxm2_32gb}]"
    where = ("strategy=auto", "hardware=v100_p100_mix", nodes)
    optimizer = ("optimizer._target_=torch.optim.Adafactor", "optimizer.lr=0.01")
    resolved, _ = planned(tmp_path, *where, *optimizer)
    assert all(not x.zero and not x.shards for x in resolved.plan.task_graphs)
    said = [x.reason for x in resolved.plan.decisions if "needs whole parameters" in x.reason]
    assert said


ADAFACTOR = "optimizer._target_=torch.optim.Adafactor"
LR = "optimizer.lr=0.01"
NADAM = ("optimizer._target_=torch.optim.NAdam", LR)
SCHEDULE = "optimizer.schedule._target_=torch.optim.lr_scheduler."
REFUSED = [
    (
        ("optimizer._target_=torch.optim.Muon", LR),
        "optimizer._target_=torch.optim.Muon refuses blocks.0.attention_norm.weight, ",
        "give them an optimizer of their own, as optimizer.groups=[{match: ",
    ),
    (
        ("optimizer._target_=torch.optim.LBFGS", LR),
        "optimizer._target_=torch.optim.LBFGS cannot be used: TypeError: LBFGS.step() missing 1 ",
        "use another, whose step computes no loss by a closure",
    ),
    (
        ("optimizer._target_=torch.optim.Adam", LR, "optimizer.betas=[2.0,0.9]"),
        "cannot be used: ValueError: Invalid beta parameter at index 0: 2.0",
        "correct its arguments or its code",
    ),
    (
        (*NADAM, "optimizer.momentun_decay=1"),
        "optimizer.momentun_decay=1 is not an argument of NAdam",
        "did you mean momentum_decay?",
    ),
    (("optimizer._target_=torch.optim.NAdam",), "optimizer.lr must be given", "optimizer.lr=VALUE"),
    (
        ("optimizer._target_=os.system", LR),
        "optimizer._target_=os.system is a function that does not say what it returns",
        "name a torch.optim.Optimizer class",
    ),
    (
        (*NADAM, "strategy=zero2_offload"),
        "optimizer._target_=torch.optim.NAdam cannot be kept on the host",
        "use optimizer=adamw, adam or sgd, or a strategy without offload",
    ),
    (
        ("optimizer._target_=own_optimizers.langevin", LR),
        "optimizer._target_=own_optimizers.langevin draws random numbers in its updates",
        "use strategy=single",
    ),
    (
        ("optimizer._target_=own_optimizers.Counting", LR, "checkpoint.every=2"),
        "keeps something of its updates outside of its state of parameters, which a checkpoint ",
        "use another optimizer, or checkpoint.every=null",
    ),
    (
        ("optimizer._target_=torch.optim.Rprop", LR, "optimizer.no_decay=norms_and_biases"),
        "optimizer.no_decay=norms_and_biases has no effect on torch.optim.Rprop, which has no ",
        "use null",
    ),
    (
        ("optimizer.groups=[{match: lm_head, _target_: torch.optim.SGD}]",),
        "optimizer.groups[0]._target_=torch.optim.SGD is a class beside optimizer=adamw",
        "use optimizer._target_=torch.optim.AdamW as well",
    ),
    (
        (*NADAM, "optimizer.groups=[{match: lm_head, _target_: torch.optim.SGD, lr: 0.1}]"),
        "optimizer.groups[0].lr=0.1 is given as a part of optimizer.lr",
        "use lr_scale: 10",
    ),
    (
        (f"{SCHEDULE}ReduceLROnPlateau",),
        "optimizer.schedule._target_=torch.optim.lr_scheduler.ReduceLROnPlateau goes by a metric",
        "use optimizer.schedule=cosine",
    ),
    (
        (
            f"{SCHEDULE}OneCycleLR",
            "optimizer.schedule.max_lr=0.1",
            "optimizer.schedule.total_steps=9",
        ),
        "OneCycleLR raised ValueError: optimizer must support momentum or beta1 with ",
        "correct its arguments",
    ),
    (
        (
            *(f"{SCHEDULE}OneCycleLR", "optimizer.schedule.max_lr=0.1"),
            *("optimizer.schedule.total_steps=3", "optimizer.schedule.cycle_momentum=false"),
        ),
        "OneCycleLR raises at step 5 of 5 (ValueError: Tried to step 4 times.",
        "correct its arguments, or train.steps",
    ),
    (
        (f"{SCHEDULE}StepLR", "optimizer.schedule.size=3"),
        "optimizer.schedule.size=3 is not an argument of StepLR",
        "did you mean step_size?",
    ),
    (
        (f"{SCHEDULE}StepLR", "optimizer.schedule.step_size=3", "optimizer.final_lr_fraction=0.1"),
        "optimizer.final_lr_fraction=0.1 has no effect on optimizer.schedule._target_ (StepLR)",
        "use 0",
    ),
]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("given", "rule", "remedy"), REFUSED, ids=range(len(REFUSED)))
def test_refused(tmp_path: Path, given: tuple[str, ...], rule: str, remedy: str) -> None:
    with pytest.raises(RequestError) as raised:
        planned(tmp_path, *given)
    (fault, *_) = [str(fault) for fault in raised.value.faults if rule in str(fault)] or [
        str(raised.value)
    ]
    assert rule in fault
    assert remedy in fault


def test_rates_of_its_own_are_noted(tmp_path: Path) -> None:
    """A scheduler may not read optimizer.lr at all."""
    given = ("optimizer.schedule.max_lr=0.1", f"optimizer.schedule.total_steps={STEPS}")
    resolved, _ = planned(
        tmp_path, f"{SCHEDULE}OneCycleLR", *given, "optimizer.schedule.cycle_momentum=false"
    )
    notes = {x.key: x.reason for x in resolved.plan.decisions}
    assert notes["optimizer.lr"].startswith("OneCycleLR has rates of its own")
