"""What the command says to strategies, hardware and files that are wrong before there is a model,
word for word."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.command import Answer
from tests.cli.refused import ON_THE_MIX, PLAN, Case

DEVICES = (
    "a100_pcie_40gb, a100_pcie_80gb, a100_sxm_40gb, a100_sxm_80gb, a10_24gb, a30_24gb, b200_180gb, "
    "cpu_process, gh200_96gb, h100_nvl_94gb, h100_pcie_80gb, h100_sxm_80gb, h200_sxm_141gb, "
    "l40s_48gb, l4_24gb, p100_pcie_16gb, rtx_3090_24gb, rtx_4090_24gb, rtx_5090_32gb, "
    "rtx_a6000_48gb, t4_16gb, v100_pcie_16gb, v100_pcie_32gb, v100_sxm2_16gb, v100_sxm2_32gb"
)
LINKS = (
    "ethernet_100g, ethernet_10g, ethernet_1g, ethernet_25g, ethernet_50g, infiniband_hdr200, "
    "infiniband_ndr400, nvlink2, nvlink3, nvlink4, nvlink5, pcie3_x16, pcie4_x16, pcie5_x16, "
    "shared_memory"
)

STRATEGY = (
    Case(
        "two_keys",
        "--config-dir my strategy=two",
        "strategy.graph has 2 keys (replicate, split); a node has one, its primitive",
    ),
    Case(
        "unknown_primitive",
        "--config-dir my strategy=odd",
        "strategy.graph[0].replicat is not a primitive; did you mean replicate? One of: "
        "pipeline, replicate, split, stage",
        "strategy.graph[1].split.dim=vocab is unknown; did you mean vocabulary? One of: auto, "
        "context, experts, sequence, tensor, vocabulary",
    ),
    Case(
        "split_beside_copies",
        "--config-dir my strategy=beside",
        "strategy.graph[1].split.zero is not a key here; use one of: degree, dim, modules, of, "
        "patterns",
        "strategy.graph[1].split.dim=sequence is unknown; use one of: auto, experts, tensor, "
        "vocabulary",
    ),
    Case(
        "nonsense_nesting",
        "--config-dir my strategy=nested",
        "strategy.graph.split.of.pipeline is a pipeline inside a split, and a shard has no "
        "pipeline of its own; put the split inside: pipeline.stages: [{split: ...}]",
    ),
    Case(
        "balance",
        "strategy.balance=evn",
        "strategy.balance=evn is unknown; did you mean even? One of: even, hardware",
    ),
    Case(
        "zero_stage",
        "strategy.graph.replicate.zero=5",
        "strategy.graph.replicate.zero=5 is not a ZeRO stage; use 0, 1, 2 or 3",
    ),
    Case(
        "near_strategy_key",
        "strategy.graph.replicate.zreo=1",
        "strategy.graph.replicate.zreo is not a key here; did you mean zero? One of: degree, "
        "modules, of, offload, recompute, state, zero",
    ),
    Case(
        "offload_without_zero",
        "strategy.graph.replicate.offload.optimizer=cpu",
        "strategy.graph.replicate.offload.optimizer=cpu needs ZeRO: the copies' optimizer state "
        "is only moved once it is partitioned; use strategy.graph.replicate.zero=1, 2 or 3",
    ),
    Case(
        "offload_parameters",
        "strategy=zero2 strategy.graph.replicate.offload.parameters=cpu",
        "strategy.graph.replicate.offload.parameters=cpu needs ZeRO 3: only partitioned "
        "parameters can live elsewhere; use strategy.graph.replicate.zero=3",
    ),
    Case(
        "degree_does_not_divide",
        f"strategy.graph.replicate.degree=3 {ON_THE_MIX}",
        "strategy.graph.replicate.degree=3 does not divide the 16 devices of "
        "hardware=v100_p100_mix; use 1, 2, 4, 8 or 16",
    ),
    Case(
        "bf16_batch",
        f"strategy=zero1 train.precision=bf16 train.global_batch=4 {ON_THE_MIX}",
        "train.precision=bf16 is not computed by p100_pcie_16gb and v100_sxm2_32gb of "
        "hardware=v100_p100_mix; use fp32 or fp16",
        "train.global_batch=4 leaves some of the 16 devices without a sample; use at least 16",
    ),
    Case(
        "zero_one_device",
        "strategy=zero1 hardware=cpu hardware.devices=1 mode=plan",
        "strategy.graph.replicate.zero=1 partitions over the copies, and 1 device has only one; "
        "use strategy=single, or more devices",
    ),
    Case(
        "split_one_device",
        "strategy=hybrid_split_dp hardware=cpu hardware.devices=1 mode=plan",
        "strategy.graph[1].split has nothing to divide over 1 device; use strategy=single, or "
        "more devices",
    ),
    Case(
        "too_many_devices",
        f"strategy=single strategy.devices=20 {ON_THE_MIX}",
        "strategy.devices=20 is more than the 16 of hardware=v100_p100_mix; use at most 16, or "
        "auto",
    ),
    Case(
        "modules_part",
        f"strategy.graph.replicate.modules=blocks {PLAN}",
        "strategy.graph.replicate.modules=blocks names a part of the model, and nothing in the "
        'strategy covers the rest; use "*", or a list with a node for the rest',
    ),
)

UNEXECUTED = (
    Case(
        "compare_while_training",
        "compare=[dp,zero1]",
        "compare=[dp, zero1] has no effect on mode=train; use mode=plan, or compare=[]",
    ),
    Case(
        "calibrate_others",
        "mode=calibrate hardware=v100_512",
        "mode=calibrate measures the devices that are here, and those of hardware=v100_512 are "
        "others; use hardware=local or hardware=cpu",
    ),
    Case(
        "compare_unknown",
        "mode=plan compare=[dp,zero7]",
        "compare=zero7 is not a strategy; did you mean zero3? One of: 3d, auto, dp, "
        "elastic_dp, experts_dp, hybrid_split_dp, interleaved, pipeline, single, split, split_dp, "
        "split_sequence, split_zero3, zero1, zero1_pipeline, zero2, zero2_offload, zero3, "
        "zero3_offload, zero_bubble",
    ),
    Case(
        "compare_no_names",
        "mode=plan compare=[1]",
        "compare=[1] is not a list of names; list names of strategies, as in compare=[dp,zero3]",
    ),
    Case(
        "verify_steps",
        "mode=verify verify.steps=5 train.steps=4",
        "verify.steps=5 is more than the run has (train.steps=4); use at most 4",
    ),
    Case(
        "verify_values",
        "mode=verify verify.steps=0 verify.tolerance=-1 verify.step=2",
        "verify.step=2 is not a key of the config; did you mean verify.steps?",
        "verify.steps=0 is below 1; use 1 or more",
        "verify.tolerance=-1 is not above 0; use more than 0",
    ),
    Case(
        "fp16_without_norm",
        "train.precision=fp16 train.grad_norm=false",
        "train.grad_norm=false is off, and train.precision=fp16 finds overflow by the gradient's "
        "norm; use train.grad_norm=true",
    ),
    Case(
        "loss_scale_of_fp32",
        "train.loss_scale=1024 optimizer=lamb strategy=zero1",
        "train.loss_scale=1024.0 has no effect on train.precision=fp32; use train.precision=fp16, "
        "or null",
    ),
    Case(
        "lamb_partitioned",
        "optimizer=lamb strategy=zero1 hardware=cpu hardware.devices=2",
        "strategy.graph.replicate.zero=1 partitions parameters anywhere, and optimizer=lamb needs "
        "the norm of each; use zero: 0, or optimizer=adamw",
    ),
    Case(
        "micro_batches_of_none",
        "train.accumulate=9 hardware=cpu hardware.devices=2 train.global_batch=16",
        "train.accumulate=9 cuts a device's share into micro-batches of none "
        "(train.global_batch=16 on 2 devices); use at most 8",
    ),
    Case(
        "groups_as_lists",
        f"{PLAN} strategy=[dp,zero1] model=[gpt]",
        "strategy=[dp,zero1] is a list, and one option is read; write strategy=NAME",
        "model=[gpt] is a list, and one option is read; write model=NAME",
    ),
    Case(
        "checkpoints",
        "train.checkpoint_every=5 checkpoint.evry=2",
        "train.checkpoint_every=5 is not a key of the config; use checkpoint.every=100 (steps, or "
        "a time as 30min)",
        "checkpoint.evry=2 is not a key of the config; did you mean checkpoint.every?",
    ),
    Case(
        "speed_of_own_devices",
        f"launcher.device_speed=true {PLAN}",
        "launcher.device_speed=true has no effect where ranks are the devices of hardware=cpu "
        "themselves; use false",
    ),
    Case(
        "speed_of_equal_devices",
        "launcher.device_speed=true mode=plan hardware=v100_512 train.global_batch=512",
        "launcher.device_speed=true has no effect on the devices of hardware=v100_512, all of "
        "one kind; use false",
    ),
    Case(
        "speeds_of_own_devices_and_links",
        f"launcher.device_speed=true launcher.link_speed=true {PLAN}",
        "launcher.device_speed=true has no effect where ranks are the devices of hardware=cpu "
        "themselves; use false",
        "launcher.link_speed=true has no effect where ranks are the devices of hardware=cpu "
        "themselves; use false",
    ),
    Case(
        "speed_of_equal_links",
        f"launcher.link_speed=true strategy.devices=8 {ON_THE_MIX}",
        "launcher.link_speed=true has no effect on the links of hardware=v100_p100_mix, all of "
        "one bandwidth; use false",
    ),
    Case(
        "speed_of_no_link",
        f"launcher.link_speed=true strategy=single {ON_THE_MIX}",
        "launcher.link_speed=true has no effect on 1 device of hardware=v100_p100_mix, which "
        "nothing is linked to; use false",
    ),
    Case(
        "pipeline",
        f"strategy=pipeline {PLAN}",
        "strategy.graph.pipeline.stages leaves 2 of 2 devices of hardware=cpu to share among 4 "
        "stages; use 1 or 2 stages",
    ),
    Case(
        "3d",
        f"strategy=3d {PLAN}",
        "strategy.graph.replicate=4 devices does not divide the 2 devices of hardware=cpu; use 1 "
        "or 2",
    ),
    Case(
        "split",
        f"strategy=split {PLAN} hardware.devices=1",
        "strategy.graph.split has nothing to divide over 1 device; use strategy=single, or more "
        "devices",
    ),
    Case(
        "split_pattern",
        f"strategy=split 'strategy.graph.split.patterns={{*.norm: colum}}' {PLAN}",
        "strategy.graph.split.patterns.*.norm=colum is unknown; did you mean column? One of: "
        "column, experts, replicate, row, vocabulary",
    ),
    Case(
        "pipeline_micro_batches",
        f"strategy=pipeline strategy.graph.pipeline.stages=2 {PLAN} "
        "strategy.graph.pipeline.micro_batches=9 train.global_batch=8",
        "strategy.graph.pipeline.micro_batches=9 cuts the 8 samples of a copy into micro-batches "
        "of none; use at most 8",
    ),
    Case(
        "pipeline_modules",
        f"'strategy.graph={{pipeline: {{stages: [{{stage: {{modules: heed}}}}, stage]}}}}' {PLAN}",
        "strategy.graph.pipeline.stages[0].stage.modules=heed names no module that computes; use "
        "a path below blocks, lm_head, norm, position, token",
    ),
    Case(
        "pipeline_of_zero_3",
        f"strategy=zero1_pipeline strategy.graph.replicate.zero=3 {PLAN} hardware.devices=4",
        "strategy.graph.replicate.zero=3 gathers parameters with all copies at every forward, and "
        "in a pipeline copies take different micro-batches at different times; use 1 (a stage's "
        "optimizer state is what is largest), or no pipeline",
    ),
    Case(
        "nvme",
        "strategy=zero3_offload strategy.graph.replicate.offload.optimizer=nvme "
        f"strategy.graph.replicate.offload.parameters=nvme {PLAN}",
        "strategy.graph.replicate.offload.path is missing, and state is on NVMe; give a folder of "
        "a local disk, as /nvme/scratch",
    ),
)

MACHINE_AND_FILES = (
    Case(
        "missing_file",
        f"data=arrays data.path=smaples.npz {PLAN}",
        "data.path={here}/smaples.npz does not exist; did you mean {here}/samples.npz?",
    ),
    Case(
        "no_such_folder",
        f"data.path=a/b/c {PLAN}",
        "data.path={here}/a/b/c does not exist; the path exists only as far as {here}",
    ),
    Case(
        "not_an_npz",
        f"data=arrays data.path=samples.npz {PLAN}",
        "data.path={here}/samples.npz is not an .npz file; write one with numpy.savez(path, "
        "name=array, ...)",
    ),
    Case(
        "text_too_short",
        f"data.path=short.txt {PLAN}",
        "data.path={here}/short.txt holds 5 bytes, less than one sequence of "
        "data.sequence_length=64; use data.sequence_length=5 or less, or more text",
    ),
    Case(
        "empty_inventory",
        "hardware=v100_p100_mix hardware.nodes=[] mode=plan",
        "hardware.nodes=[] has no devices; name at least one node, for instance [{devices: 8, "
        "device: a100_sxm_80gb, link: nvlink3}]",
    ),
    Case(
        "unknown_device_and_links",
        "hardware=v100_p100_mix 'hardware.nodes=[{devices: 8, device: v100_sxm_32gb, link: "
        "nvlnk2}]' hardware.network=ethernt_50g mode=plan",
        "hardware.nodes[0].device=v100_sxm_32gb is no device of the catalogue; did you mean "
        f"v100_sxm2_32gb? One of: {DEVICES}; or give its figures as a mapping",
        "hardware.nodes[0].link=nvlnk2 is no link of the catalogue; did you mean nvlink2? One "
        f"of: {LINKS}; or give its figures as a mapping",
        "hardware.network=ethernt_50g is no link of the catalogue; did you mean ethernet_50g? "
        f"One of: {LINKS}; or give its figures as a mapping",
    ),
    Case(
        "slurm_of_a_node",
        "hardware=v100_p100_mix '+hardware.nodes.1.slurm={partitions: old, qos: [a]}' "
        "launcher=slurm launcher.sbatch.time=soon mode=plan",
        "hardware.nodes[1].slurm.partitions=old is no key of a node's request to Slurm; did you "
        "mean partition? One of: account, constraint, cpus_per_task, gres, mem, partition, qos, "
        "reservation",
        "hardware.nodes[1].slurm.qos=['a'] is no value of an option of sbatch; use text, or leave "
        "it out",
        "launcher.sbatch.time=soon is no time of Slurm's; give minutes, or as 12:00:00 or "
        "2-00:00:00",
    ),
    Case(
        "negative_devices",
        "hardware=cpu hardware.devices=-1 mode=plan",
        "hardware.devices=-1 is not positive; use 1 or more",
    ),
    Case(
        "hardware_and_data",
        "hardware=cpu hardware.devices=0 data=arrays data.path=gone.npz mode=plan",
        "hardware.devices=0 is not positive; use 1 or more",
        "data.path={here}/gone.npz does not exist; nothing in {here} has a name like it",
    ),
    Case(
        "launcher_local",
        "hardware=v100_p100_mix launcher=local",
        "launcher=local needs the devices of hardware=v100_p100_mix, and this machine has no "
        "GPU; use launcher=emulate, or hardware=local",
    ),
    Case(
        "no_compiler",
        "strategy=zero2_offload hardware=cpu hardware.devices=2",
        "strategy.graph.replicate.offload.optimizer=cpu needs DeepSpeed's CPU optimizer, which "
        "is compiled at first use, and there is no missing-c++; install g++ and ninja, or use "
        "optimizer=sgd, or a strategy without offload",
        environment={"CXX": "missing-c++"},
    ),
    Case(
        "no_compiler_on_the_path",
        "strategy=zero3_offload optimizer=adam hardware=cpu hardware.devices=2",
        "strategy.graph.replicate.offload.optimizer=cpu needs DeepSpeed's CPU optimizer, which is "
        "compiled at first use, and there is no c++; install g++ and ninja, or use "
        "optimizer=sgd, or a strategy without offload",
        # ninja, which pip installs beside this Python, is found all the same.
        environment={"CXX": "c++", "PATH": "/nowhere"},
    ),
    Case(
        "nothing_to_compile_with",
        "train.compile=true hardware=cpu hardware.devices=2",
        "train.compile=true needs a C++ compiler for CPUs, and there is no missing-c++; install "
        "g++, or use false",
        environment={"CXX": "missing-c++"},
    ),
    Case(
        "other_16_bits",
        "train.precision=bf16 train.reduce_dtype=fp16 hardware=cpu",
        "train.reduce_dtype=fp16 is neither the precision of the run (bf16) nor fp32; use "
        "train.precision=fp16, or train.reduce_dtype=fp32",
    ),
)

CASES = (*STRATEGY, *UNEXECUTED, *MACHINE_AND_FILES)

# What another case shows, or a test of the plan or of the machine: a full run alone asks the
# command.
SHOWN_ELSEWHERE = (
    *("zero_stage", "offload_parameters", "degree_does_not_divide", "zero_one_device", "3d"),
    *("split_one_device", "split", "too_many_devices", "modules_part", "split_pattern"),
    *("pipeline_micro_batches", "pipeline_modules", "pipeline_of_zero_3", "micro_batches_of_none"),
    *("lamb_partitioned", "fp16_without_norm", "other_16_bits", "checkpoints"),
    *("speed_of_own_devices", "negative_devices", "launcher_local", "no_compiler"),
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=pytest.mark.full) if x.name in SHOWN_ELSEWHERE else x for x in CASES],
    ids=lambda case: case.name,
)
def test_refused(case: Case, refusal: Callable[[Case], tuple[Path, Answer]]) -> None:
    case.check(*refusal(case))
