"""Translate the settings of other trainers into settings of this one.

The names are those of Lightning, transformers' TrainingArguments, accelerate, DeepSpeed,
Megatron-LM, torchtitan, Keras and EPL. A name matches every path that ends with it: `lr` matches
`train.lr`, `trainer.lr` and `--lr`. Of two names that match, the longer one is taken.
"""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Instead:
    """The settings that take the place of another trainer's setting.

    settings: settings that can be set together, each with an example of a value; empty where no
        setting takes the place.
    note: what the user has to know of the settings, or why there are none.
    """

    settings: tuple[str, ...]
    note: str = ""

    @property
    def remedy(self) -> str:
        """Return the remedy of a message: the text after the semicolon."""
        if not self.settings:
            return f"there is none: {self.note}"
        settings = " ".join(shlex.quote(x) if " " in x else x for x in self.settings)
        return f"use {settings}" + (f" ({self.note})" if self.note else "")

    def chooses(self, group: str) -> bool:
        """Return whether the first of the settings chooses an option of `group`."""
        return bool(self.settings) and self.settings[0].startswith(f"{group}=")


_BATCH = Instead(
    ("train.global_batch=64",), "samples a step of all devices together; each's share is planned"
)
_PER_DEVICE = Instead(
    ("train.global_batch=64",),
    "samples a step of all devices together: there is no number per device, its share is planned",
)
_ACCUMULATE = Instead(("train.accumulate=4",), "the global batch stays what it is")
_STEPS = Instead(("train.steps=1000",), "optimizer steps")
_EPOCHS = Instead(("train.epochs=3",), "or train.steps, optimizer steps")
_PRECISION = Instead(("train.precision=bf16",), "or fp16, or fp32")
_FP16 = Instead(("train.precision=fp16",))
_BF16 = Instead(("train.precision=bf16",))
_FP32 = Instead(("train.precision=fp32",))
_LOSS_SCALE = Instead(("train.precision=fp16", "train.loss_scale=32768"), "fp16's first")
_ZERO = Instead(("strategy=zero1",), "or zero2, zero3")
_OFFLOAD = Instead(("strategy=zero3_offload",), "or zero2_offload")
_SHARDED = Instead(("strategy=zero3",))
_TENSOR = Instead(("strategy=split",), "or split_dp, 3d, or a strategy.graph of your own")
_PIPELINE = Instead(("strategy=pipeline",), "or 3d, or a strategy.graph of your own")
_EXPERTS = Instead(("strategy=experts_dp",))
_COPIES = Instead(
    ("strategy=dp",), "copies are as many as devices, or strategy.graph.replicate.degree"
)
_SEQUENCE = Instead(("strategy=split_sequence",))
_STRATEGY = Instead(("strategy=auto",), "or a name: see whale-train --help")
_DEVICES = Instead(("strategy.devices=4",), "the first four; with hardware=cpu hardware.devices=4")
_NODES = Instead(
    ("hardware=v100_p100_mix",), "an inventory of the nodes, conf/hardware or a file of your own"
)
_NODES_SLURM = Instead(("launcher=slurm", "launcher.nodes=2"), "elsewhere the inventory says it")
_ACCELERATOR = Instead(
    ("hardware=local",), "the GPUs that CUDA_VISIBLE_DEVICES leaves; hardware=cpu for CPUs"
)
_EVALUATE = Instead(("train.evaluate_every=100",), "steps")
_EVALUATE_SAMPLES = Instead(("train.evaluation_samples=512",))
_SAVE_EVERY = Instead(("checkpoint.every=100",), "steps, or a time as 30min")
_SAVE_KEEP = Instead(("checkpoint.every=100", "checkpoint.keep=3"))
_RESUME = Instead(("train.resume=auto",), "or a run directory, or a checkpoint in one")
_OUTPUT = Instead(("hydra.run.dir=runs/mine",))
_RATE = Instead(("optimizer.lr=0.001",))
_OPTIMIZER = Instead(("optimizer=adamw",), "or adam, sgd, lamb, lars")
_SCHEDULE = Instead(
    ("optimizer.schedule=cosine",), "or linear, polynomial, wsd, inverse_sqrt, constant"
)
_WARMUP = Instead(("optimizer.warmup_steps=100",))
_WARMUP_RATIO = Instead(
    ("optimizer.warmup_steps=100",), "a number of steps: train.steps times the ratio"
)
_DECAY = Instead(("optimizer.weight_decay=0.01",))
_BETAS = Instead(("optimizer.betas=[0.9,0.95]",))
_MOMENTUM = Instead(("optimizer=sgd", "optimizer.momentum=0.9"))
_CLIP = Instead(("train.grad_clip=1.0",))
_SEED = Instead(("seed=1",))
_TENSORBOARD = Instead(("trackers=[tensorboard]",), "metrics.jsonl is written always")
_TRACKER = Instead(("trackers=[wandb]",), "or mlflow, trackio, tensorboard, one of your own")
_WANDB = Instead(("trackers=[{name: wandb, project: mine}]",), "offline without WANDB_API_KEY")
_MLFLOW = Instead(
    ("trackers=[{name: mlflow, experiment: mine}]",), "its uri is MLFLOW_TRACKING_URI without one"
)
_TRACKIO = Instead(("trackers=[{name: trackio, project: mine}]",))
_LOGGED = Instead((), "every step is logged, to metrics.jsonl of the run directory")
_WORKERS = Instead(
    ("data._target_=my.module.MyDataset", "data.workers=2"),
    "other data than your own classes is read beside the steps by itself",
)
_SHUFFLE = Instead(("data.shuffle=false",), "true without it")
_DATA = Instead(
    ("data=text_files", "data.path=corpus/*.jsonl"),
    "or data=image_folder, webdataset, arrays, hf_dataset, or data._target_=my.module.MyDataset",
)
_TOKENIZER = Instead(("data=text_files", "data.tokenizer=DIR"), "or owner/name of the hub")
_PACKING = Instead(("data=text_files", "data.pack={mode: best_fit, documents: isolated}"))
_LENGTH = Instead(("data=text_files", "data.sequence_length=1024"))
_NAME = Instead(("model=hf", "model.architecture=LlamaForCausalLM"))
_WEIGHTS = Instead(
    ("model=hf", "model.architecture=LlamaForCausalLM", "model.pretrained=DIR"),
    "a folder that save_pretrained wrote, or owner/name of the hub",
)
_SETTINGS = Instead(
    ("model=hf", "model.architecture=LlamaForCausalLM", "model.config={num_hidden_layers: 2}"),
    "under the names of the architecture's own config",
)
_LORA = Instead(
    ("model=hf", "model.architecture=LlamaForCausalLM", "model.adapters={r: 8}"),
    "settings of peft's LoraConfig",
)
_STAGES = "[{stage: {recompute: full}}, {stage: {recompute: full}}]"
_RECOMPUTE = Instead((f"strategy.graph={{pipeline: {{stages: {_STAGES}}}}}",))
_COMPILE = Instead(("train.compile=true",))
_SYNC = Instead((), "batch norm has the statistics of the global batch; leave it out")
_UNUSED = Instead((), "parameters without a gradient are found, and are not updated; leave it out")
_OVERLAP = Instead((), "what overlaps is planned; leave it out")
_TIMEOUT = Instead(("launcher.timeout_s=1800",))
_HOSTS = Instead(("launcher=ssh", "launcher.hosts=[gpu1,gpu2]"), "or torchrun, or launcher=slurm")
_PROFILE = Instead(("train.profile=[10,13]",), "the first and the last step")
_TF32 = Instead(("train.tf32=true",))
_DEBUG = Instead(("train.steps=2",))
_DROPOUT = Instead((), "no key for all models: it is an argument of the model's own, if it has one")
_STOP = Instead(
    ("train.evaluate_every=100", "train.stop_after={evaluations: 3, metric: evaluation_loss}")
)
_BEST = Instead(
    ("train.evaluate_every=100", "checkpoint.best=evaluation_loss"),
    "checkpoint.final=best makes model/ of it",
)
_RESTARTS = Instead(("launcher.max_restarts=3", "checkpoint.every=100"))

