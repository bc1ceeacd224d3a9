"""What the command says to command lines and values that are wrong, word for word."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.command import Answer, whale_train_process
from tests.cli.refused import Case

STRATEGIES = (
    "3d, auto, dp, elastic_dp, experts_dp, hybrid_split_dp, interleaved, pipeline, single, split, "
    "split_dp, split_sequence, split_zero3, zero1, zero1_pipeline, zero2, zero2_offload, zero3, "
    "zero3_offload, zero_bubble"
)

COMMAND_LINE = (
    Case(
        "near_key",
        "train.stpes=5",
        "train.stpes=5 is not a key of the config; did you mean train.steps?",
    ),
    Case(
        "near_section",
        "trian.steps=5",
        "trian.steps=5 is not a key of the config; did you mean train.steps?",
    ),
    Case(
        "swapped_letters",
        "modle=gpt",
        "modle=gpt is not a key of the config; did you mean model?",
    ),
    Case(
        "quotes_around_keys",
        """'strategy.graph={split: {patterns: {"*.qkv.weight": row, "*.[ab]": column}}}'""",
        'strategy.graph={split: {patterns: {"*.qkv.weight": row, "*.[ab]": column}}} has quotes '
        "around keys, which a command line's have none; write 'strategy.graph={split: {patterns: "
        "{*.qkv.weight: row, *.\\[ab\\]: column}}}'",
    ),
    # The remedy, with a glob that names nothing, is read as it was meant.
    Case(
        "keys_without_quotes",
        "strategy=split 'strategy.graph={split: {patterns: {*.\\[ab\\]: colum}}}'",
        "strategy.graph.split.patterns.*.[ab]=colum is unknown; did you mean column? One of: "
        "column, experts, replicate, row, vocabulary",
    ),
    Case(
        "near_data_key",
        "data.sequence_lenght=5",
        "data.sequence_lenght=5 is not a key of the config; did you mean data.sequence_length?",
    ),
    Case(
        "export_of_nothing",
        "mode=export",
        "checkpoint must be given to mode=export; name a run directory or a checkpoint in one, as "
        "checkpoint=runs/MY_RUN",
    ),
    Case(
        "export_near_key",
        "mode=export checkpiont=runs/mine",
        "checkpiont=runs/mine is not a key of the config; did you mean checkpoint?",
    ),
    Case(
        "export_of_another_model",
        "mode=export checkpoint=runs/mine model=moe_gpt train.steps=5",
        "model=moe_gpt has no effect on mode=export; leave it out: the checkpoint has it",
        "train.steps=5 has no effect on mode=export; leave it out: the checkpoint has it",
    ),
    Case(
        "export_of_no_folder",
        "mode=export checkpoint=runs/mine",
        "checkpoint=runs/mine is not a folder; name a run directory or a checkpoint in one, as "
        "runs/MY_RUN/checkpoints/step_100",
    ),
    Case(
        "checkpoint_to_train",
        "checkpoint=runs/mine",
        "checkpoint.path=runs/mine has no effect on mode=train; go on from it by train.resume=PATH",
    ),
    Case(
        "unknown_key",
        "colour=blue",
        "colour=blue is not a key of the config; see whale-train --cfg job for all keys",
    ),
    Case(
        "added_unknown_key",
        "+train.foo=1",
        "train.foo=1 is not a key here; use one of: accumulate, all_reduce, bucket_mb, compile, "
        "delink_at, epochs, evaluate_every, evaluation_samples, global_batch, grad_clip, "
        "grad_norm, loss_scale, loss_scale_fixed, on_nan, parameters_sha256, precision, profile, "
        "reduce_dtype, report, resume, resume_data, router_bias_rate, steps, stop_after, "
        "tensorboard, tf32, trace",
    ),
    Case(
        "added_existing_key",
        "+train.global_batch=3",
        "+train.global_batch=3 adds a key that is there already; write train.global_batch=3",
    ),
    Case(
        "removed_unknown_key",
        "~train.stps",
        "train.stps is not a key of the config; did you mean train.steps?",
    ),
    Case(
        "near_strategy",
        "strategy=zero4",
        f"strategy=zero4 is not an option; did you mean zero3? One of: {STRATEGIES}",
    ),
    Case(
        "near_strategy_short",
        "strategy=dpp",
        f"strategy=dpp is not an option; did you mean dp? One of: {STRATEGIES}",
    ),
    Case(
        "near_hardware",
        "hardware=v100_p100mix",
        "hardware=v100_p100mix is not an option; did you mean v100_p100_mix? One of: cpu, "
        "dgx_a100, h200, local, v100_512, v100_p100_mix",
    ),
    Case(
        "near_model",
        "model=gtp",
        "model=gtp is not an option; did you mean gpt? One of: bert_large, class_head, custom, "
        "gpt, gpt3_175b, hf, image_classifier, llama3_405b, m6_100b, m6_10b, m6_10b_dense, "
        "m6_10t, m6_1t, m6_base, moe_gpt, resnet50_100k, t5_large",
    ),
    Case(
        "near_optimizer",
        "optimizer=adamww",
        "optimizer=adamww is not an option; did you mean adamw? One of: adam, adamw, "
        "adamw8bit, lamb, lars, sgd",
    ),
    Case(
        "near_experiment",
        "+experiment=smok",
        "experiment=smok is not an option; did you mean smoke? One of: large_batch, smoke",
    ),
    *(
        Case(f"strategy_of_another_{name}", f"strategy={name}", f"strategy={name} {said}")
        for name, said in {
            "ddp": "is not an option; use strategy=dp (copies are as many as devices, or "
            "strategy.graph.replicate.degree)",
            "fsdp": "is not an option; use strategy=zero3",
            "deepspeed_stage_3": "is not an option; use strategy=zero3",
        }.items()
    ),
    Case(
        "list_for_a_mapping",
        "'callbacks=[{_target_: my_module.Watcher}]'",
        "callbacks=[{_target_: my_module.Watcher}] is not a mapping; write "
        "callbacks.mine._target_=my_module.MyCallback",
    ),
    Case(
        "mapping_for_a_list",
        "'optimizer.groups={match: head}'",
        "optimizer.groups={match: head} is not a list; write 'optimizer.groups=[{match: head}]'",
    ),
    Case(
        "two_in_one_text",
        "'strategy=zero1 train.steps=3'",
        "strategy=zero1 train.steps=3 is several overrides in one text; give each as a text of its "
        "own",
    ),
    Case(
        "malformed",
        "'train={steps: 5'",
        "train={steps: 5 cannot be read (no viable alternative at input '{steps: 5'); quote "
        "values with spaces, commas or brackets, as in 'key={a: 1}'",
    ),
    Case(
        "no_value",
        "train.steps",
        "train.steps is neither KEY=VALUE nor a flag; write train.steps=VALUE",
    ),
    Case(
        "unknown_flag",
        "--stpes=5",
        "--stpes=5 is not a flag; see whale-train --hydra-help for the flags; settings are "
        "KEY=VALUE",
    ),
    Case(
        "sweep_without_m",
        "strategy=dp,zero1 train.steps=1,2",
        "strategy=dp,zero1 gives several values to one run; add -m to sweep, or give one option",
        "train.steps=1,2 gives several values to one run; add -m to sweep, or give one value",
    ),
    Case(
        "sweep_of_unknown",
        "-m strategy=dp,zero4",
        f"strategy=zero4 is not an option; did you mean zero3? One of: {STRATEGIES}",
    ),
    Case(
        "no_config_dir",
        "--config-dir nowhere strategy=dp",
        "--config-dir=nowhere is not a folder; name one with your files",
    ),
    Case(
        "broken_yaml",
        "--config-dir my strategy=mine",
        "{here}/my/strategy/mine.yaml is not YAML (line 3, column 8: expected ',' or '}', but "
        "got ':'); correct it there",
    ),
    Case(
        "list_yaml",
        "--config-dir my strategy=listed",
        "strategy=[replicate] is not a mapping; use strategy=NAME or strategy.KEY=VALUE",
    ),
    Case(
        "builds_on_missing",
        "--config-dir my strategy=based",
        "strategy=based builds on dpp, which is not an option; name a file that exists",
    ),
    Case(
        "busy_run_dir",
        "hydra.run.dir=earlier",
        "hydra.run.dir=earlier already holds a run (plan.json); name one that does not exist "
        "yet, or go on with its run by train.resume=auto",
    ),
    Case(
        "busy_run_dir_of_a_mode_that_begins",
        "mode=verify hydra.run.dir=earlier",
        "hydra.run.dir=earlier already holds a run (plan.json); name one that does not exist yet",
    ),
    Case(
        "a_verification_of_a_checkpoint",
        "mode=verify train.resume=auto",
        "train.resume=auto has no effect on mode=verify, which begins with step 1; use null",
    ),
    Case(
        "run_dir_is_a_url",
        "hydra.run.dir=s3://bucket/run",
        "hydra.run.dir=s3://bucket/run is a URL, and a run writes into a folder; name a folder of "
        "this machine, and have the checkpoints copied there by checkpoint.to=s3://bucket/run",
    ),
    Case(
        "unwritable_run_dir",
        "hydra.run.dir=taken/run",
        "hydra.run.dir=taken/run cannot be made a run directory (Not a directory); name a "
        "directory that can be written",
    ),
)

VALUES = (
    Case(
        "texts_of_another_form",
        """metrics.f1._target_=F1 launcher=ssh 'launcher.hosts=[-a, "b c"]' checkpoint.to="''" """,
        "launcher.hosts[0]=-a is not the name of a host; use one, such as user@host",
        "launcher.hosts[1]=b c is not the name of a host; use one, such as user@host",
        "checkpoint.to='' is empty; give a text",
        "metrics.f1._target_=F1 is not the path of a class or function; name one, as "
        "my_module.Mine",
    ),
    Case(
        "steps_not_a_number",
        "train.steps=ten",
        "train.steps=ten is not a whole number; use one, such as 8",
    ),
    Case(
        "steps_zero",
        "train.steps=0",
        "train.steps=0 is below 1; use 1 or more",
    ),
    Case(
        "steps_fraction",
        "train.steps=2.5",
        "train.steps=2.5 is not a whole number; use 2 or 3",
    ),
    Case(
        "steps_true",
        "train.steps=true",
        "train.steps=true is not a whole number; use one, such as 8",
    ),
    Case(
        "ssh_to_no_host",
        "launcher=ssh",
        "launcher.hosts=[] names no host to start ranks on; name them, as "
        "launcher.hosts=[gpu1,gpu2]",
    ),
    Case(
        "ray_has_no_python",
        "launcher=ray launcher.python=/opt/venv/bin/python",
        "launcher.python=/opt/venv/bin/python is not a key of the config; launcher=ssh has it",
    ),
    Case(
        "a_wait_below_zero",
        "launcher=ray launcher.placement_s=-1",
        "launcher.placement_s=-1 is below 0; use 0 or more",
    ),
    Case(
        "sbatch_without_slurm",
        "launcher.sbatch.partition=gpu",
        "launcher.sbatch.partition=gpu is not a key of the config; launcher=slurm has it",
    ),
    Case(
        "lr_negative",
        "optimizer.lr=-1",
        "optimizer.lr=-1 is not above 0; use more than 0",
    ),
    Case(
        "lr_not_finite",
        "optimizer.lr=nan",
        "optimizer.lr=.nan is not finite; use a number such as 0.001",
    ),
    Case(
        "seed_negative",
        "seed=-1",
        "seed=-1 is below 0; use 0 or more",
    ),
    Case(
        "seed_fraction",
        "seed=1.5",
        "seed=1.5 is not a whole number; use 1 or 2",
    ),
    Case(
        "betas_three",
        "optimizer.betas=[1,2,3]",
        "optimizer.betas=[1, 2, 3] is not a list of two numbers; use one, such as [0.9, 0.999]",
    ),
    Case(
        "moments_of_lars",
        "optimizer=lars train.delink_at=4 model.share_layers=true",
        "train.delink_at=4 divides moments by the number of layers that shared them, and those of "
        "lars do not grow with a gradient; use optimizer=adamw, adam, lamb or sgd, or null",
    ),
    Case(
        "group_of_other_keys",
        "optimizer.groups=[{params:bias},lm_head,{match:[]}]",
        "optimizer.groups[0].match must be given; write optimizer.groups[0].match=VALUE",
        "optimizer.groups[0].params=bias is not a key here; use one of: lr_scale, match, "
        "trust_ratio, weight_decay",
        "optimizer.groups[1]=lm_head is not a mapping; write one, with keys of: lr_scale, match, "
        "trust_ratio, weight_decay",
        "optimizer.groups[2].match=[] is an empty list; write one, such as [first, second]",
    ),
    Case(
        "step_of_images",
        "data=image_folder data.path=. data.transform=[flip,random_cropp]",
        "data.transform[1]=random_cropp is unknown; did you mean random_crop? One of: "
        "center_crop, flip, random_crop, or write one, with keys of: _target_",
    ),
    Case(
        "steps_of_images",
        "data=image_folder data.path=. data.transform=7",
        "data.transform=7 is unknown; use one of: center_crop, flip, random_crop, or write one, "
        "with keys of: _target_, or write one, such as [first, second]",
    ),
    Case(
        "group_of_nothing",
        "optimizer.groups=[{match:nrom},{match:norm}]",
        "optimizer.groups[0].match=nrom matches no trained parameter of the model; use a "
        "parameter's path or a module's, such as norm, or *.bias",
    ),
    Case(
        "beta_too_large",
        "optimizer.betas=[0.9,1.5]",
        "optimizer.betas[1]=1.5 is not below 1; use less than 1",
    ),
    Case(
        "not_a_truth_value",
        "optimizer.fused=maybe",
        "optimizer.fused=maybe is not true or false; use true or false",
    ),
    Case(
        "section_not_a_mapping",
        "train=5",
        "train=5 is not a mapping; use train.KEY=VALUE",
    ),
    Case(
        "interpolation",
        "train.steps=${steps}",
        "train.steps cannot be resolved (Interpolation key 'steps' not found); give it a value, "
        "or point it at a key that exists",
    ),
    Case(
        "unknown_mode",
        "mode=trian",
        "mode=trian is unknown; did you mean train? One of: audit, calibrate, evaluate, "
        "export, plan, predict, rehearse, schedule, train, verify, view",
    ),
    Case(
        "profile_beyond_the_run",
        "train.steps=5 train.profile=[4,6]",
        "train.profile=[4, 6] is not a first and a last step of the run (train.steps=5); use two "
        "steps in order, as train.profile=[10,13], or null",
    ),
    Case(
        "rehearse_while_training",
        "rehearse=true",
        "rehearse=true has no effect on mode=train; use mode=plan or mode=rehearse, or "
        "rehearse=false",
    ),
    Case(
        "rehearse_nobody",
        "mode=rehearse rehearse=some",
        "rehearse=some is not true, false, all, or a list of ranks; use true, all, or as [0, 3]",
    ),
    Case(
        "unknown_precision",
        "train.precision=int8",
        "train.precision=int8 is unknown; use one of: bf16, fp16, fp32, fp8, null",
    ),
    Case(
        "fp8_on_devices_without_it",
        "train.precision=fp8 hardware=dgx_a100",
        "train.precision=fp8 is not computed by a100_sxm_80gb of hardware=dgx_a100; use fp32 or "
        "bf16 or fp16",
    ),
    Case(
        "clip_without_norm",
        "train.grad_norm=false train.grad_clip=1",
        "train.grad_norm=false is off, and train.grad_clip needs the gradient's norm; use "
        "train.grad_norm=true",
    ),
    Case(
        "betas_of_sgd",
        "optimizer=sgd +optimizer.betas=[0.9,0.99]",
        "optimizer.betas=[0.9, 0.99] has no effect on sgd; use optimizer=adamw, or leave it out",
    ),
    Case(
        "wsd_that_never_falls",
        "optimizer.schedule=wsd",
        "optimizer.schedule=wsd needs the number of its last steps, in which the learning rate "
        "falls; use optimizer.decay_steps=100, or the like",
    ),
    Case(
        "wsd_longer_than_the_run",
        "optimizer.schedule=wsd optimizer.decay_steps=20 optimizer.warmup_steps=9 train.steps=12",
        "optimizer.decay_steps=20 is more than the steps after the warm-up (3); use at most 3",
    ),
    Case(
        "decay_of_a_constant",
        "optimizer.decay_steps=5",
        "optimizer.decay_steps=5 has no effect on optimizer.schedule=constant; use "
        "optimizer.schedule=wsd, or 0",
    ),
    Case(
        "final_lr",
        "optimizer.final_lr_fraction=0.1",
        "optimizer.final_lr_fraction=0.1 has no effect on a constant schedule; use linear or "
        "cosine, or 0",
    ),
    Case(
        "missing_path",
        "data=arrays",
        "data.path must be given; write data.path=VALUE",
    ),
    Case(
        "hf_no_arch",
        "model=hf",
        "model.architecture is not given; write model.architecture=LlamaForCausalLM or the like",
    ),
    Case(
        "several_at_once",
        "train.stpes=5 strategy=zero4 strategy.balance=evn train.precision=fp23 train.steps=ten "
        "optimizer.lr=-1 seed=-1",
        f"strategy=zero4 is not an option; did you mean zero3? One of: {STRATEGIES}",
        "train.stpes=5 is not a key of the config; did you mean train.steps?",
        "optimizer.lr=-1 is not above 0; use more than 0",
        "train.steps=ten is not a whole number; use one, such as 8",
        "train.precision=fp23 is unknown; did you mean fp32? One of: bf16, fp16, fp32, fp8, null",
        "seed=-1 is below 0; use 0 or more",
    ),
)


# What `several_at_once` shows, or a case like it: a full run alone asks the command.
SHOWN_ELSEWHERE = (
    *("near_key", "near_strategy", "near_strategy_short", "near_model", "near_optimizer"),
    *("near_hardware", "near_data_key", "steps_not_a_number", "lr_negative", "seed_negative"),
    *("seed_fraction", "unknown_precision"),
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(x, marks=pytest.mark.full) if x.name in SHOWN_ELSEWHERE else x
        for x in (*COMMAND_LINE, *VALUES)
    ],
    ids=lambda case: case.name,
)
def test_refused(case: Case, refusal: Callable[[Case], tuple[Path, Answer]]) -> None:
    case.check(*refusal(case))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("near_key", marks=pytest.mark.full),
        "several_at_once",
        pytest.param("unknown_mode", marks=pytest.mark.full),
    ],
)
def test_a_fork_answers_as_a_process_does(
    name: str, tmp_path: Path, refusal: Callable[[Case], tuple[Path, Answer]]
) -> None:
    (case,) = (case for case in (*COMMAND_LINE, *VALUES) if case.name == name)
    assert case.run(tmp_path, whale_train_process) == refusal(case)[1]