_TABLE: Mapping[Instead, str] = {
    _BATCH: "batch_size global_batch_size total_batch_size train_batch_size batch bs "
    "effective_batch_size",
    _PER_DEVICE: "per_device_train_batch_size per_device_batch_size micro_batch_size "
    "train_micro_batch_size_per_gpu local_batch_size per_gpu_batch_size micro_batch "
    "per_gpu_train_batch_size train_micro_batch_size num_microbatches",
    _ACCUMULATE: "gradient_accumulation_steps accumulate_grad_batches grad_accum "
    "gradient_accumulation accumulation_steps grad_accum_steps ga_iters num_micro_batch "
    "num_micro_batches",
    _STEPS: "max_steps train_steps num_steps train_iters max_iters total_steps num_train_steps "
    "iterations training_steps num_iterations max_train_steps",
    _EPOCHS: "epochs max_epochs num_epochs num_train_epochs min_epochs epoch",
    _PRECISION: "mixed_precision amp dtype torch_dtype autocast amp_level mixed_precision_param "
    "mp precision_plugin",
    _FP16: "fp16 half float16 fp16.enabled use_fp16 fp16_full_eval",
    _BF16: "bf16 bfloat16 bf16.enabled use_bf16 bf16_full_eval",
    _FP32: "fp32 float32 no_half",
    _LOSS_SCALE: "fp16.loss_scale initial_loss_scale initial_scale_power init_scale loss_scale "
    "fp16.initial_scale_power",
    _ZERO: "zero zero_stage zero_optimization zero_optimization.stage deepspeed deepspeed_config "
    "deepspeed_stage deepspeed_stage_1 deepspeed_stage_2 zero_level use_distributed_optimizer "
    "zero.level deepspeed_plugin",
    _OFFLOAD: "offload cpu_offload offload_optimizer offload_param optimizer_offload "
    "zero_optimization.offload_optimizer.device zero_optimization.offload_param.device "
    "offload_optimizer_device offload_param_device offload_optimizer.device offload.level "
    "zero_optimization.offload_optimizer zero_optimization.offload_param",
    _SHARDED: "fsdp fsdp_config fsdp_plugin data_parallel_shard_degree sharding_strategy "
    "use_fsdp dp_shard deepspeed_stage_3 fsdp2 fsdp_transformer_layer_cls_to_wrap",
    _TENSOR: "tensor_parallel_size tensor_model_parallel_size tp_size tp tensor_parallel_degree "
    "tensor_parallel model_parallel_size tensor_parallelism",
    _PIPELINE: "pipeline_parallel_size pipeline_model_parallel_size pp_size pp "
    "pipeline_parallel_degree pipeline_parallel num_stages pipeline.num_stages",
    _EXPERTS: "expert_parallel_size expert_model_parallel_size ep_size ep expert_parallel_degree "
    "moe_expert_parallel_size expert_parallel",
    _COPIES: "data_parallel_size dp_size data_parallel_replicate_degree ddp use_ddp dp_replicate "
    "data_parallel ddp_spawn ddp_notebook",
    _SEQUENCE: "sequence_parallel sequence_parallel_size sp_size enable_sequence_parallel",
    _STRATEGY: "distributed_type distributed_backend parallelism parallel_strategy "
    "strategy_name auto.auto_parallel auto_parallel",
    _DEVICES: "num_gpus gpus devices n_gpus ngpus num_devices n_gpu num_gpu gpu_ids gpu "
    "num_processes world_size nproc nprocs nproc_per_node",
    _NODES: "inventory hostfile include",
    _NODES_SLURM: "nodes num_nodes nnodes num_machines",
    _ACCELERATOR: "accelerator device use_cpu no_cuda cuda use_cuda tpu_cores use_gpu",
    _EVALUATE: "eval_every eval_steps eval_interval val_check_interval check_val_every_n_epoch "
    "evaluation_strategy eval_strategy validate_every do_eval val_interval eval_freq",
    _EVALUATE_SAMPLES: "limit_val_batches eval_iters eval_samples max_eval_samples eval_batches "
    "per_device_eval_batch_size eval_batch_size val_batch_size",
    _SAVE_EVERY: "save_steps save_interval save_every checkpoint_every checkpoint_interval "
    "every_n_train_steps save_strategy checkpointing_steps save_freq enable_checkpoint "
    "checkpoint.interval enable_checkpointing checkpoint.folder",
    _SAVE_KEEP: "save_total_limit save_top_k keep_latest_k keep_last total_limit",
    _RESUME: "resume_from_checkpoint ckpt_path load resume_from checkpoint_path resume "
    "restore_from load_checkpoint initial_load_path load_dir auto_resume",
    _OUTPUT: "output_dir default_root_dir save_dir work_dir out_dir log_dir run_dir logdir "
    "logging_dir save dump_folder exp_dir project_dir output_path",
    _RATE: "lr learning_rate base_lr max_lr optimizer.params.lr init_lr",
    _OPTIMIZER: "optim optimizer_type optimizer.type optimizer_name opt use_adam",
    _SCHEDULE: "lr_scheduler lr_scheduler_type lr_decay_style scheduler lr_schedule "
    "scheduler.type decay_type lr_decay",
    _WARMUP: "warmup_steps warmup num_warmup_steps lr_warmup_steps warmup_num_steps "
    "lr_warmup_iters warmup_iters scheduler.params.warmup_num_steps",
    _WARMUP_RATIO: "warmup_ratio lr_warmup_fraction warmup_fraction warmup_proportion "
    "warmup_epochs",
    _DECAY: "weight_decay wd optimizer.params.weight_decay l2",
    _BETAS: "adam_beta1 adam_beta2 beta1 beta2 optimizer.params.betas betas",
    _MOMENTUM: "momentum",
    _CLIP: "gradient_clip_val max_grad_norm gradient_clipping clip_grad max_norm grad_norm_clip "
    "clip_grad_norm gradient_clip clip gradient_clip_norm clipnorm grad_clip_norm",
    _SEED: "seed seed_everything random_seed manual_seed data_seed rng_seed",
    _TENSORBOARD: "tensorboard enable_tensorboard tensorboard_dir use_tensorboard",
    _TRACKER: "report_to logger log_with tracker loggers comet neptune tracker_name init_trackers",
    _WANDB: "wandb use_wandb wandb_project enable_wandb wandb.project wandb.enabled wandb_entity "
    "wandb_run_name wandb_mode wandb.entity wandb.name wandb.mode",
    _MLFLOW: "mlflow use_mlflow enable_mlflow mlflow.experiment_name mlflow_tracking_uri "
    "mlflow.tracking_uri mlflow_experiment_name mlflow.experiment mlflow.uri",
    _TRACKIO: "trackio use_trackio trackio_space_id trackio.project",
    _LOGGED: "log_every_n_steps logging_steps log_interval log_freq steps_per_print log_every "
    "print_freq logging_strategy logging_first_step log_level",
    _WORKERS: "num_workers dataloader_num_workers workers pin_memory dataloader_pin_memory "
    "prefetch_factor persistent_workers",
    _SHUFFLE: "shuffle shuffle_data",
    _DATA: "dataset dataset_name data_path dataset_path train_file data_dir train_data "
    "train_dataset dataset_dir",
    _LENGTH: "seq_length seq_len max_seq_length block_size max_length context_length seqlen "
    "sequence_length",
    _TOKENIZER: "tokenizer_name tokenizer tokenizer_name_or_path tokenizer_path tokenizer_model",
    _PACKING: "packing sample_packing pack_sequences eval_sample_packing packed",
    _NAME: "model_name model_type arch",
    _WEIGHTS: "model_name_or_path pretrained_model_name_or_path pretrained from_pretrained "
    "load_in_8bit",
    _SETTINGS: "num_layers hidden_size num_attention_heads n_layer n_embd n_head n_layers "
    "ffn_hidden_size max_position_embeddings vocab_size",
    _LORA: "lora lora_r lora_rank lora_alpha peft use_lora peft_config lora_dropout use_peft "
    "lora_target_modules",
    _RECOMPUTE: "gradient_checkpointing activation_checkpointing recompute activation_checkpoint "
    "recompute_granularity gradient_checkpointing_enable selective_ac_option "
    "recompute_activations checkpoint_activations gradient_checkpoint.type",
    _COMPILE: "torch_compile compile jit use_compile dynamo_backend compile_model dynamo",
    _SYNC: "sync_bn sync_batchnorm use_sync_bn sync_batch_norm",
    _UNUSED: "find_unused_parameters ddp_find_unused_parameters",
    _OVERLAP: "overlap_comm overlap_grad_reduce overlap_param_gather bucket_cap_mb "
    "ddp_bucket_cap_mb reduce_bucket_size allgather_bucket_size contiguous_gradients "
    "static_graph gradient_as_bucket_view",
    _TIMEOUT: "ddp_timeout timeout distributed_timeout_minutes process_group_timeout",
    _HOSTS: "hosts master_addr master_port main_process_ip main_process_port rdzv_endpoint "
    "machine_rank node_rank hostnames",
    _PROFILE: "profiler profile enable_profiling use_pytorch_profiler profile_steps profiling",
    _TF32: "tf32 allow_tf32 float32_matmul_precision",
    _DEBUG: "fast_dev_run overfit_batches dry_run sanity_check limit_train_batches "
    "num_sanity_val_steps max_train_samples",
    _DROPOUT: "dropout hidden_dropout attention_dropout dropout_rate dropout_p",
    _BEST: "load_best_model_at_end metric_for_best_model save_best_only monitor best_metric",
    _STOP: "early_stopping max_time patience early_stopping_patience max_duration exit_duration",
    _RESTARTS: "max_restarts max_retries fault_tolerant restart_policy",
}  # fmt: skip
INSTEAD: Mapping[str, Instead] = {
    name: instead for instead, names in _TABLE.items() for name in names.split()
}


def known_elsewhere(key: str, taken: Iterable[str] = ()) -> Instead | None:
    """Return the replacement for a key or flag of another trainer, or None where the table does not
    have it.

    key: the key or flag, with or without leading dashes.
    taken: keys of this request, which are not looked up.
    """
    parts = key.lstrip("+~-").replace("-", "_").lower().split(".")
    if ".".join(parts) in taken:
        return None
    paths = (".".join(parts[i:]) for i in range(len(parts)))
    return next((INSTEAD[path] for path in paths if path in INSTEAD), None)
